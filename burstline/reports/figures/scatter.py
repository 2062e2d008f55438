"""Curves of labelled points with intervals both ways: how a trade-off is drawn."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, MaxNLocator

from burstline.reports.blocks import Drawing
from burstline.reports.figures import drawing as look
from burstline.reports.figures.run_figures import FOOT, HEAD_WIDE, head_room
from burstline.reports.number_format import Reach

MARKERS = ("o", "s", "^", "D")
"""The third cue: curve k has colour SERIES[k], line style DASHES[k] and this marker."""
LOG_FROM = 15.0
"""Beyond this ratio of greatest to least the horizontal axis is logarithmic."""
Box = tuple[float, float, float, float]
ARROW = 16.0
"""How long the arrow of an interval without a bound is, CSS pixels."""
LETTER, LINE = 6.6, 13.0
"""About how wide a letter and how high a line of text is, CSS pixels."""


@dataclass(frozen=True, slots=True)
class Dot:
    """One point with the word beside it; `hollow` is one that cannot be relied on."""

    text: str
    x: Reach
    y: Reach
    hollow: bool


@dataclass(frozen=True, slots=True)
class ScatterCurve:
    """Points joined in their order; None is one that is not known, where the line breaks."""

    label: str
    dots: tuple[Dot | None, ...]
    is_joined: bool = True

    @property
    def known(self) -> list[Dot]:
        return [dot for dot in self.dots if dot is not None]


@dataclass(frozen=True, slots=True)
class Region:
    """Where targets are met: x at least a bound, y at least (or at most) one; None is no bound.

    `bracket` is between which x the limit lies, where that is known.
    """

    x: float | None
    y: float | None
    text: str
    y_at_most: bool = False
    bracket: tuple[float, float] | None = None


def scatter(
    name: str,
    width: float,
    curves: Sequence[ScatterCurve],
    axes: tuple[str, str],
    region: Region | None = None,
    below: tuple[Sequence[ScatterCurve], str] | None = None,
) -> Drawing:
    """The curves over `axes`, the labels of x and y: `{log}` in one says whether it is logarithmic.

    No value on such an axis may be 0 where the greatest is far above the least. What is `below` is drawn in a
    second panel on the same x, with its label of y.
    """
    figure, (panel, *others) = look.canvas(
        width, 380 if width >= look.WIDE else 345, 1 if below is None else 2
    )
    x_label, y_label = axes
    x = [dot.x for curve in curves for dot in curve.known]
    y = [dot.y for curve in curves for dot in curve.known]
    panel.grid(visible=True, axis="x")
    x_is_log, y_is_log = (
        "{log}" in label and max(r.at for r in of) > LOG_FROM * min(r.at for r in of)
        for label, of in ((x_label, x), (y_label, y))
    )
    _fit_x(panel, x, is_log=x_is_log)
    _fit_y(panel, y, is_log=y_is_log)
    written = _shade(panel, region) if region else None
    for each, own in zip((panel, *others), (curves, *(below or ())[:1]), strict=True):
        for k, curve in enumerate(own):
            _draw(each, curve, look.SERIES[k % 4], look.DASHES[(k + k // 4) % 4], MARKERS[(k + k // 4) % 4])
        if region is not None and region.bracket is not None:
            each.axvspan(*region.bracket, color=look.MUTED, alpha=0.2, linewidth=0)
    if below is not None:
        _fit_y(others[0], [dot.y for curve in below[0] for dot in curve.known], is_log=False)
        look.head(others[0], below[1], named=False)
        if region is not None and region.bracket is not None:
            look.write(others[0], "grey: the limit", (1, 1), (0, 9), of="axes fraction", ha="right")
        figure.subplots_adjust(hspace=0.3)
    [panel, *others][-1].set_xlabel(x_label.format(log=", log" if x_is_log else ""), loc="right")
    look.head(panel, y_label.format(log=", log" if y_is_log else ""), named=len(curves) > 1)
    look.margins(figure, top=head_room(width) if len(curves) > 1 else HEAD_WIDE, bottom=FOOT)
    taken = [written.get_window_extent()] if written else []
    for text, at in _places(panel, curves, [(box.x0, box.y0, box.x1, box.y1) for box in taken]):
        panel.annotate(text, at, xycoords="figure pixels", va="center", color=look.INK, fontsize=look.TEXT)
    return look.drawn(figure, name, panel)


def _fit_x(panel: Axes, x: Sequence[Reach], *, is_log: bool) -> None:
    """Room for all points and for their intervals, unless these reach far beyond the points."""
    right = min(max(_finite(r.high, r.at) for r in x), 1.5 * max(r.at for r in x))
    if is_log:
        panel.set_xscale("log")
        panel.set_xlim(_least(x), right * 1.25)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(look.LogTicks())
    else:
        panel.set_xlim(0, right * 1.06)
        panel.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def _fit_y(panel: Axes, y: Sequence[Reach], *, is_log: bool) -> None:
    top = min(max(_finite(r.high, r.at) for r in y), 1.5 * max(r.at for r in y))
    if is_log:
        panel.set_yscale("log")
        panel.set_ylim(_least(y), top * 1.25)
        panel.yaxis.set_major_formatter(look.LogTicks())
        return
    if all(float(r.at).is_integer() for r in y):
        panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    panel.set_ylim(0, top * 1.12)


def _least(values: Sequence[Reach]) -> float:
    return max(min(_finite(r.low, r.at) for r in values), min(r.at for r in values) / 1.5) / 1.25


def _shade(panel: Axes, region: Region) -> Annotation | None:
    """The region and its name; None where it lies beyond the axes."""
    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    x = region.x
    first, last = left if x is None else x, right
    low, high = (bottom if region.y is None else region.y), top
    if region.y is not None and region.y_at_most:
        low, high = bottom, min(region.y, top)
    if first >= last or low >= high or region.x is region.y is None:
        return None
    panel.fill_between([first, last], low, high, color=look.GOOD, alpha=0.09, linewidth=0)
    if x is not None and left < x < right:
        panel.plot([x, x], [low, high], color=look.GOOD, linewidth=1.2, linestyle=look.DASHES[1])
    if region.y is not None and bottom < region.y < top:
        panel.plot([first, last], [region.y] * 2, color=look.GOOD, linewidth=1.2, linestyle=look.DASHES[1])
    at, off, side = (first, 5, "left") if x is None else (last, -5, "right")
    return look.write(panel, region.text, (at, high), (off, -5), look.GOOD, ha=side, va="top")


def _draw(panel: Axes, curve: ScatterCurve, color: str, dashes: object, marker: str) -> None:
    points = [(math.nan, math.nan) if dot is None else (dot.x.at, dot.y.at) for dot in curve.dots]
    for dot in curve.known:
        whisker(panel, dot.x, dot.y.at, color, along_x=True)
        whisker(panel, dot.y, dot.x.at, color, along_x=False)
    style: dict[str, Any] = {"color": color, "linewidth": 1.8, "marker": marker}
    style |= {"markersize": 6.5, "markeredgewidth": 1.6}
    xs, ys = zip(*points, strict=True)
    panel.plot(xs, ys, linestyle=dashes if curve.is_joined else "none", label=curve.label, **style)
    hollow = [(dot.x.at, dot.y.at) for dot in curve.known if dot.hollow]
    if hollow:
        xs, ys = zip(*hollow, strict=True)
        panel.plot(xs, ys, linestyle="none", markerfacecolor=look.PAPER, **style)


def whisker(panel: Axes, reach: Reach, beside: float, color: str, *, along_x: bool) -> None:
    """An interval as a thin stroke, clipped to the axes; a short arrow where it has no bound.

    `beside` is the point's value on the other axis. A stroke to the edge would pass for a grid line.
    """
    first, last = panel.get_xlim() if along_x else panel.get_ylim()
    thin: dict[str, Any] = {"color": color, "alpha": 0.55, "linewidth": 1.2}
    ends = [min(max(end, first), last) if math.isfinite(end) else reach.at for end in (reach.low, reach.high)]
    x, y = (ends, [beside] * 2) if along_x else ([beside] * 2, ends)
    panel.plot(x, y, solid_capstyle="butt", **thin)
    for end, length in ((reach.low, -ARROW), (reach.high, ARROW)):
        if not math.isfinite(end):
            panel.annotate(
                "",
                (reach.at, beside) if along_x else (beside, reach.at),
                (length, 0) if along_x else (0, length),
                textcoords="offset points",
                arrowprops={"arrowstyle": "<-", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7, **thin},
            )


def _places(
    panel: Axes, curves: Sequence[ScatterCurve], written: Sequence[Box]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Where each point's word has room beside it, in pixels, off the lines if it can be; what finds none is
    left out."""
    at: dict[int, tuple[float, float]] = {
        id(dot): tuple(panel.transData.transform((dot.x.at, dot.y.at)))
        for curve in curves
        for dot in curve.known
    }
    taken = [*written, *((x - 5, y - 5, x + 5, y + 5) for x, y in at.values())]
    lines = [box for curve in curves for box in _along(curve, at)]
    edge = panel.get_window_extent()
    for curve in curves:
        for dot in curve.known:
            x, y = at[id(dot)]
            width = LETTER * len(dot.text)
            right, left, middle = x + 7, x - width - 7, x - width / 2
            places = [(right, y + 9), (middle, y + 14), (right, y - 9)]
            places += [(left, y + 9), (left, y - 9), (middle, y - 14)]
            boxes = [(left, middle - LINE / 2, left + width, middle + LINE / 2) for left, middle in places]
            free = [
                box
                for box in boxes
                if box[0] > edge.x0 and box[2] < edge.x1 + 14 and edge.y0 < box[1] and box[3] < edge.y1 + 8
                if not any(_meet(box, other) for other in taken)
            ]
            off_lines = (box for box in free if not any(_meet(box, line) for line in lines))
            chosen = next(off_lines, free[0] if free else None)
            if chosen is not None:
                taken.append(chosen)
                yield dot.text, (chosen[0], (chosen[1] + chosen[3]) / 2)


def _along(curve: ScatterCurve, at: Mapping[int, tuple[float, float]]) -> Iterator[Box]:
    """Small boxes along the lines of a curve, in pixels."""
    for a, b in pairwise(curve.dots):
        if a is not None and b is not None:
            (x0, y0), (x1, y1) = at[id(a)], at[id(b)]
            n = max(int(math.hypot(x1 - x0, y1 - y0) / 4), 1)
            for k in range(n + 1):
                x, y = x0 + (x1 - x0) * k / n, y0 + (y1 - y0) * k / n
                yield x - 1, y - 1, x + 1, y + 1


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _finite(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise
