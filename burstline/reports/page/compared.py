"""The sections of a comparison: who is faster, what was equal, which runs these are; a sweep's trade-off."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from burstline.measure.record.verdict import State
from burstline.measure.stats.figure import Absent, Estimate, Figure
from burstline.measure.stats.significance import Contrast
from burstline.measure.verdict.comparable import NOT_STATED, Fact
from burstline.reports.blocks import Block, Cell, Findings, Folded, Note, Plot, Side, Table, table
from burstline.reports.figures.contenders import Ratio, forest
from burstline.reports.figures.drawing import HALF, in_both_widths
from burstline.reports.figures.scatter import Dot, Region, ScatterCurve, scatter
from burstline.reports.model.comparison import (
    E2E,
    JUDGED,
    OUTPUT,
    TITLES,
    Case,
    Comparison,
    Contender,
    Pair,
    Path,
    better,
)
from burstline.reports.model.sweep_load import KINDS, SweepLoad, load_range
from burstline.reports.model.sweeps import Point, Sweep
from burstline.reports.number_format import Scale, in_brackets, interval, number, point, reach_of, scale_of
from burstline.reports.page.answer import pair_words
from burstline.reports.page.bottleneck import limits_of
from burstline.reports.page.estimate_tables import figure_cell
from burstline.reports.page.sections import distributions, side_of
from burstline.reports.page.side_by_side import side_by_side, times_of
from burstline.reports.page.sweep_words import (
    Cost,
    all_loads,
    best_loads,
    best_within,
    costs_of,
    output_key,
    remarks,
    slo_words,
)
from burstline.reports.sentences import say

SHORT = {"Peak memory of the server's processes": "Host memory", "Peak memory of the devices": "GPU memory"}
"""Titles that are too long beside a figure."""


def numbers(case: Case, prefix: str) -> list[Block]:
    """How many times better the fastest is, all numbers, and what they say; without ranking where refused."""
    if case.gate.comparable or case.is_alone:
        # What limited the contenders stands at the top of the page where this is its only case.
        limits = tuple(limits_of([case])) if prefix else ()
        return [*_forests(case, prefix), side_by_side(case), *map(Findings, filter(None, [limits]))]
    if case.gate.state == State.NOT_COMPARABLE:
        return [side_by_side(case)]
    return [Note(say("nothing-ranked", state=case.gate.state)), side_by_side(case)]


def _forests(case: Case, prefix: str) -> Iterator[Block]:
    """A figure for the fastest against each other contender: how many times better in each number."""
    explain = True
    for k, (pair, contrasts) in enumerate(case.pairs()):
        if ratios := [r for path in JUDGED if (r := _ratio(case, pair, path, contrasts.get(path)))]:
            finding = f"{pair_words(pair, contrasts)}."
            yield forest(f"{prefix}forest-{k}", pair, ratios, finding, explain=explain)
            explain = False


def _ratio(case: Case, pair: Pair, path: Path, contrast: Contrast | Absent | None) -> Ratio | None:
    if not isinstance(contrast, Contrast) or not contrast.ratio.point:
        return None
    title, which = TITLES[path]
    sign = 1.0 if which == "higher" else -1.0
    of_one, of_other = (case.named(label).points(path) for label in pair)
    runs: tuple[float, ...] = ()
    if (
        not isinstance(of_one, Absent)
        and not isinstance(of_other, Absent)
        and len(of_one) > 1
        and min(*of_one, *of_other) > 0
    ):
        base = math.exp(sum(map(math.log, of_other)) / len(of_other))
        runs = tuple((value / base) ** sign for value in of_one)
    ends = [end**sign for end in (contrast.ratio.low, contrast.ratio.high) if end]
    low, high = (min(ends), max(ends)) if len(ends) == 2 else (None, None)
    decided, times = better(contrast, which) is not None, times_of(contrast, title, which)
    better_by = contrast.ratio.point**sign
    return Ratio(SHORT.get(title, title), better_by, low, high, runs, decided, times.text, times.interval)


def differences(case: Case, _: str) -> list[Block]:
    """What differs beyond its tolerance, what could not be checked, and, folded, what is equal."""
    differing, unknown, equal = (
        [fact for fact in case.gate.facts if fact.agrees is agrees] for agrees in (False, None, True)
    )
    blocks: list[Block] = [Note("All checked properties agree within their tolerances.")]
    if differing:
        blocks = [_facts(differing, case, "Differences beyond the tolerance")]
    if unknown:
        blocks.append(_facts(unknown, case, "Not checked, because not every engine reports it"))
    if equal:
        blocks.append(Folded(f"{len(equal)} properties agree", (_facts(equal, case, "Equal properties"),)))
    return blocks


def _facts(facts: Sequence[Fact], case: Case, caption: str) -> Table:
    columns = ["Property", *case.labels, "Tolerance"]
    rows = [[f.name, *(f.values.get(label, NOT_STATED) for label in case.labels), f.tolerance] for f in facts]
    return table(caption, columns, rows, text=range(len(columns)))


def shape(case: Case, prefix: str) -> list[Block]:
    """The distributions of TTFT, TPOT and E2E, one curve a contender."""
    explained = "figure.ecdfs" if len(case.contenders) > 1 else "figure.ecdf"
    return side_of(distributions(case.contenders, "ttft", "tpot", "e2e", prefix=prefix), say(explained))


def platforms(comparison: Comparison) -> list[Block]:
    """For each engine the distributions of one work on all platforms, on one axis; empty for one platform."""
    groups: dict[tuple[str, str, str], dict[str, tuple[Case, Contender]]] = {}
    for case in comparison.cases:
        for contender in case.contenders:
            view = contender.views[0]
            work = (contender.label, str(replace(view.manifest.asked, salt="")), view.facts["model"])
            groups.setdefault(work, {}).setdefault(view.facts["devices"], (case, contender))
    blocks: list[Block] = []
    for k, ((label, *_), found) in enumerate(groups.items()):
        if len(found) > 1 and all(found):
            curves = [Contender(devices, contender.views) for devices, (_, contender) in found.items()]
            plots = tuple(distributions(curves, "ttft", "tpot", "e2e", prefix=f"p{k}-"))
            names = "; ".join(case.name for case, _ in found.values())
            blocks += [Note(f"{label}: {names}."), Side(plots, say("figure.ecdfs"))] if plots else []
    return blocks


def runs(case: Case, _: str) -> list[Block]:
    """Every run with its own report, and how far runs of one contender scatter."""
    rows = [
        (
            each.label,
            Cell(view.name, href=case.hrefs[view.name], tone="code"),
            view.summary.verdict.state,
            f"{view.summary.counts['ok']:,} of {view.summary.counts['planned']:,}",
        )
        for each in case.contenders
        for view in each.views
    ]
    columns = ["Contender", "Run", "Reliable?", "Served as asked"]
    return [table("Every run, with its own report", columns, rows, text=(0, 1, 2))]


def grid(comparison: Comparison, anchors: Mapping[int, str]) -> Table | None:
    """Contenders by cases: E2E p50 with its interval and output rate; each links to its section.

    None for fewer than two cases.
    """
    cases = comparison.cases
    if len(cases) < 2:
        return None
    labels = list(dict.fromkeys(label for case in cases for label in case.labels))
    rows: list[list[str | Cell]] = [["Comparable?", *(_state(case, anchors[id(case)]) for case in cases)]]
    for label in labels:
        known = [next((c for c in case.contenders if c.label == label), None) for case in cases]
        cells = (_grid_cell(case, contender) for case, contender in zip(cases, known, strict=True))
        rows.append([label, *cells])
    limited = (" ".join(limits_of([case], brief=True)) or "–" for case in cases)
    rows.append(["What limited each", *(Cell(limit, tone="wrap") for limit in limited)])
    columns = ["Contender", *(case.name or "all" for case in cases)]
    figures = [contender.figure(*E2E.path) for case in cases for contender in case.contenders]
    caption = f"E2E p50 and the output rate in each case{in_brackets(figures)}"
    return table(caption, columns, rows, text=range(len(columns)))


def _state(case: Case, anchor: str) -> Cell:
    tone = "good" if case.gate.comparable else "warn"
    winner = case.best(E2E)
    words = f"{winner} is fastest" if winner else "no significant winner" if case.gate.comparable else ""
    return Cell(case.gate.state, detail=words, href=f"#{anchor}", tone=tone)


def _grid_cell(case: Case, contender: Contender | None) -> Cell:
    if contender is None:
        return Cell("–", detail="no finished run")
    figure, rate = contender.figure(*E2E.path), contender.figure(*OUTPUT.path)
    if isinstance(figure, Absent):
        return Cell("–", detail=figure.reason)
    scale = scale_of([figure])
    output = "" if isinstance(rate, Absent) else f"{number(rate.point)} tok/s"
    details = " · ".join(filter(None, (interval(figure, scale), output)))
    mark, tone = (" ★", "best") if case.best(E2E) == contender.label else ("", "")
    text, key = f"{point(figure, scale)} {scale.unit}{mark}", case.key(contender.label, E2E.path)
    return Cell(text, detail=details, tone=tone, key=key, unit=scale.unit)


def tradeoff(sweep: Sweep, prefix: str, anchors: Mapping[str, str]) -> list[Block]:
    """What is hollow or missing, the figures, and all numbers; `anchors` leads to each load."""
    speed, *waits = costs_of(sweep)
    pair = tuple(filter(None, (_by_load(sweep, cost, prefix) for cost in waits)))
    beside = [Side(pair, say("load.explained"))] if pair else []
    wide = filter(None, [_plot(sweep, speed, prefix)])
    return [Findings(tuple(remarks(sweep))), *wide, *beside, all_loads(sweep, anchors)]


class AtLoad(NamedTuple):
    """What was measured at a load: a latency, the same at p50 if that is another, and the output.

    `other` is the curve of p50, `word` stands beside the point, `key` is that of the load.
    """

    load: SweepLoad
    curve: str
    other: str
    figures: Sequence[tuple[Figure, str]]
    hollow: bool
    word: str = ""
    key: str = ""


def load_figure(
    name: str,
    title: str,
    finding: str,
    names: Sequence[str],
    rows: Sequence[AtLoad],
    region: Region,
    wide: float = HALF,
) -> Plot:
    """Latency by load over the output; `names` are those of words and numbers, the region's y is seconds."""
    across, scale = KINDS[rows[0].load.kind][0], scale_of([row.figures[0][0] for row in rows])
    _, latency, *_, output = names
    region = replace(region, y=region.y and region.y / scale.divisor)
    rows, last = sorted(rows, key=lambda row: row.load), len(names) - 2
    upper = [curve for k in range(last) for curve in _curves(rows, k, scale.divisor, is_other=k > 0)]
    axes = (f"{across}{{log}}", f"{latency} ({scale.unit}{{log}})")
    lower = _curves(rows, last, 1.0, is_other=False)
    below = (lower, output) if lower else None
    draw = partial(scatter, curves=upper, axes=axes, region=region, below=below)
    scales, cells = [*[scale] * last, Scale(1.0, "tok/s")], []
    for row in rows:
        numbers = (figure_cell(f, of, key) for of, (f, key) in zip(scales, row.figures, strict=True))
        cells.append((Cell(row.load.number, key=row.key), Cell(row.word or row.curve), *numbers))
    columns = (across, names[0], *(f"{each} ({scale.unit})" for each in names[1:-1]), output)
    shown = table(title, columns, cells, text=(1,))
    return Plot(name, title, finding, "", in_both_widths(name, draw, wide=wide), shown)


