"""The figures of a run: each function takes data and returns a Plot, with its finding and its numbers.

Below them are the series that the timeline draws, in bins, in seconds from the run's start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.record.telemetry import Telemetry
from burstline.reports.blocks import Drawing, Plot, Table, table
from burstline.reports.figures import drawing as look
from burstline.reports.number_format import Scale, number, scale_for
from burstline.reports.sentences import say

HEAD, FOOT = 48, 46
"""Room in CSS pixels above and below the panels of a figure, for titles and for the axis."""
HEAD_WIDE = 32
"""The same above panels whose title and names share one line."""


NARROWEST = 300
"""At most so many rows of a burst are drawn for a narrow screen."""


def head_room(width: float) -> float:
    return HEAD if width < look.WIDE else HEAD_WIDE


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a timeline: by name, "" where the title says it, a value per bin, NaN where none is.

    `unit` is the stored unit of its lines.
    """

    title: str
    unit: str
    lines: Mapping[str, Floats]


Span = tuple[float, float, str]
"""A part of the run that the numbers leave out: start and end, seconds from the run's start, and name."""


def timeline(
    edges: Floats,
    panels: Sequence[Panel],
    marks: Sequence[tuple[float, str]],
    finding: str,
    greyed: Sequence[Span] = (),
) -> Plot:
    """Panels over one shared time axis, all bins but the last of equal width; `marks` are instants (s)."""
    scales = [scale_for(p.unit, map(_greatest, p.lines.values())) for p in panels]

    def draw(name: str, width: float) -> Drawing:
        narrow = width < look.WIDE
        figure, axes = look.canvas(width, (145 if narrow else 128) * len(panels) + 64, len(panels))
        for shown, axis, scale in zip(panels, axes, scales, strict=True):
            _draw_panel(axis, shown, scale, edges)
            for at_s, _ in marks:
                axis.axvline(at_s, color=look.MUTED, linewidth=1, linestyle=look.DASHES[2])
        grey(axes, greyed, edges[-1])
        for at_s, text in marks:
            # Beside the second panel's title, where no line and no legend is; on a narrow screen right of it.
            is_left = at_s <= 0.5 * edges[-1]
            if narrow and at_s < 0.86 * edges[-1]:
                at_s, text, is_left = float(edges[-1]), f"← {text}", False
            panel, side = axes[min(1, len(axes) - 1)], "left" if is_left else "right"
            look.write(panel, text, (at_s, 1), (0, 5), of=("data", "axes fraction"), ha=side)
        axes[-1].set_xlim(edges[0], edges[-1])
        axes[-1].set_xlabel("time since the run's start (s)", loc="right")
        look.margins(figure, top=head_room(width), bottom=FOOT)
        figure.subplots_adjust(hspace=0.65 if narrow else 0.42)
        return look.drawn(figure, name, axes[-1])

    explained = say("figure.timeline", width=f"{edges[1]:g}", greyed=say("figure.greyed") * bool(greyed))
    drawings, shown = look.in_both_widths("timeline", draw), _timeline_table(edges, panels, scales)
    return Plot("timeline", "Requests, tokens and memory over time", finding, explained, drawings, shown)


def grey(panels: Sequence[Axes], spans: Sequence[Span], end: float) -> None:
    """The parts of the run that do not count, named within the last panel: above each stands its title."""
    for start_s, end_s, text in spans:
        for panel in panels:
            panel.axvspan(start_s, min(end_s, end), color=look.MUTED, alpha=0.14, linewidth=0)
        is_left = start_s <= 0.5 * end
        at, side = (start_s, "left") if is_left else (end, "right")
        look.write(
            panels[-1], text, (at, 0), (3 if is_left else -3, 4), of=("data", "axes fraction"), ha=side
        )


