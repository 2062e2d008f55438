"""What a comparison says first: who is faster, by how much, how certain; or why nothing is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from loadgen.record.summary import Summary
from loadgen.stats.figure import Absent, Estimate
from loadgen.stats.significance import Answer as Decided
from loadgen.stats.significance import Contrast
from loadgen.verdict.comparable import ALONE
from reports.answer import limit
from reports.answer import sentence as run_sentence
from reports.blocks import Answer, Block
from reports.compare.comparison import E2E, HEADLINES, TITLES, Comparison, ComparisonCell, Headline
from reports.compare.pooled_figures import Path, points
from reports.compare.significance_text import JUDGED, Contrasts, Pair, better, times_of, why_open
from reports.compare.sweep_words import best_loads, limits
from reports.compare.sweeps import sweeps_in
from reports.figures.forest import Ratio, forest
from reports.number_format import interval, number, point, scale_of
from reports.tables import Cell as TableCell
from reports.tables import Column, Row, Table

RATE: Path = ("throughput", "output_tok_per_s")
MEMORY: Sequence[tuple[str, Path]] = (
    ("GPU memory", ("memory", "device_peak_bytes")),
    ("server memory", ("memory", "server_peak_bytes")),
)
"""The first that is known stands in the first sentence."""
MOST_LISTED = 4
"""Of more cells than this the first lines name only the overall winner: the table below has each."""


def comparison_answer(comparison: Comparison) -> Answer:
    """One sentence over all cells, and one for each where there are several."""
    swept = sweeps_in(comparison.cells)
    in_a_sweep = [cell for _, cells in swept for cell in cells]
    said = []
    for sweep, cells in swept:
        of = f"{sweep.name}: " if len(swept) > 1 else ""
        said += [f"{of}{words}" for words in (best_loads(sweep), limits(sweep), *_at_the_top(cells)) if words]
    alone = [cell for cell in comparison.cells if cell not in in_a_sweep]
    if len(alone) == 1 and not said:
        first, *others = cell_sentences(alone[0])
        return Answer(first, (*others, *limits_of(alone)))
    said += [f"{cell.name}: {cell_sentence(cell)}" if cell.name else cell_sentence(cell) for cell in alone]
    if not said:
        return Answer("No run came to its end: there is nothing to compare.")
    overall = "" if swept else _overall(comparison.cells)
    if overall:
        common = limits_of(alone)
        if len(said) > MOST_LISTED:
            return Answer(overall, tuple(common if len(common) == 1 else ()))
        return Answer(overall, (*said, *(common if len(common) == 1 else _limits_by_case(alone))))
    return Answer(said[0], tuple(said[1:]))


def _overall(cells: Sequence[ComparisonCell]) -> str:
    """Who has the lowest E2E p50 in most cells, and in how many for certain; "" where nothing is ranked."""
    ranked = [cell for cell in cells if cell.gate.comparable and len(cell.labels) > 1]
    leaders = [min(cell.labels, key=cell.e2e) for cell in ranked]
    if not leaders:
        return ""
    first = max(dict.fromkeys(leaders), key=leaders.count)
    n, n_sure = leaders.count(first), sum(cell.best(E2E) == first for cell in ranked)
    if n_sure == n:
        leads = sorted(
            min(cell.e2e(other) for other in cell.labels if other != first) / cell.e2e(first)
            for cell in ranked
            if cell.best(E2E) == first
        )
        low, high = number(leads[0]), number(leads[-1])
        by = f"{low}x" if low == high else f"{low}x to {high}x"
        others = {label for cell in ranked for label in cell.labels} - {first}
        next_ = others.pop() if len(others) == 1 else "the next"
        return f"{first} is fastest in {n} of {len(cells)} cases: {by} faster than {next_} (E2E p50)."
    sure = (
        f"the lead over the next is significant in {n_sure}"
        if n_sure
        else "no lead over the next is significant"
    )
    return f"{first} has the lowest E2E p50 in {n} of {len(cells)} cases; {sure}."


def limits_of(cells: Sequence[ComparisonCell], *, brief: bool = False) -> list[str]:
    """What limited each contender's first run, where that is known; the same limit is said once."""
    who: dict[str, list[str]] = {}
    for cell in (cell for cell in cells if cell.gate.comparable or cell.gate.state == ALONE):
        for label in cell.labels:
            view = cell.views[label][0]
            found = limit(view.summary, view.manifest) if _is_limit_known(view.summary) else None
            if found:
                who.setdefault(found.what if brief else found.sentence, []).append(label)
    return [
        f"{', '.join(dict.fromkeys(labels))}: {told[0].lower()}{told[1:]}" for told, labels in who.items()
    ]