def _curves(rows: Sequence[AtLoad], k: int, divisor: float, *, is_other: bool) -> list[ScatterCurve]:
    """Number `k` of the rows, curve by curve; a line joins a curve that has each load once."""
    curves: dict[str, list[Dot]] = {}
    for row in rows:
        figure, at = row.figures[k][0], row.load.value
        if isinstance(figure, Estimate):
            y, word = reach_of(figure, divisor), "" if k else row.word
            dot = Dot(word, replace(y, low=at, at=at, high=at), y, row.hollow or is_other)
            curves.setdefault(row.other if is_other else row.curve, []).append(dot)
    return [ScatterCurve(each, tuple(d), len({dot.x for dot in d}) == len(d)) for each, d in curves.items()]


def _by_load(sweep: Sweep, cost: Cost, prefix: str) -> Plot | None:
    """A wait and the output against the load; of one contender with where its limit lies."""
    known, p = list(filter(cost.is_drawn, sweep.points)), sweep.percentile[cost.metric]
    if len({at.load for at in known}) < 2:
        return None
    best = best_within(sweep.points) if len(sweep.labels) == 1 and sweep.slos else None
    above = next((at.load.value for at in sweep.points if best and at.load > best.load and at.missed), None)
    bracket = (best.load.value, above) if best and above else None
    slo = next((g for g in sweep.slos if (g.metric, g.statistic) == (cost.metric, p)), None)
    rows = []
    for at in known:
        key = cost.path(at, sweep).removesuffix(p)
        median = [(at.median[cost.metric], f"{key}p50")] if p != "p50" else []
        figures = [(cost.of(at), f"{key}{p}"), *median, (at.output, output_key(at, sweep))]
        rows.append(AtLoad(at.load, at.label, f"{at.label}, p50", figures, bool(at.doubts)))
    names = ["Contender", cost.label, *["p50"] * (p != "p50"), sweep.output_title]
    bound, text = (slo.bound, slo_words(slo)) if slo else (None, "")
    finding = _finding(sweep, cost, cost.scale(known))
    region = Region(None, bound, text, True, bracket)
    return load_figure(f"{prefix}tradeoff-{cost.key}", cost.title, finding, names, rows, region)


