"""The figures: each function takes data and returns a Plot, with its finding in words and its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from burstline.loadgen.record.columns import Columns, Floats, Ints
from burstline.reports.blocks import Cell, Drawing, Plot, Table, table
from burstline.reports.figures.drawing import (
    BAD,
    DASHES,
    HALF,
    MUTED,
    SERIES,
    WIDE,
    canvas,
    drawn,
    head,
    in_both_widths,
    margins,
    write,
)
from burstline.reports.number_format import Scale, count, duration, number, scale_for

HEAD, FOOT = 48, 46
"""Room in CSS pixels above and below the panels of a figure, for titles and for the axis."""
HEAD_WIDE = 32
"""The same above panels whose title and names share one line."""
MOST_POINTS = 2000
"""Of longer series `outline` says which points are drawn."""


def head_room(width: float) -> float:
    return HEAD if width < WIDE else HEAD_WIDE


@dataclass(frozen=True, slots=True)
class SeriesLine:
    """One series of a timeline's panel, "" where the title names it: a value per bin, NaN where none is."""

    label: str
    values: Floats


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a timeline; `unit` is the stored unit of its lines."""

    title: str
    unit: str
    lines: tuple[SeriesLine, ...]


Span = tuple[float, float, str]
"""A part of the run that the numbers leave out: start and end, seconds from the run's start, and name."""


def timeline(
    edges: Floats,
    panels: Sequence[Panel],
    marks: Sequence[tuple[float, str]],
    finding: str,
    greyed: Sequence[Span] = (),
) -> Plot:
    """Panels over one shared time axis in bins of equal width; `marks` are instants (s) worth a line."""
    scales = [scale_for(p.unit, [_greatest(line.values) for line in p.lines]) for p in panels]

    def draw(name: str, width: float) -> Drawing:
        narrow = width < WIDE
        figure, axes = canvas(width, (145 if narrow else 128) * len(panels) + 64, len(panels))
        for shown, axis, scale in zip(panels, axes, scales, strict=True):
            _draw_panel(axis, shown, scale, edges)
            for at_s, _ in marks:
                axis.axvline(at_s, color=MUTED, linewidth=1, linestyle=DASHES[2])
            for start_s, end_s, _ in greyed:
                axis.axvspan(start_s, min(end_s, edges[-1]), color=MUTED, alpha=0.14, linewidth=0)
        for start_s, _, text in greyed:  # within the last panel: above the panels stand their titles
            is_left = start_s <= 0.5 * edges[-1]
            at, side = (start_s, "left") if is_left else (float(edges[-1]), "right")
            write(axes[-1], text, (at, 0), (3 if is_left else -3, 4), of=("data", "axes fraction"), ha=side)
        for at_s, text in marks:
            # Beside the second panel's title, where no line and no legend is; on a narrow screen right of it.
            is_left = at_s <= 0.5 * edges[-1]
            if narrow and at_s < 0.86 * edges[-1]:
                at_s, text, is_left = float(edges[-1]), f"← {text}", False
            panel, side = axes[min(1, len(axes) - 1)], "left" if is_left else "right"
            write(panel, text, (at_s, 1), (0, 5), of=("data", "axes fraction"), ha=side)
        axes[-1].set_xlim(edges[0], edges[-1])
        axes[-1].set_xlabel("time since the run's start (s)", loc="right")
        margins(figure, top=head_room(width), bottom=FOOT)
        figure.subplots_adjust(hspace=0.65 if narrow else 0.42)
        return drawn(figure, name, axes[-1])

    return Plot(
        "timeline",
        "Requests, tokens and memory over time",
        finding,
        f"All panels share one time axis: look for what changes together. Each bin is {edges[1]:g} s wide. "
        "Rates are the mean of a bin and levels its maximum, so a rate hides peaks shorter than a bin."
        f"{' The grey parts are not measured.' if greyed else ''}",
        in_both_widths("timeline", draw),
        _timeline_table(edges, panels, scales),
    )


def _draw_panel(axis: Axes, panel: Panel, scale: Scale, edges: Floats) -> None:
    for k, (line, color, dashes) in enumerate(zip(panel.lines, cycle(SERIES), cycle(DASHES), strict=False)):
        values = line.values / scale.divisor
        # The first of several is broad: another line on top of it, as "waiting" often is, leaves it visible.
        broad = len(panel.lines) > 1 and k == 0
        axis.stairs(values, edges, baseline=None, label=line.label, color=color, linestyle=dashes,
                    linewidth=5 if broad else 1.8, alpha=0.45 if broad else 1)  # fmt: skip
        if len(panel.lines) == 1:
            axis.stairs(values, edges, fill=True, color=color, alpha=0.12, linewidth=0)
    greatest = max(_greatest(line.values) for line in panel.lines) / scale.divisor
    axis.set_ylim(0, greatest * 1.08 or 1)
    head(axis, _with_unit(panel.title, scale), named=any(line.label for line in panel.lines))


