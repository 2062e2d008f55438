"""Percentiles of a latency against the load: one panel a percentile, one line a contender."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from burstline.reports.blocks import Drawing
from burstline.reports.figures.drawing import (
    BAD,
    DASHES,
    GOOD,
    PAPER,
    SERIES,
    LogTicks,
    canvas,
    drawn,
    head,
    margins,
)
from burstline.reports.figures.scatter import LOG_FROM, MARKERS, whisker
from burstline.reports.number_format import Reach

FEW_TICKS = 8
LOADS_APART = 1.4
"""Loads closer than this ratio share a tick on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A value at one load; infinite where too many failed. `hollow` is one that cannot be relied on."""

    load: float
    value: Reach
    hollow: bool


@dataclass(frozen=True, slots=True)
class LoadPanel:
    """One percentile: the points of each contender in the order of load, and the SLO on it, if any."""

    title: str
    lines: Sequence[tuple[str, Sequence[LoadPoint]]]
    bound: float | None = None


def load_curves(name: str, width: float, panels: Sequence[LoadPanel], load_title: str) -> Drawing:
    """The panels over one shared axis of loads, logarithmic where loads differ eightfold."""
    loads = sorted({at.load for panel in panels for _, line in panel.lines for at in line})
    several = len(panels[0].lines) > 1
    figure, axes = canvas(width, 128 * len(panels) + 76 + 16 * several, len(panels))
    is_log = loads[-1] >= 8 * loads[0]
    for k, (panel, axis) in enumerate(zip(panels, axes, strict=True)):
        _fit(axis, panel)
        for n, (label, line) in enumerate(panel.lines):
            style = (SERIES[n % 4], DASHES[(n + n // 4) % 4], MARKERS[(n + n // 4) % 4])
            _draw(axis, label, line, *style)
        if panel.bound is not None:
            axis.axhline(panel.bound, color=GOOD, linewidth=1.2, linestyle=DASHES[1])
        head(axis, panel.title, named=several and k == 0)
    last = axes[-1]
    if is_log:
        last.set_xscale("log")
    last.xaxis.set_major_locator(FixedLocator(_ticks(loads, is_log=is_log)))
    last.xaxis.set_major_formatter(LogTicks())
    edge = (loads[-1] - loads[0]) * 0.06 or 1.0
    last.set_xlim((loads[0] / 1.2, loads[-1] * 1.2) if is_log else (loads[0] - edge, loads[-1] + edge))
    last.set_xlabel(f"{load_title}{', log' if is_log else ''}", loc="right")
    margins(figure, top=44 if several else 30, bottom=46, left=52, right=12)
    figure.subplots_adjust(hspace=0.42)
    return drawn(figure, name, last)


def _fit(axis: Axes, panel: LoadPanel) -> None:
    """From zero, or logarithmic where the greatest value is far above the least."""
    known = [at.value for _, line in panel.lines for at in line if math.isfinite(at.value.at)]
    values = [reach.at for reach in known] + ([panel.bound] if panel.bound else [])
    if not values:
        axis.set_ylim(0, 1)
        return
    most, least = max(values), min(values)
    top = min(max([reach.high for reach in known] + [most]), 1.4 * most)
    if least > 0 and most > LOG_FROM * least:
        axis.set_yscale("log")
        axis.set_ylim(least / 1.6, top * 1.3)
        axis.yaxis.set_major_formatter(LogTicks())
    else:
        axis.set_ylim(0, top * 1.12 or 1)


def _draw(axis: Axes, label: str, line: Sequence[LoadPoint], color: str, dashes: object, marker: str) -> None:
    high = axis.get_ylim()[1]
    for at in line:
        if math.isfinite(at.value.at):
            whisker(axis, at.value, at.load, color, along_x=False)
        else:
            axis.plot([at.load], [high], "x", color=BAD, markersize=6, clip_on=False)
    style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5, "markeredgewidth": 1.4}
    x = [at.load for at in line]
    y = [at.value.at if math.isfinite(at.value.at) else math.nan for at in line]
    axis.plot(x, y, linestyle=dashes, linewidth=1.8, label=label, **style)
    for at in line:
        if at.hollow and math.isfinite(at.value.at):
            axis.plot([at.load], [at.value.at], markerfacecolor=PAPER, **style)


def _ticks(loads: Sequence[float], *, is_log: bool) -> list[float]:
    """The loads themselves, without those whose numbers would lie on each other."""
    if not is_log:
        return list(loads[:: math.ceil(len(loads) / FEW_TICKS)])
    kept = [loads[0]]
    for load in loads[1:]:
        if load >= kept[-1] * LOADS_APART:
            kept.append(load)
    return kept