def _plot(sweep: Sweep, cost: Cost, prefix: str) -> Plot | None:
    known = [at for at in sweep.points if cost.is_drawn(at)]
    if len(known) < 2:
        return None
    scale = cost.scale(known)
    curves = [
        ScatterCurve(label, tuple(_dot(at, cost, scale) for at in sweep.of(label)))
        for label in sweep.labels
        if any(at in known for at in sweep.of(label))
    ]
    axes = (f"{cost.label} ({scale.unit}{{log}}), better →", sweep.output_title)
    region, name = _region(sweep, cost, scale), f"{prefix}tradeoff-{cost.key}"
    drawings = in_both_widths(name, partial(scatter, curves=curves, axes=axes, region=region))
    rows = _plot_table(known, cost, scale, sweep)
    explained = say("sweep.explained", what=KINDS[sweep.kind][0].lower())
    return Plot(name, cost.title, _finding(sweep, cost, scale), explained, drawings, rows)


def _dot(at: Point, cost: Cost, scale: Scale) -> Dot | None:
    figure, output = cost.of(at), at.output
    if not cost.is_drawn(at) or isinstance(figure, Absent) or isinstance(output, Absent):
        return None
    x, y = reach_of(figure, scale.divisor), reach_of(output, 1.0)
    return Dot(f"{at.load.number}", x, y, hollow=bool(at.doubts))