def _draw_panel(axis: Axes, panel: Panel, scale: Scale, edges: Floats) -> None:
    styles = zip(panel.lines.items(), cycle(look.SERIES), cycle(look.DASHES), strict=False)
    for k, ((label, stored), color, dashes) in enumerate(styles):
        values = stored / scale.divisor
        # The first of several is broad: another line on top of it, as "waiting" often is, leaves it visible.
        width, alpha = (5, 0.45) if len(panel.lines) > 1 and k == 0 else (1.8, 1)
        style: Any = {"label": label, "color": color, "linestyle": dashes, "lw": width, "alpha": alpha}
        if (read := np.isfinite(values)).all():
            axis.stairs(values, edges, baseline=None, **style)
            if len(panel.lines) == 1:
                axis.stairs(values, edges, fill=True, color=color, alpha=0.12, linewidth=0)
            continue
        at, dot, values = ((edges[:-1] + edges[1:]) / 2)[read], edges[-1] * 5e-4, values[read]
        axis.plot(at, values, **style | {"lw": 1})
        axis.plot(*segments(at - dot, at + dot, values), color=color, lw=4.5, solid_capstyle="round")
    greatest = max(map(_greatest, panel.lines.values())) / scale.divisor
    axis.set_ylim(0, 100 if panel.unit == "fraction" else greatest * 1.08 or 1)
    if not panel.unit:
        axis.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    look.head(axis, _with_unit(panel.title, scale), named=any(panel.lines))


def _timeline_table(edges: Floats, panels: Sequence[Panel], scales: Sequence[Scale]) -> Table:
    shown = [
        (": ".join(filter(None, (panel.title, label))), values, scale)
        for panel, scale in zip(panels, scales, strict=True)
        for label, values in panel.lines.items()
    ]
    titles = [_with_unit(title, scale) for title, _, scale in shown]
    rows = [
        [f"{edges[k]:g}", *(number(values[k] / scale.divisor) for _, values, scale in shown)]
        for k in range(len(edges) - 1)
    ]
    caption = f"The timeline in bins of {edges[1] - edges[0]:g} s"
    return table(caption, ["From (s)", *titles], rows, text=(), id="timeline-numbers")


