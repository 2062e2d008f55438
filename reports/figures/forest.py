"""Ratios with their intervals, one row a number: how one contender compares with another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.ticker import FixedLocator, NullLocator

from reports.figures.drawing import BAD, GOOD, INK, MUTED, SERIES, TEXT, Drawing, Plot, canvas, drawn, margins
from reports.figures.drawing import in_both_widths as both
from reports.number_format import number
from reports.tables import table

ROW, HEADING, BOTTOM = 30.0, 26.0, 44.0
EXPLAINED = (
    "Right of 1 is better, whatever the unit. The bar is the 95% confidence interval over runs; one that "
    "crosses 1 leaves the question open. Small dots are single runs. Grey is not significant after allowing "
    "for all numbers in this figure."
)
TICKS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better a contender is in one number; `low` and `high` are None without an interval.

    `runs` are the same ratio for each run. `decided` says that the difference is significant.
    """

    title: str
    point: float
    low: float | None
    high: float | None
    runs: tuple[float, ...]
    decided: bool


def forest(
    name: str, title: str, better: str, worse: str, ratios: Sequence[Ratio], finding: str, *, explain: bool
) -> Plot:
    """Times better than the baseline on a logarithmic axis, 1 is equal; each run is a small dot."""
    every = [v for r in ratios for v in (r.point, r.low, r.high, *r.runs) if v and math.isfinite(v)]
    reach = max(max(abs(math.log(v)) for v in every), math.log(1.1)) * 1.15

    def draw(drawing: str, width: float) -> Drawing:
        height = HEADING + ROW * len(ratios) + BOTTOM
        figure, (panel,) = canvas(width, height)
        narrow = width < 600
        margins(figure, top=HEADING, bottom=BOTTOM, left=112 if narrow else 190, right=64 if narrow else 170)
        panel.set_xscale("log")
        panel.set_xlim(math.exp(-reach), math.exp(reach))
        panel.set_ylim(len(ratios) - 0.5, -0.5)
        panel.grid(visible=True, axis="x")
        panel.grid(visible=False, axis="y")
        panel.axvline(1, color=MUTED, linewidth=1.4)
        ticks = [tick for tick in TICKS if abs(math.log(tick)) <= reach]
        kept = ticks[:: 2 if narrow and len(ticks) > 5 else 1]
        panel.xaxis.set_major_locator(FixedLocator(kept))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(kept, [f"{tick:g}×" for tick in kept])
        panel.set_yticks(range(len(ratios)), [r.title for r in ratios])
        panel.tick_params(axis="y", labelcolor=INK)
        for k, ratio in enumerate(ratios):
            color = MUTED if not ratio.decided else GOOD if ratio.point > 1 else BAD
            if ratio.low and ratio.high:
                panel.plot([ratio.low, ratio.high], [k, k], color=color, linewidth=2.4, solid_capstyle="butt")
            panel.plot(
                ratio.runs, [k + 0.24] * len(ratio.runs), "o", color=SERIES[0], markersize=3, alpha=0.7
            )
            panel.plot([ratio.point], [k], "D" if ratio.decided else "o", color=color, markersize=7)
            panel.annotate(
                _words(ratio, short=narrow),
                (1, k),
                (8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                color=INK if ratio.decided else MUTED,
                fontsize=TEXT,
            )
        for text, at, side in ((f"← {worse}", 0.0, "left"), (f"{better} →", 1.0, "right")):
            panel.annotate(
                text,
                (at, 1),
                (0, 8),
                xycoords="axes fraction",
                textcoords="offset points",
                ha=side,
                color=MUTED,
                fontsize=TEXT,
            )
        return replace(drawn(figure, drawing, panel), hover=None)

    rows = [
        [r.title, number(r.point), _or_dash(r.low), _or_dash(r.high), "yes" if r.decided else "no"]
        for r in ratios
    ]
    columns = ["Number", "Times better", "95% low", "95% high", "Significant"]
    return Plot(
        name,
        title,
        finding,
        EXPLAINED if explain else "",
        both(name, draw),
        table("Ratios to the baseline, above 1 is better", columns, rows, text=(0, 4)),
    )


def _words(ratio: Ratio, *, short: bool) -> str:
    if short or ratio.low is None or ratio.high is None:
        return f"{number(ratio.point)}×"
    return f"{number(ratio.point)}×  [{number(ratio.low)}, {number(ratio.high)}]"


def _or_dash(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else number(value)
