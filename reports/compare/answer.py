"""What a comparison says first: who is faster, by how much, how certain; or why nothing is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from loadgen.stats.figure import Absent, Estimate
from loadgen.stats.significance import Answer as Decided
from loadgen.stats.significance import Contrast
from loadgen.verdict.comparable import ALONE
from reports.answer import sentence as run_sentence
from reports.blocks import Answer, Block
from reports.compare.comparison import HEADLINES, TITLES, Comparison, ComparisonCell, Headline
from reports.compare.pooled_figures import Path, points
from reports.compare.significance_text import JUDGED, Pair, better
from reports.compare.sweep_words import best_loads
from reports.compare.sweeps import sweeps_in
from reports.figures.forest import Ratio, forest
from reports.number_format import interval, number, point, scale_of
from reports.tables import Cell as TableCell
from reports.tables import Column, Row, Table

E2E: Path = ("metrics", "e2e", "p50")
RATE: Path = ("throughput", "output_tok_per_s")
MEMORY: Path = ("memory", "device_peak_bytes")


def comparison_answer(comparison: Comparison) -> Answer:
    """One sentence over all cells, and one for each where there are several."""
    swept = sweeps_in(comparison.cells)
    in_a_sweep = [cell for _, cells in swept for cell in cells]
    said = [words for sweep, _ in swept if (words := best_loads(sweep))]
    alone = [cell for cell in comparison.cells if cell not in in_a_sweep]
    if len(alone) == 1 and not said:
        first, *others = cell_sentences(alone[0])
        return Answer(first, tuple(others))
    said += [f"{cell.name}: {cell_sentence(cell)}" if cell.name else cell_sentence(cell) for cell in alone]
    if not said:
        return Answer("No run came to its end: there is nothing to compare.")
    overall = "" if swept else _overall(comparison.cells)
    return Answer(overall, tuple(said)) if overall else Answer(said[0], tuple(said[1:]))


def _overall(cells: Sequence[ComparisonCell]) -> str:
    """Who has the lowest E2E p50 in most cells, and in how many for certain; "" where nothing is ranked."""
    ranked = [cell for cell in cells if cell.gate.comparable and len(cell.labels) > 1]
    leaders = [min(cell.labels, key=lambda label: _e2e(cell, label)) for cell in ranked]
    if not leaders:
        return ""
    first = max(dict.fromkeys(leaders), key=leaders.count)
    n, n_sure = leaders.count(first), sum(cell.best(_headline(E2E)) == first for cell in ranked)
    if n_sure == n:
        leads = sorted(
            min(_e2e(cell, other) for other in cell.labels if other != first) / _e2e(cell, first)
            for cell in ranked
            if cell.best(_headline(E2E)) == first
        )
        low, high = number(leads[0]), number(leads[-1])
        by = f"{low}x" if low == high else f"{low}x to {high}x"
        return f"{first} is fastest in {n} of {len(cells)} cells: {by} faster than the next (E2E p50)."
    sure = f"significantly in {n_sure}" if n_sure else "but in none significantly faster than every other"
    return f"{first} has the lowest E2E p50 in {n} of {len(cells)} cells, {sure}."


def cell_sentence(cell: ComparisonCell) -> str:
    """`vllm is 1.48x faster than tgi (E2E p50), 95% CI [1.29, 1.69]; output 1.31x; memory equal.`"""
    said = cell_sentences(cell)
    return " ".join(said)


def cell_sentences(cell: ComparisonCell) -> list[str]:
    """The fastest against the runner-up first, then everybody else against the fastest."""
    first, *others = cell.labels
    if not others:
        return [f"{first}: {run_sentence(cell.views[first][0].summary)}"]
    if not cell.gate.comparable:
        reason = next((reason.text.rstrip(".") for reason in cell.gate.reasons), cell.gate.state)
        return [f"Not compared: {reason}.", f"{'; '.join(_own(cell, label) for label in cell.labels)}."]
    order = sorted(cell.labels, key=lambda label: _e2e(cell, label))
    said = []
    for other in order[1:]:
        pair = (order[0], other) if (order[0], other) in cell.contrasts else (other, order[0])
        said.append(f"{_pair(pair, cell.contrasts.get(pair, {}))}.")
    return said


def _e2e(cell: ComparisonCell, label: str) -> float:
    figure = cell.figure(label, _headline(E2E))
    return figure.point if isinstance(figure, Estimate) else math.inf


def _own(cell: ComparisonCell, label: str) -> str:
    figure = cell.figure(label, _headline(E2E))
    if isinstance(figure, Absent):
        return f"{label} has no E2E p50"
    scale = scale_of([figure])
    return f"{label} {point(figure, scale)} {scale.unit} (E2E p50)"


def _pair(pair: Pair, contrasts: Mapping[Path, Contrast | Absent]) -> str:
    a, b = pair
    e2e = contrasts.get(E2E)
    is_b_quick = isinstance(e2e, Contrast) and e2e.ratio.point < 1
    parts = [_faster(a, b, e2e)]
    for path, name in ((RATE, "output"), (MEMORY, "memory")):
        contrast = contrasts.get(path)
        if isinstance(contrast, Contrast) and contrast.ratio.point:
            times = contrast.ratio.point if is_b_quick else 1 / contrast.ratio.point
            parts.append(f"{name} {'equal' if contrast.answer == Decided.SAME else f'{number(times)}x'}")
    return "; ".join(parts)


def _faster(a: str, b: str, contrast: Contrast | Absent | None) -> str:
    """Who is faster by E2E p50; the ratio is above 1 as a person says it."""
    if not isinstance(contrast, Contrast):
        return f"{a} and {b} cannot be compared in E2E p50"
    ratio = contrast.ratio
    quick, slow = (b, a) if ratio.point < 1 else (a, b)
    times, low, high = _above_one(ratio)
    ends = f", 95% CI [{number(low)}, {number(high)}]" if low and high else ""
    if contrast.answer == Decided.SAME:
        return f"{a} and {b} are equally fast (E2E p50 within {number((times - 1) * 100)}%{ends})"
    if times < 1.005:
        return f"{a} and {b} take equally long (E2E p50){ends}"
    said = f"{quick} is {number(times)}x faster than {slow} (E2E p50){ends}"
    if contrast.answer == Decided.DIFFERENT:
        return said
    return f"{said}: not significant{'' if ends else ', one run each does not show the noise between runs'}"


def _above_one(ratio: Estimate) -> tuple[float, float | None, float | None]:
    if ratio.point >= 1:
        return ratio.point, ratio.low, ratio.high
    return 1 / ratio.point, ratio.high and 1 / ratio.high, ratio.low and 1 / ratio.low


def forests(cell: ComparisonCell, prefix: str) -> Iterator[Block]:
    """A figure for each contender against the first: how many times better in each number."""
    first = cell.labels[0]
    explain = True
    for k, ((a, b), contrasts) in enumerate(cell.contrasts.items()):
        if a != first:
            continue
        ratios = [r for path in JUDGED if (r := _ratio(cell, (a, b), path, contrasts.get(path)))]
        if ratios:
            ends = (f"{b} better", f"{a} better")
            finding = f"{_pair((a, b), contrasts)}."
            yield forest(f"{prefix}forest-{k}", f"{b} against {a}", *ends, ratios, finding, explain=explain)
            explain = False


def _ratio(cell: ComparisonCell, pair: Pair, path: Path, contrast: Contrast | Absent | None) -> Ratio | None:
    if not isinstance(contrast, Contrast) or not contrast.ratio.point:
        return None
    title, which = TITLES[path]
    sign = 1.0 if which == "higher" else -1.0
    of_a, of_b = (points(cell.views[label], path) for label in pair)
    runs: tuple[float, ...] = ()
    if (
        not isinstance(of_a, Absent)
        and not isinstance(of_b, Absent)
        and len(of_b) > 1
        and min(*of_a, *of_b) > 0
    ):
        base = math.exp(sum(map(math.log, of_a)) / len(of_a))
        runs = tuple((value / base) ** sign for value in of_b)
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
    return Table("E2E p50, its 95% interval and the output rate, for each cell", columns, tuple(rows))


def _state(cell: ComparisonCell, anchor: str) -> TableCell:
    tone = "good" if cell.gate.comparable else "warn"
    winner = cell.best(_headline(E2E))
    told = f"{winner} is fastest" if winner else "no significant winner" if cell.gate.comparable else ""
    return TableCell(cell.gate.state, detail=told, href=f"#{anchor}", tone=tone)


def _grid_cell(cell: ComparisonCell, label: str) -> TableCell:
    if label not in cell.labels:
        return TableCell("–", detail="no finished run")
    figure, rate = cell.figure(label, _headline(E2E)), cell.figure(label, _headline(RATE))
    if isinstance(figure, Absent):
        return TableCell("–", detail=figure.reason)
    scale = scale_of([figure])
    output = "" if isinstance(rate, Absent) else f"{number(rate.point)} tok/s"
    details = " · ".join(filter(None, (interval(figure, scale), output)))
    is_best = cell.best(_headline(E2E)) == label
    return TableCell(
        f"{point(figure, scale)} {scale.unit}{' ★' if is_best else ''}",
        detail=details,
        tone="best" if is_best else "",
    )


def _headline(path: Path) -> Headline:
    return next(headline for headline in HEADLINES if headline.path == path)