def outline(y: Floats, most: int) -> Ints:
    """Positions of the least, the middle and the greatest of each few neighbours, all where y is short."""
    if len(y) <= most:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), most // 3)
    ranked = (part[np.argsort(y[part], kind="stable")] for part in parts)
    return np.sort(np.concatenate([part[[0, len(part) // 2, -1]] for part in ranked]))


def evenly(n: int, most: int) -> Ints:
    """At most `most` of n positions, evenly spaced."""
    found: Ints = np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))
    return found


def request_rows(c: Columns, order: Ints, title: str, finding: str, numbers: str) -> Plot | None:
    """Each request in `order`: wait from due to the first token, then decoding; failures marked.

    A burst has a row for each, another load as many lanes as were in flight at once. `numbers` is the id of
    the table that lists the requests. None where nothing ever ended.
    """
    ended = np.fmax(c.last_s, c.closed_s)[order]
    if not np.isfinite(ended).any():
        return None
    is_burst = not np.ptp(c.due_s[order])
    place = np.arange(1.0, len(order) + 1) if is_burst else _lanes(c.due_s[order], ended)
    n_rows = float(place.max())
    height = float(np.clip((3 if is_burst else 14) * n_rows, 60, 440))

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, height + head_room(width) + FOOT)
        kept = evenly(len(order), NARROWEST if width == look.NARROW and is_burst else len(order))
        share = len(order) / len(kept) if is_burst else 1.0
        _draw_rows(panel, c, order[kept], ended[kept], place[kept],
                   thickness=float(np.clip(height / n_rows * 0.9 * share, 0.45, 14)))  # fmt: skip
        panel.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
        panel.set_ylim(n_rows + 0.5, 0.5)
        panel.set_xlim(min(float(np.nanmin(c.due_s)), 0), float(np.nanmax(ended)) * 1.005)
        panel.grid(visible=False)
        panel.set_xlabel("time since the run's start (s)", loc="right")
        legend = look.head(panel, "Requests" if is_burst else "Requests at a time")
        for handle in legend.get_lines() if legend else ():
            handle.set_linewidth(min(handle.get_linewidth() * 20, 7))
        look.margins(figure, top=head_room(width), bottom=FOOT)
        return look.drawn(figure, drawing, panel, "y" if is_burst else "")

    explained = say("figure.rows", how=say("figure.rows-burst" if is_burst else "figure.rows-lanes"))
    drawings = look.in_both_widths("rows", draw)
    return Plot("rows", title, finding, explained, drawings, numbers, tuple(order.tolist()))


def _lanes(due_s: Floats, ended_s: Floats) -> Floats:
    """For each request, in the order of `due_s`, the lowest lane that no earlier one still occupies."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = np.ones(len(due_s))
    for k in np.argsort(due_s, kind="stable"):
        while busy and busy[0][0] <= due_s[k]:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy) + 1
        lanes[k] = lane
        heappush(busy, (float(np.nan_to_num(ended_s[k], nan=due_s[k])), lane))
    return lanes


def _draw_rows(panel: Axes, c: Columns, order: Ints, ended: Floats, place: Floats, thickness: float) -> None:
    due, first, last = c.due_s[order], c.first_s[order], c.last_s[order]
    waited = np.where(np.isfinite(first), first, ended)
    phases = (
        (due, waited, np.isfinite(waited), look.SERIES[1], 0.5, "queue + prefill"),
        (first, last, last > first, look.SERIES[0], 0.9, "decode"),
    )
    for start, end, where, color, alpha, label in phases:
        panel.plot(*segments(start[where], end[where], place[where]), color=color, alpha=alpha, label=label,
                   linewidth=thickness, solid_capstyle="butt")  # fmt: skip
    lost = ~c.ok[order] & np.isfinite(ended)
    if lost.any():
        cross: Any = {"color": look.BAD, "markersize": 5, "markeredgewidth": 1.4}
        panel.plot(ended[lost], place[lost], "x", label="not served", **cross)


def segments(start: Floats, end: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Horizontal strokes as one broken line, which is one path in the SVG."""
    gap = np.full(len(y), np.nan)
    return np.column_stack([start, end, gap]).ravel(), np.column_stack([y, y, gap]).ravel()


def _greatest(values: Floats) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else 0.0


def _with_unit(title: str, scale: Scale) -> str:
    return f"{title} ({scale.unit})" if scale.unit else title


MOST_GAPS = 100_000
"""Of more gaps `step` takes evenly spaced ones."""
STALL = 10.0
"""A gap of so many medians is a stall, not a step."""


def bin_edges(end_s: float, n_bins: int = 200) -> Floats:
    """From 0 to `end_s` in at most `n_bins` bins of 1, 2 or 5 x 10^k seconds; the last ends with the run."""
    least = max(end_s, 1e-3) / n_bins
    power: float = 10.0 ** math.floor(math.log10(least))
    width = next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
    return np.append(np.arange(math.ceil(end_s / width - 1e-9)) * np.float64(width), end_s)


def step(c: Columns, since_s: float = -math.inf) -> float:
    """About how long the engine's steps take, seconds: half of all time between tokens is in longer gaps.

    Not the median gap: while prompts are taken in, steps are few and long. 0 where there are no gaps.
    """
    gaps = np.diff(c.event_s)[c.follows[1:] & (c.event_s[1:] >= since_s)]
    gaps = np.sort(gaps[gaps > 0][:: max(1, len(gaps) // MOST_GAPS)])
    if not len(gaps):
        return 0.0
    by_time = float(gaps[np.searchsorted(np.cumsum(gaps), gaps.sum() / 2)])
    return min(by_time, STALL * float(np.median(gaps)))


def tokens_per_s(c: Columns, edges: Floats) -> Floats:
    """Output tokens that arrived in each bin, per second; failed requests' too: the server made them."""
    counted: Floats = np.histogram(c.event_s, edges, weights=c.event_n)[0] / np.diff(edges)
    return counted


def in_flight(c: Columns, edges: Floats) -> Floats:
    """The most requests in flight (sent, not yet closed) at once in each bin."""
    sent = ~np.isnan(c.sent_s)
    opened = np.sort(c.sent_s[sent])
    closed = np.sort(np.nan_to_num(c.closed_s[sent], nan=np.inf))
    # Within a bin the number is greatest at the bin's start or just after one of its openings.
    before = np.searchsorted(opened, edges[:-1], "right")
    most = (before - np.searchsorted(closed, edges[:-1], "right")).astype(float)
    after = np.arange(1.0, len(opened) + 1) - np.searchsorted(closed, opened, "right")
    bins = np.searchsorted(edges, opened, "right") - 1
    inside = (bins >= 0) & (bins < len(most))
    np.maximum.at(most, bins[inside], after[inside])
    return most


def level(telemetry: Telemetry, source: str, name: str, edges: Floats) -> Floats:
    """The greatest reading in each bin, NaN where none was taken: it is not known what was in between."""
    at_s, values = telemetry.series(source, name)
    most = np.full(len(edges) - 1, np.nan)
    bins = np.searchsorted(edges, at_s, "right") - 1
    inside = (bins >= 0) & (bins < len(most))
    np.fmax.at(most, bins[inside], values[inside])
    return most