def _at_the_top(cells: Sequence[ComparisonCell]) -> list[str]:
    """What limited the contenders at the highest load whose runs compare."""
    found = ((cell.name, limits_of([cell], brief=True)) for cell in reversed(cells))
    name, limits = next(((name, limits) for name, limits in found if limits), ("", []))
    return [f"With {name}: {'; '.join(limits)}."] if name and limits else []


def _limits_by_case(cells: Sequence[ComparisonCell]) -> list[str]:
    """The limit of each case, short where its contenders' limits differ: its section has them in full."""
    said = []
    for cell in cells:
        found = limits_of([cell])
        if len(found) > 1:
            found = limits_of([cell], brief=True)
        if found:
            said.append(f"{cell.name}: {'; '.join(found).rstrip('.')}.")
    return said


def _is_limit_known(summary: Summary) -> bool:
    """Whether the server's queue was recorded, or whether requests in flight stayed level."""
    known = (summary.concurrency.server_waiting_mean, summary.stationarity.in_flight_trend_p)
    return any(isinstance(figure, Estimate) for figure in known)


def cell_sentence(cell: ComparisonCell) -> str:
    """`vllm is 1.48x faster than tgi (E2E p50), 95% CI [1.29, 1.69].`"""
    pairs = cell.pairs()
    if not pairs or not cell.gate.comparable:
        return cell_sentences(cell)[0]
    pair, contrasts = pairs[0]
    return f"{_pair(pair, contrasts, beside=False)}."


def cell_sentences(cell: ComparisonCell) -> list[str]:
    """The fastest against the runner-up, then against each other contender.

    `vllm is 1.48x faster than tgi (E2E p50), 95% CI [1.29, 1.69]; output 1.31x higher; GPU memory equal.`
    """
    first, *others = cell.labels
    if not others:
        return [f"{first}: {run_sentence(cell.views[first][0].summary)}"]
    if not cell.gate.comparable:
        reason = next((reason.text.rstrip(".") for reason in cell.gate.reasons), cell.gate.state)
        return [f"Not compared: {reason}.", f"{'; '.join(_own(cell, label) for label in cell.labels)}."]
    return [f"{_pair(pair, contrasts)}." for pair, contrasts in cell.pairs()]


def _own(cell: ComparisonCell, label: str) -> str:
    figure = cell.figure(label, E2E)
    if isinstance(figure, Absent):
        return f"{label} has no E2E p50"
    scale = scale_of([figure])
    return f"{label} {point(figure, scale)} {scale.unit} (E2E p50)"


def _pair(pair: Pair, contrasts: Contrasts, *, beside: bool = True) -> str:
    """How much faster the first is, with output and memory `beside`."""
    memory = next((own for own in MEMORY if isinstance(contrasts.get(own[1]), Contrast)), MEMORY[0])
    others = (("output", RATE), memory) if beside else ()
    parts = (_beside(name, path, contrasts.get(path)) for name, path in others)
    said = "; ".join(filter(None, (_faster(pair, contrasts), *parts)))
    e2e = contrasts.get(E2E.path)
    if not isinstance(e2e, Contrast) or e2e.noise is not None:
        return said
    return f"{said}: {why_open(e2e, contrasts)}"


def _beside(name: str, path: Path, contrast: Contrast | Absent | None) -> str:
    """`output 1.31x higher`; "" where it is not known."""
    if not isinstance(contrast, Contrast):
        return ""
    if contrast.answer == Decided.SAME:
        return f"{name} equal"
    is_open = contrast.answer == Decided.INCONCLUSIVE and contrast.noise is not None
    open_still = " (not significant)" if is_open else ""
    return f"{name} {times_of(contrast, *TITLES[path]).text}{open_still}"