def _timeline_table(edges: Floats, panels: Sequence[Panel], scales: Sequence[Scale]) -> Table:
    shown = [(p, line, scale) for p, scale in zip(panels, scales, strict=True) for line in p.lines]
    titles = [_with_unit(": ".join(filter(None, (p.title, line.label))), scale) for p, line, scale in shown]
    rows = [
        [f"{edges[k]:g}", *(number(line.values[k] / scale.divisor) for _, line, scale in shown)]
        for k in range(len(edges) - 1)
    ]
    made = table(f"The timeline in bins of {edges[1] - edges[0]:g} s", ["From (s)", *titles], rows, text=())
    return replace(made, id="timeline-numbers")


def split_bar(name: str, title: str, parts: Sequence[tuple[str, float]]) -> Plot:
    """One bar in parts, seconds each."""
    total_s = sum(value for _, value in parts)
    scale = scale_for("s", [total_s])

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = canvas(width, 104)
        start = 0.0
        for (label, value), color in zip(parts, SERIES, strict=False):
            width_of = value / scale.divisor
            panel.barh([0], [width_of], left=start, height=0.6, color=color, alpha=0.85, label=label)
            start += width_of
        panel.set_yticks([])
        panel.grid(visible=False)
        panel.set_xlim(0, total_s / scale.divisor)
        panel.set_xlabel(f"mean ({scale.unit})", loc="right")
        head(panel, "")
        margins(figure, top=head_room(width), bottom=FOOT - 8, left=12)
        return replace(drawn(figure, drawing, panel), hover=None)

    words = ", ".join(f"{label} {duration(value)} ({value / total_s:.0%})" for label, value in parts)
    rows = [[label, number(value / scale.divisor), f"{value / total_s:.0%}"] for label, value in parts]
    return Plot(
        name,
        title,
        f"Of {duration(total_s)} on average: {words}.",
        "Queue and prefill are means by the server's clock; the rest is what the client measured besides.",
        in_both_widths(name, draw),
        table(title, ["Part", f"Mean ({scale.unit})", "Share"], rows),
    )


def drain(
    ttft_s: Floats,
    index: Ints,
    slope_s: float | None,
    finding: str,
    href: Callable[[int], str] = "#r{}".format,
) -> Plot | None:
    """TTFT in the order of sending, with the line of the slope; None where no first token came.

    +inf is a failed request; `index` names each one's record, `href` where that is listed.
    """
    kept = np.isfinite(ttft_s)
    if not kept.any():
        return None
    scale = scale_for("s", ttft_s.tolist())
    place, y = np.arange(1.0, len(ttft_s) + 1), ttft_s / scale.divisor
    came, lost = np.flatnonzero(kept), np.flatnonzero(~kept)
    came, lost = came[outline(y[came])], lost[evenly(len(lost), MOST_POINTS)]
    top, dot = float(y[kept].max()) * 1.06, len(place) * 2e-4

    def draw(name: str, width: float) -> Drawing:
        figure, (panel,) = canvas(width, 345)
        # Very short strokes with round caps: a thousand points as one path.
        dots = segments(place[came] - dot, place[came] + dot, y[came])
        panel.plot(*dots, color=SERIES[0], linewidth=4.4, alpha=0.5, solid_capstyle="round", label="request")
        if slope_s is not None:
            ends = np.array([1, len(place)])
            line = y[kept].mean() + slope_s / scale.divisor * (ends - place[kept].mean())
            label = f"{duration(slope_s)} per place"
            panel.plot(ends, line, color=SERIES[1], linestyle=DASHES[1], label=label)
        if not kept.all():
            above = np.full(len(lost), top)
            panel.plot(place[lost], above, "x", color=BAD, markersize=5, label="not served", clip_on=False)
        panel.set_ylim(0, top)
        panel.set_xlim(0, len(place) + 1)
        panel.set_xlabel("place in the queue (order of sending)", loc="right")
        head(panel, f"TTFT ({scale.unit})")
        margins(figure, top=head_room(width), bottom=FOOT, right=28)
        return drawn(figure, name, panel)

    return Plot(
        "drain",
        "TTFT against the place in the queue",
        finding,
        "A straight line means that the server starts requests at a steady rate: its slope is how much each "
        "request ahead in the queue adds to TTFT. Steps are waves that wait for room in the batch or the KV "
        "cache. Points far from the line were served out of order. The horizontal axis is the order of "
        f"sending, not time.{_thinned(len(place))}",
        in_both_widths("drain", draw, wide=HALF),
        _drain_table(place, index, y, scale, href),
    )