def _region(sweep: Sweep, cost: Cost, scale: Scale) -> Region | None:
    """Where the targets on what the axes show are met; None where no target is on them."""
    wanted = sweep.percentile[cost.metric]
    on_x = [g for g in sweep.slos if g.metric == cost.metric and g.statistic == wanted]
    on_y = [g for g in sweep.slos if g.metric == "output_tok_per_s"] if not sweep.per_device else []
    if not on_x and not on_y:
        return None
    bound = min((g.bound for g in on_x), default=None)
    x = None if bound is None else 1 / bound / scale.divisor
    y = max((g.bound for g in on_y), default=None)
    return Region(x, y, " and ".join(map(slo_words, (*on_x, *on_y))))


def _finding(sweep: Sweep, cost: Cost, scale: Scale) -> str:
    """From which value to which it goes as the load grows, contender by contender, at reliable loads."""
    said: dict[str, list[str]] = {}
    for label in sweep.labels:
        who = f" with {label}" if len(sweep.labels) > 1 else ""
        known = [at for at in sweep.of(label) if isinstance(cost.of(at), Estimate) and not at.doubts]
        ends = [f"{point(cost.of(at), scale)} {scale.unit}" for at in (*known[:1], *known[1:][-1:])]
        if known:
            loads = (
                f"from {load_range(known[0].load, known[-1].load)}" if known[1:] else f"at {known[0].load}"
            )
            said.setdefault(loads, []).append(f"{' to '.join(ends)}{who}")
    told = "; ".join(f"{loads}: {', '.join(texts)}" for loads, texts in said.items())
    return f"{cost.label}, {told}." if told else best_loads(sweep)


def _plot_table(known: Sequence[Point], cost: Cost, scale: Scale, sweep: Sweep) -> Table:
    costs = ((cost.of(at), k) for k, at in enumerate(known))
    by_cost = sorted((figure.point, k) for figure, k in costs if isinstance(figure, Estimate))
    rows: list[list[str | Cell]] = [
        [
            figure_cell(cost.of(at), scale, cost.path(at, sweep)),
            figure_cell(at.output, Scale(1.0, "tok/s"), output_key(at, sweep)),
            at.label,
            str(at.load),
            ", ".join(at.doubts) or "–",
        ]
        for at in (known[k] for _, k in by_cost)
    ]
    columns = [f"{cost.label} ({scale.unit})", sweep.output_title, "Contender", "Load", "Doubts"]
    return table(f"{cost.title}: every point, with its interval", columns, rows, text=(2, 3, 4))
