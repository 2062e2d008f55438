"""A series of runs or pairs in the order of time, with what is expected of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from burstline.reports.blocks import Drawing, Plot, table
from burstline.reports.figures.drawing import BAD, MUTED, SERIES, canvas, drawn, head, in_both_widths, margins
from burstline.reports.number_format import number

EXPLAINED = (
    "A dot is a run. The band is what the earlier good runs let expect of it: as wide as the noise between "
    "them, drift included, for the stated rate of false alarms. A run outside the band is a diamond, and "
    "does not count for the band of later ones."
)


@dataclass(frozen=True, slots=True)
class RunDot:
    """A run's value, and between which values it was expected; no ends for the first few runs."""

    name: str
    value: float
    low: float | None
    high: float | None
    is_off: bool


def history(
    name: str,
    title: str,
    unit: str,
    dots: Sequence[RunDot],
    finding: str,
    *,
    of: str = "run",
    explained: str = EXPLAINED,
) -> Plot:
    """The values of all runs, or of what else `of` says, over their number, from 1."""
    places = range(1, len(dots) + 1)

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = canvas(width, 260)
        margins(figure, top=40, bottom=48)
        known = [(k, dot.low, dot.high) for k, dot in zip(places, dots, strict=True) if dot.low is not None]
        if known:
            at, low, high = zip(*known, strict=True)
            panel.fill_between(at, low, high, step="mid", color=MUTED, alpha=0.25, linewidth=0)
        panel.plot(places, [dot.value for dot in dots], "o-", color=SERIES[0], markersize=4, linewidth=1)
        off = [(k, dot.value) for k, dot in zip(places, dots, strict=True) if dot.is_off]
        if off:
            panel.plot(*zip(*off, strict=True), "D", color=BAD, markersize=7)
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        panel.set_xlabel(of, ha="right")
        head(panel, f"{title} ({unit})", named=False)
        return drawn(figure, drawing, panel)

    rows = [
        [str(k), dot.name, *("–" if v is None else number(v) for v in (dot.value, dot.low, dot.high))]
        for k, dot in zip(places, dots, strict=True)
    ]
    columns = ["Number", of.capitalize(), f"{title} ({unit})", "Expected from", "to"]
    return Plot(
        name, title, finding, explained, in_both_widths(name, draw), table(title, columns, rows, text=(1,))
    )