def outline(y: Floats) -> Ints:
    """Positions of the least, the middle and the greatest of each few neighbours, all where y is short."""
    if len(y) <= MOST_POINTS:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), MOST_POINTS // 3)
    ranked = (part[np.argsort(y[part], kind="stable")] for part in parts)
    return np.sort(np.concatenate([part[[0, len(part) // 2, -1]] for part in ranked]))


def evenly(n: int, most: int) -> Ints:
    """At most `most` of n positions, evenly spaced."""
    found: Ints = np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))
    return found


def _thinned(n: int) -> str:
    if n <= MOST_POINTS:
        return ""
    return (
        f" Of each {n / (MOST_POINTS // 3):.0f} neighbours among the {n:,} requests, the fastest, the median "
        "and the slowest are drawn."
    )


def _drain_table(place: Floats, index: Ints, ttft: Floats, scale: Scale, href: Callable[[int], str]) -> Table:
    picked = evenly(len(place), 41)
    rows: list[list[str | Cell]] = [
        [count(place[k]), Cell(f"#{index[k]}", href=href(int(index[k]))), _finite(ttft[k])] for k in picked
    ]
    columns = ["Place", "Request", f"TTFT ({scale.unit})"]
    return table(f"TTFT at {len(picked)} places in the queue", columns, rows, text=())


def request_rows(c: Columns, order: Ints, name: str, title: str, finding: str, numbers: str) -> Plot | None:
    """One thin row per request in `order`: wait from due to the first token, then decoding; failures marked.

    `numbers` is the id of the table that lists the requests. None where nothing ever ended.
    """
    ended = np.fmax(c.last_s, c.closed_s)[order]
    if not np.isfinite(ended).any():
        return None
    height = float(np.clip(3 * len(order), 60, 440))

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = canvas(width, height + head_room(width) + FOOT)
        _draw_rows(panel, c, order, ended, thickness=float(np.clip(height / len(order) * 0.9, 0.45, 14)))
        panel.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
        panel.set_ylim(len(order) + 0.5, 0.5)
        panel.set_xlim(min(float(np.nanmin(c.due_s)), 0), float(np.nanmax(ended)) * 1.005)
        panel.grid(visible=False)
        panel.set_xlabel("time since the run's start (s)", loc="right")
        legend = head(panel, "Requests")
        for handle in legend.get_lines() if legend else ():
            handle.set_linewidth(min(handle.get_linewidth() * 20, 7))
        margins(figure, top=head_room(width), bottom=FOOT)
        return drawn(figure, drawing, panel, "y")

    return Plot(
        name,
        title,
        finding,
        "Each row is one request from when it was due. The colour changes at its first token, so a long "
        "first part is time in the queue and in prefill. The rows are in the order of sending; with many "
        "requests they are thinner than a pixel.",
        in_both_widths(name, draw),
        numbers,
        tuple(order.tolist()),
    )


def _draw_rows(panel: Axes, c: Columns, order: Ints, ended: Floats, thickness: float) -> None:
    due, first, last = c.due_s[order], c.first_s[order], c.last_s[order]
    place = np.arange(1.0, len(order) + 1)
    waited = np.where(np.isfinite(first), first, ended)
    phases = (
        (due, waited, np.isfinite(waited), SERIES[1], 0.5, "queue + prefill"),
        (first, last, last > first, SERIES[0], 0.9, "decode"),
    )
    for start, end, where, color, alpha, label in phases:
        panel.plot(*segments(start[where], end[where], place[where]), color=color, alpha=alpha, label=label,
                   linewidth=thickness, solid_capstyle="butt")  # fmt: skip
    lost = ~c.ok[order] & np.isfinite(ended)
    if lost.any():
        panel.plot(
            ended[lost], place[lost], "x", color=BAD, markersize=5, markeredgewidth=1.4, label="not served"
        )


def segments(start: Floats, end: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Horizontal strokes as one broken line, which is one path in the SVG."""
    gap = np.full(len(y), np.nan)
    return np.column_stack([start, end, gap]).ravel(), np.column_stack([y, y, gap]).ravel()


def _greatest(values: Floats) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else 0.0


def _with_unit(title: str, scale: Scale) -> str:
    return f"{title} ({scale.unit})" if scale.unit else title


def _finite(value: float) -> str:
    return number(value) if math.isfinite(value) else "not served"