def _faster(pair: Pair, contrasts: Contrasts) -> str:
    """How much faster the first is by E2E p50; why that is not significant unless all lacks the noise."""
    one, other = pair
    contrast = contrasts.get(E2E.path)
    if not isinstance(contrast, Contrast):
        return f"{one} and {other} cannot be compared in E2E p50"
    times = times_of(contrast, E2E.title, E2E.better)
    ends = f", 95% CI {times.ends}" if times.ends else ""
    if contrast.answer == Decided.SAME:
        return f"{one} and {other} are equally fast (E2E p50 within {number((times.value - 1) * 100)}%{ends})"
    if times.value < 1.005:
        return f"{one} and {other} take equally long (E2E p50){ends}"
    why = "" if contrast.noise is None else why_open(contrast, contrasts)
    return f"{one} is {times.text} than {other} (E2E p50){ends}{f': {why}' if why else ''}"


def forests(cell: ComparisonCell, prefix: str) -> Iterator[Block]:
    """A figure for the fastest against each other contender: how many times better in each number."""
    explain = True
    for k, (pair, contrasts) in enumerate(cell.pairs()):
        ratios = [r for path in JUDGED if (r := _ratio(cell, pair, path, contrasts.get(path)))]
        if ratios:
            finding = f"{_pair(pair, contrasts)}."
            yield forest(f"{prefix}forest-{k}", pair, ratios, finding, explain=explain)
            explain = False


def _ratio(cell: ComparisonCell, pair: Pair, path: Path, contrast: Contrast | Absent | None) -> Ratio | None:
    if not isinstance(contrast, Contrast) or not contrast.ratio.point:
        return None
    title, which = TITLES[path]
    sign = 1.0 if which == "higher" else -1.0
    of_one, of_other = (points(cell.views[label], path) for label in pair)
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
    return Ratio(
        _short(title), contrast.ratio.point**sign, low, high, runs, better(contrast, which) is not None
    )


def _short(title: str) -> str:
    return {
        "Peak memory of the server's processes": "Server memory",
        "Peak memory of the devices": "GPU memory",
    }.get(title, title)


def grid(comparison: Comparison, anchors: Mapping[int, str]) -> Table | None:
    """Contenders by cells: E2E p50 with its interval and output rate; each links to its section.

    None for fewer than two cells.
    """
    cells = [cell for cell in comparison.cells if cell.gate.state != ALONE or len(comparison.cells) > 1]
    if len(cells) < 2:
        return None
    labels = list(dict.fromkeys(label for cell in cells for label in cell.labels))
    rows = [Row((TableCell("Verdict"), *(_state(cell, anchors[id(cell)]) for cell in cells)))]
    rows += [Row((TableCell(label), *(_grid_cell(cell, label) for cell in cells))) for label in labels]
    columns = (Column("E2E p50", False), *(Column(cell.name or "all", False) for cell in cells))
    figures = [cell.figure(label, E2E) for cell in cells for label in cell.labels]
    known = any(interval(figure, scale_of([figure])) for figure in figures)
    caption = f"E2E p50 {'with its 95% interval ' if known else ''}and the output rate in each case"
    return Table(caption, columns, tuple(rows))


def _state(cell: ComparisonCell, anchor: str) -> TableCell:
    tone = "good" if cell.gate.comparable else "warn"
    winner = cell.best(E2E)
    told = f"{winner} is fastest" if winner else "no significant winner" if cell.gate.comparable else ""
    return TableCell(cell.gate.state, detail=told, href=f"#{anchor}", tone=tone)


def _grid_cell(cell: ComparisonCell, label: str) -> TableCell:
    if label not in cell.labels:
        return TableCell("–", detail="no finished run")
    figure, rate = cell.figure(label, E2E), cell.figure(label, _headline(RATE))
    if isinstance(figure, Absent):
        return TableCell("–", detail=figure.reason)
    scale = scale_of([figure])
    output = "" if isinstance(rate, Absent) else f"{number(rate.point)} tok/s"
    details = " · ".join(filter(None, (interval(figure, scale), output)))
    is_best = cell.best(E2E) == label
    return TableCell(
        f"{point(figure, scale)} {scale.unit}{' ★' if is_best else ''}",
        detail=details,
        tone="best" if is_best else "",
    )


def _headline(path: Path) -> Headline:
    return next(headline for headline in HEADLINES if headline.path == path)
