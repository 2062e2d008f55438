"""The trade-off of a sweep: what more load gives the operator, and what it takes from each user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from burstline.loadgen.metrics.definitions import METRICS
from burstline.loadgen.stats.figure import Absent, Estimate
from burstline.reports.blocks import Block, Cell, Findings, Note, Plot, Side, Table, table
from burstline.reports.figures.drawing import HALF, NARROW, WIDE
from burstline.reports.figures.load_curves import LoadPanel, LoadPoint, load_curves
from burstline.reports.figures.scatter import Dot, Region, ScatterCurve, scatter
from burstline.reports.model.sweep_load import KINDS
from burstline.reports.model.sweeps import AGAINST, Point, Sweep
from burstline.reports.number_format import Scale, number, reach_of, scale_for
from burstline.reports.page.sweep_words import (
    Cost,
    all_loads,
    costs_of,
    figure_cell,
    findings_of,
    hollow,
    missing,
    slo_words,
)


def blocks(sweep: Sweep, prefix: str, anchors: Mapping[str, str]) -> list[Block]:
    """Findings, figures, what is hollow or missing in them, and all numbers; `anchors` leads to each load."""
    wide, *beside = (_plot(sweep, cost, prefix) for cost in costs_of(sweep))
    pair = tuple(plot for plot in beside if plot is not None)
    shown: list[Block] = [Findings(tuple(findings_of(sweep)))]
    shown += [wide] if wide else []
    shown += [Side(pair, "" if wide else _explained(sweep))] if pair else []
    against = against_load(sweep, prefix)
    shown += [Side(against, AGAINST_LOAD)] if against else []
    shown += [Note(text) for text in missing(sweep)]
    return [*shown, all_loads(sweep, anchors)]


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
    towards = "better →" if cost.better == "higher" else "← better"
    axes = (f"{cost.label} ({scale.unit}{{log}}), {towards}", sweep.output_title)
    region, name = _region(sweep, cost, scale), f"{prefix}tradeoff-{cost.key}"
    wide = WIDE if cost.key == "speed" else HALF
    drawings = (
        scatter(name, wide, curves, axes, region),
        scatter(f"{name}-narrow", NARROW, curves, axes, region),
    )
    return Plot(
        name,
        cost.title,
        _finding(sweep, cost, scale),
        _explained(sweep) if cost.key == "speed" else "",
        drawings,
        _plot_table(known, cost, scale, sweep),
    )


def _dot(at: Point, cost: Cost, scale: Scale) -> Dot | None:
    figure, output = cost.of(at), at.output
    if not cost.is_drawn(at) or isinstance(figure, Absent) or isinstance(output, Absent):
        return None
    x, y = reach_of(figure, scale.divisor), reach_of(output, 1.0)
    return Dot(f"{at.load.number}", x, y, hollow=bool(at.doubts))


def _region(sweep: Sweep, cost: Cost, scale: Scale) -> Region | None:
    """Where the targets on what the axes show are met; None where no target is on them."""
    wanted = sweep.percentile[cost.metric]
    on_x = [g for g in sweep.goals if g.metric == cost.metric and g.statistic == wanted]
    on_y = [g for g in sweep.goals if g.metric == "output_tok_per_s"] if not sweep.per_device else []
    if not on_x and not on_y:
        return None
    bound = min((g.bound for g in on_x), default=None)
    x = None if bound is None else (1 / bound if cost.better == "higher" else bound) / scale.divisor
    y = max((g.bound for g in on_y), default=None)
    return Region(x, cost.better == "lower", y, " and ".join(map(slo_words, (*on_x, *on_y))))


def _finding(sweep: Sweep, cost: Cost, scale: Scale) -> str:
    """From which value to which it goes as the load grows, contender by contender."""
    said: dict[str, list[str]] = {}
    for label in sweep.labels:
        who = f" with {label}" if len(sweep.labels) > 1 else ""
        known = [(at.load, f.point) for at in sweep.of(label) if isinstance(f := cost.of(at), Estimate)]
        if known:
            first, last = (number(value / scale.divisor) for _, value in (known[0], known[-1]))
            loads = f"from {known[0][0].number} to {known[-1][0]}"
            said.setdefault(loads, []).append(f"{first} to {last} {scale.unit}{who}")
    told = "; ".join(f"{loads}: {', '.join(ends)}" for loads, ends in said.items())
    return f"{cost.label}, {told}."


def _explained(sweep: Sweep) -> str:
    """How all figures of the trade-off are read; stands under the first."""
    what = "were in flight at a time" if sweep.kind == "concurrency" else "were due each second"
    green = (
        "Green is where an SLO is met: a load meets it for certain only if its whole interval lies there. "
        if sweep.goals
        else ""
    )
    return (
        f"Each point is one load; the number beside it says how many requests {what}. Of two curves the "
        "higher one gives more output at the same cost to a user. Whiskers are 95% intervals; an arrow "
        f"marks an end without a bound. {green}{hollow(sweep) or 'All points are reliable.'}"
    )


def _plot_table(known: Sequence[Point], cost: Cost, scale: Scale, sweep: Sweep) -> Table:
    """The points from left to right."""
    by_cost = sorted(
        (figure.point, k) for k, at in enumerate(known) if isinstance(figure := cost.of(at), Estimate)
    )
    rows: list[list[str | Cell]] = [
        [
            figure_cell(cost.of(at), scale),
            figure_cell(at.output, Scale(1.0, "")),
            at.label,
            str(at.load),
            ", ".join(at.doubts) or "–",
        ]
        for at in (known[k] for _, k in by_cost)
    ]
    columns = [f"{cost.label} ({scale.unit})", sweep.output_title, "Contender", "Load", "Doubts"]
    return table(f"{cost.title}: every point, with its interval", columns, rows, text=(2, 3, 4))


AGAINST_LOAD: Final = (
    "One panel for each percentile over the load, lower is better. Whiskers are 95% intervals, with an arrow "
    "where there is no bound. Hollow points cannot be relied on, a cross at the top is a percentile that "
    "failed requests make infinite, and a dashed green line is an SLO."
)
WIDTH: Final = 310.0


def against_load(sweep: Sweep, prefix: str) -> tuple[Plot, ...]:
    """A figure for each latency of which two points or more are known."""
    plots = (_load_plot(sweep, metric, prefix) for metric in ("ttft", "tpot", "e2e"))
    return tuple(plot for plot in plots if plot is not None)


def _load_plot(sweep: Sweep, metric: str, prefix: str) -> Plot | None:
    points = {p: _points(sweep, metric, p) for p in AGAINST}
    shown = [p for p in AGAINST if len(points[p]) > 1]
    if not shown:
        return None
    scale = scale_for("s", [figure.point for p in shown for figure in points[p].values()])
    title = METRICS[metric].title
    panels = [_panel(sweep, metric, p, scale) for p in shown]
    first = shown[0]
    return Plot(
        f"{prefix}load-{metric}",
        f"{title} against load",
        f"{title} {first} from least to most load: {'; '.join(_ends(sweep, metric, first, scale))}.",
        "",
        (load_curves(f"{prefix}load-{metric}", WIDTH, panels, KINDS[sweep.kind][0].lower()),),
        _load_table(sweep, metric, shown, scale),
    )


def _points(sweep: Sweep, metric: str, p: str) -> dict[tuple[str, float], Estimate]:
    """The known ones by contender and load."""
    figures = (((at.label, at.load.value), at.percentiles[metric][p]) for at in sweep.points)
    return {key: figure for key, figure in figures if isinstance(figure, Estimate)}


def _panel(sweep: Sweep, metric: str, p: str, scale: Scale) -> LoadPanel:
    known = _points(sweep, metric, p)

    def line(label: str) -> Iterator[LoadPoint]:
        for at in sweep.of(label):
            if (label, at.load.value) in known:
                reach = reach_of(known[label, at.load.value], scale.divisor)
                yield LoadPoint(at.load.value, reach, hollow=bool(at.doubts))

    bounds = [g.bound / scale.divisor for g in sweep.goals if (g.metric, g.statistic) == (metric, p)]
    return LoadPanel(
        f"{METRICS[metric].title} {p} ({scale.unit})",
        [(label, list(line(label))) for label in sweep.labels],
        min(bounds, default=None),
    )


def _ends(sweep: Sweep, metric: str, p: str, scale: Scale) -> Iterator[str]:
    known = _points(sweep, metric, p)
    for label in sweep.labels:
        loads = [load for who, load in known if who == label]
        if loads:
            ends = (known[label, load].point / scale.divisor for load in (min(loads), max(loads)))
            first, last = map(number, ends)
            yield f"{label} {first} to {last} {scale.unit}"


def _load_table(sweep: Sweep, metric: str, shown: list[str], scale: Scale) -> Table:
    """One row a load, one column for each percentile of each contender."""
    several = len(sweep.labels) > 1
    at_load = {(at.label, at.load): at.percentiles[metric] for at in sweep.points}
    columns = [(p, label) for p in shown for label in sweep.labels]
    rows = [
        [
            load.number,
            *(
                figure_cell(at_load[label, load][p], scale) if (label, load) in at_load else "–"
                for p, label in columns
            ),
        ]
        for load in sweep.loads
    ]
    titles = [f"{p} {label} ({scale.unit})" if several else f"{p} ({scale.unit})" for p, label in columns]
    caption = f"{METRICS[metric].title} against load, with 95% intervals"
    return table(caption, [KINDS[sweep.kind][0], *titles], rows, text=())
