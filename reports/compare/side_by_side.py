"""The table of a comparison: every contender's numbers, and what each says against the first."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from loadgen.stats.across_runs import Noise, spreads_of
from loadgen.stats.figure import Absent, Estimate
from loadgen.stats.significance import Answer, Contrast
from reports.compare.comparison import HEADLINES, TITLES, ComparisonCell, Headline
from reports.compare.pooled_figures import points
from reports.compare.significance_text import finding, remarks, times_of
from reports.number_format import interval, number, point, scale_of
from reports.tables import Cell as TableCell
from reports.tables import Column, Row, Table

ARROWS: Final = {"lower": "↓", "higher": "↑"}


def findings(cell: ComparisonCell) -> list[str]:
    """A sentence for the fastest compared with each other contender."""
    return [finding(pair, contrasts, TITLES) for pair, contrasts in cell.pairs() if cell.contrasts]


def side_by_side(cell: ComparisonCell) -> Table:
    """One row a number, one column a contender, then the fastest against each other."""
    rows = tuple(_row(cell, headline) for headline in HEADLINES if _is_known(cell, headline))
    against = [f"{one} vs {other}" for (one, other), _ in cell.pairs() if cell.contrasts]
    noise = ["A/A noise"] if _is_noise_known(cell) else []
    columns = (Column("Number", False), Column("Unit", False), *map(Column, [*cell.labels, *against, *noise]))
    notes = list(remarks(list(cell.contrasts.values())))
    if any(cell.best(headline) for headline in HEADLINES):
        notes.append("★: significantly better than every other.")
    if noise:
        notes.append("A/A noise: two runs of one system differ by more only once in twenty.")
    intervals = ": 95% intervals in brackets" if _has_intervals(cell) else ""
    return Table(f"{cell.name or 'Side by side'}{intervals}", columns, rows, remark=" ".join(notes))


def _has_intervals(cell: ComparisonCell) -> bool:
    """Whether any number or ratio of the table has an interval."""
    figures = (cell.figure(label, headline) for label in cell.labels for headline in HEADLINES)
    ratios = (c.ratio for _, found in cell.pairs() for c in found.values() if isinstance(c, Contrast))
    return any(isinstance(f, Estimate) and f.low is not None for f in figures) or any(
        None not in (ratio.low, ratio.high) for ratio in ratios
    )


SPREAD: Final = (
    ("metrics", "ttft", "p50"),
    ("metrics", "tpot", "p50"),
    ("metrics", "e2e", "p50"),
    ("throughput", "output_tok_per_s"),
)


def spread_table(cell: ComparisonCell) -> Table | None:
    """How far runs of each contender scatter: at fresh starts of its server, and repeated at one start.

    None where no contender has runs enough for either.
    """
    rows = []
    for label in cell.labels:
        views = cell.views[label]
        for path in SPREAD:
            values = points(views, path)
            if isinstance(values, Absent):
                continue
            starts: dict[object, list[float]] = {}
            for view, value in zip(views, values, strict=True):
                starts.setdefault(view.manifest.server and view.manifest.server.start, []).append(value)
            both = spreads_of([np.array(own) for own in starts.values()])
            if isinstance(both.starts, Noise) or isinstance(both.repeats, Noise):
                cells = (_spread(both.starts, "start"), _spread(both.repeats, "repeat"))
                rows.append(Row((TableCell(label), TableCell(TITLES[path][0]), *cells)))
    if not rows:
        return None
    columns = (
        Column("Contender", False),
        Column("Number", False),
        Column("Over fresh starts"),
        Column("Over repeats of one start"),
    )
    note = (
        "Standard deviation of one run's number. A fresh start adds to it where the server compiles or "
        "allocates for the shapes that come first. `--repeats 6 --restart 2` measures both."
    )
    return Table("Spread between runs", columns, tuple(rows), remark=note)


def _spread(noise: Noise | Absent, what: str) -> TableCell:
    if isinstance(noise, Absent):
        return TableCell("–", detail=noise.reason)
    return TableCell(f"{math.expm1(noise.spread):.1%}", detail=f"{noise.n_runs} {what}s")


def _is_noise_known(cell: ComparisonCell) -> bool:
    return any(_noise(cell, headline) is not None for headline in HEADLINES)


def _noise(cell: ComparisonCell, headline: Headline) -> float | None:
    """The largest noise between runs of one contender, in this number."""
    found = [each.get(headline.path) for each in cell.contrasts.values()]
    return max((c.noise for c in found if isinstance(c, Contrast) and c.noise is not None), default=None)


def _is_known(cell: ComparisonCell, headline: Headline) -> bool:
    return any(isinstance(cell.figure(label, headline), Estimate) for label in cell.labels)


def _row(cell: ComparisonCell, headline: Headline) -> Row:
    figures = {label: cell.figure(label, headline) for label in cell.labels}
    scale = scale_of(figures.values())
    best = cell.best(headline)
    values = []
    for label, figure in figures.items():
        if isinstance(figure, Absent):
            values.append(TableCell("–", detail=figure.reason))
            continue
        mark = "★ " if label == best else ""
        tone = "best" if label == best else ""
        values.append(TableCell(f"{mark}{point(figure, scale)}", detail=interval(figure, scale), tone=tone))
    title = f"{headline.title} {ARROWS.get(headline.better, '')}".strip()
    against = [_against(ratios.get(headline.path), headline) for _, ratios in cell.pairs() if cell.contrasts]
    noise = _noise(cell, headline)
    shown = [TableCell("" if noise is None else f"{noise:.1%}")] if _is_noise_known(cell) else []
    return Row((TableCell(title), TableCell(scale.unit), *values, *against, *shown))


def _against(contrast: Contrast | Absent | None, headline: Headline) -> TableCell:
    """`1.35x faster` and whether that is significant; empty for a number on which no verdict is given.

    Why there is none stands with the contenders' numbers, or is that these have no interval.
    """
    if contrast is None:
        return TableCell("")
    if isinstance(contrast, Absent):
        return TableCell("–")
    times = times_of(contrast, headline.title, headline.better)
    detail = " ".join(filter(None, (times.ends, contrast.answer)))
    if times.ends and contrast.answer == Answer.INCONCLUSIVE and contrast.detectable is not None:
        detail += f"; detects {_more(contrast.detectable)}"
    return TableCell(times.text, detail=detail)


def _more(share: float) -> str:
    """A relative difference: percent, from twice as much on a factor."""
    return f"{share:.0%}" if share < 1 else f"{number(1 + min(share, 999))}×"
