"""Gaps between tokens over time: a map of how many were how long when, and their quantiles."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from burstline.loadgen.record.columns import Floats
from burstline.loadgen.stats.quantiles import order_for, quantile
from burstline.reports.blocks import Drawing, Plot, Table, table
from burstline.reports.figures.drawing import SERIES, LogTicks, canvas, drawn, head, in_both_widths, margins
from burstline.reports.figures.run_figures import FOOT, head_room, segments
from burstline.reports.number_format import Scale, count, duration, number, scale_for

LEVELS = 6
"""Shades of a cell."""
N_COLUMNS, N_ROWS = 120, 28
HEIGHT = 300.0
LEAST = 200
LONG = 5.0
"""A gap is long beyond so many times the median."""
_AT_ONCE = 1 << 20


def gap_map(event_s: Floats, follows: NDArray[np.bool_], edges: Floats) -> Plot | None:
    """Gaps between the tokens of one reply, by time and length; None where there are too few to show.

    `event_s` are arrivals, s, ascending within each reply; `follows` is false where a reply begins.
    """
    gaps_s = np.diff(event_s)
    kept = follows[1:] & (gaps_s > 0)
    gaps_s, at_s = gaps_s[kept], event_s[1:][kept]
    if len(gaps_s) < LEAST:
        return None
    ordered = gaps_s.copy()
    order_for(ordered, (0.001, 0.5))
    median_s, least_s, most_s = quantile(ordered, 0.5), quantile(ordered, 0.001), float(ordered[-1])
    del ordered  # a large run has many millions
    scale = scale_for("s", [median_s])
    times = np.linspace(edges[0], edges[-1], N_COLUMNS + 1)
    heights = np.geomspace(least_s / scale.divisor * 0.9, most_s / scale.divisor * 1.1, N_ROWS + 1)
    levels = _levels(at_s, gaps_s, times, heights * scale.divisor)

    def draw(name: str, width: float) -> Drawing:
        figure, (panel,) = canvas(width, HEIGHT)
        margins(figure, top=head_room(width), bottom=FOOT)
        panel.set_yscale("log")
        panel.set_ylim(heights[0], heights[-1])
        panel.set_xlim(times[0], times[-1])
        thick = (HEIGHT - head_room(width) - FOOT) / N_ROWS * 1.04
        middles = np.sqrt(heights[1:] * heights[:-1])
        for level in range(1, LEVELS + 1):
            column, row = np.nonzero(levels == level)
            panel.plot(
                *segments(times[column], times[column + 1], middles[row]), color=SERIES[0], linewidth=thick,
                alpha=level / LEVELS, solid_capstyle="butt",
            )  # fmt: skip
        _log_axis(panel)
        panel.set_xlabel("time since the run's start (s)", loc="right")
        head(panel, f"Gap between tokens ({scale.unit}, log scale)", named=False)
        return replace(drawn(figure, name, panel), hover=None)

    return Plot(
        "gaps",
        "Gaps between tokens over time",
        _finding(at_s, gaps_s, median_s, float(edges[-1])),
        "Each cell counts gaps that ended then and had that length; darker is more, on a logarithmic scale. "
        "A dark band is the engine's step; what lies far above it, at the same time in many replies, is "
        "mostly prefill of other requests, preemption or a pause of the server.",
        in_both_widths("gaps", draw),
        _table(at_s, gaps_s, np.linspace(edges[0], edges[-1], 13), scale),
    )


def _levels(at_s: Floats, gaps_s: Floats, times: Floats, lengths_s: Floats) -> NDArray[np.int64]:
    """The shade of each cell, 0 where it is empty; part by part, for a large run has millions of gaps."""
    parts = (slice(k, k + _AT_ONCE) for k in range(0, len(gaps_s), _AT_ONCE))
    cells = sum(np.histogram2d(at_s[part], gaps_s[part], (times, lengths_s))[0] for part in parts)
    levels: NDArray[np.float64] = np.ceil(LEVELS * np.log1p(cells) / np.log1p(np.max(cells)))
    return levels.astype(np.int64)


def _log_axis(panel: Axes) -> None:
    low, high = panel.get_ylim()
    locator = LogLocator(subs=(1, 2, 5))
    n_ticks = sum(low <= tick <= high for tick in locator.tick_values(low, high))
    panel.yaxis.set_major_locator(locator if n_ticks >= 3 else MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(LogTicks())


def _finding(at_s: Floats, gaps_s: Floats, median_s: float, end_s: float) -> str:
    finding = f"Half of {len(gaps_s):,} gaps are within {duration(median_s)}"
    is_long = gaps_s > LONG * median_s
    if not is_long.any():
        return f"{finding}."
    share = number(float(is_long.mean()) * 100)
    return f"{finding}; {share}% are longer than {LONG:g} times that, {_concentrated(at_s[is_long], end_s)}."


def _concentrated(at_s: Floats, end_s: float) -> str:
    """When half of the long gaps came, where that is within a tenth of the run."""
    at_s = np.sort(at_s)
    half = math.ceil(len(at_s) / 2)
    lasted_s = at_s[half - 1 :] - at_s[: len(at_s) - half + 1]
    k = int(np.argmin(lasted_s))
    if lasted_s[k] > 0.1 * end_s:
        return "spread over the run"
    start_s, last_s = duration(float(at_s[k])), duration(float(at_s[k + half - 1]))
    when = start_s if start_s == last_s else f"{start_s} to {last_s}"
    return f"half of them {when} after the start"


def _table(at_s: Floats, gaps_s: Floats, edges: Floats, scale: Scale) -> Table:
    rows = []
    for start_s, end_s in pairwise(edges):
        inside = gaps_s[(at_s >= start_s) & (at_s < end_s)] / scale.divisor
        if len(inside):
            some = [number(float(q)) for q in np.quantile(inside, [0.5, 0.9, 0.99, 1.0])]
            rows.append([f"{start_s:.3g}", count(len(inside)), *some])
    columns = ["From (s)", "Gaps", *(f"{p} ({scale.unit})" for p in ("p50", "p90", "p99", "max"))]
    return table("Gaps between tokens in twelfths of the run", columns, rows, text=())
