"""The pictures of a first screen: latency over time, where a request's time goes, percentiles, methods."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from burstline.measure.record.columns import Floats, Ints
from burstline.measure.stats.figure import Estimate
from burstline.measure.stats.quantiles import quantile_of
from burstline.reports.blocks import LATENCIES, Drawing, Plot, table
from burstline.reports.figures import drawing as look
from burstline.reports.figures.run_figures import FOOT, Span, evenly, grey, head_room, outline, segments
from burstline.reports.number_format import Scale, number, point, reach_of, scale_for, scale_of
from burstline.reports.sentences import say

Bounds = Mapping[str, Mapping[str, float]]
"""By metric the bounds of its SLOs, in seconds, by their words: `{"TTFT": {"p90 ≤ 100 ms": 0.1}}`."""
DOTS = 360
"""At most about so many requests are drawn in a panel: a page has six of them."""
FEWEST = 16
"""A rolling percentile is of at least so many neighbours."""
SEEN = 0.004
"""A part below this share of the longest bar is not drawn."""
COLOURS = {
    "sent late": look.MUTED, "queue + prefill": look.SERIES[1], "queue": look.SERIES[1],
    "prefill": look.SERIES[2], "decode": look.SERIES[0], "stalls": look.SERIES[3],
}  # fmt: skip
PARTS = (*look.SERIES, look.MUTED, look.INK)
"""Colours of parts that have none of their own."""
ALL_REQUESTS = "all-requests"
"""The table with the numbers of each request, by id."""
FAR = 3.0
"""An SLO beyond so many times the slowest request is named, not drawn: it would flatten all else."""


def over_time(
    x: Floats,
    label: str,
    latencies: Mapping[str, Floats],
    bounds: Bounds,
    greyed: Sequence[Span],
    finding: str,
    *,
    title: str,
    wide: float,
) -> Plot:
    """Each request's latencies at `x`, a panel a metric, with rolling p50 and p90 of its neighbours.

    Latencies are in seconds, +inf for a failed request, NaN where there is none.
    """
    order = np.argsort(x, kind="stable")
    x, size = x[order], max(FEWEST, len(x) // 25)
    last = len(x) - size
    starts: Ints = np.unique(np.linspace(0, last, 50).astype(np.int64)) if last >= size else np.array([], int)
    middles = x[starts + size // 2]
    values = {name: each[order] for name, each in latencies.items()}
    scales = {name: scale_for("s", each.tolist()) for name, each in values.items()}
    rolled = {name: _rolled(each, starts, size) / scales[name].divisor for name, each in values.items()}

    def draw(drawing: str, width: float) -> Drawing:
        figure, panels = look.canvas(
            width, (72 if width == look.NARROW else 104) * len(values) + 92, len(values)
        )
        for k, (panel, (name, each)) in enumerate(zip(panels, values.items(), strict=True)):
            scale, slos = scales[name], bounds.get(name, {})
            _draw_requests(panel, x, each / scale.divisor, few=width == look.NARROW, named=not k)
            if len(starts):
                own = np.where(np.isfinite(rolled[name]), rolled[name], np.nan)
                style: Any = {"color": look.SERIES[0], "linewidth": 1.5}
                panel.plot(middles, own[0], **style, label="" if k else f"p50 of {size:,}")
                panel.plot(middles, own[1], **style, linestyle=look.DASHES[1], label="" if k else "p90")
            _draw_bounds(panel, slos, scale)
            look.head(panel, f"{name} ({scale.unit})", named=not k)
        span = float(np.ptp(x)) or 1.0
        panels[-1].set_xlim(min(x[0], 0) - 0.01 * span, max(x[-1], x[0] + span) + 0.01 * span)
        grey(panels, greyed, x[-1])
        panels[-1].set_xlabel(label, loc="right")
        look.margins(figure, top=head_room(width), bottom=FOOT, left=46, right=26)
        figure.subplots_adjust(hspace=0.42)
        return look.drawn(figure, drawing, panels[-1], "")

    thinned, left_out = say("figure.thinned") * (len(x) > DOTS), say("figure.greyed") * bool(greyed)
    explained = say("figure.over-time", thinned=thinned, greyed=left_out)
    drawings = look.in_both_widths("over-time", draw, wide=wide)
    return Plot("over-time", title, finding, explained, drawings, ALL_REQUESTS)


def _rolled(values: Floats, starts: Ints, size: int) -> Floats:
    """p50 and p90 of `size` neighbours from each start on; +inf among failures, NaN without a value."""
    return np.array([[quantile_of(values[k : k + size], p) for k in starts] for p in (0.5, 0.9)])


def _draw_requests(panel: Axes, x: Floats, y: Floats, *, few: bool, named: bool) -> None:
    """A dot a request; what failed is a cross at the top."""
    came, lost = np.flatnonzero(np.isfinite(y)), np.flatnonzero(np.isposinf(y))
    came = came[outline(y[came], DOTS // 2 if few else DOTS)]
    dot = (float(np.ptp(x)) or 1.0) * 2e-4
    # Very short strokes with round caps: hundreds of points as one path.
    panel.plot(*segments(x[came] - dot, x[came] + dot, y[came]), color=look.SERIES[0], alpha=0.4,
               linewidth=8 if len(x) < FEWEST else 3.6, solid_capstyle="round",
               label="request" if named else "")  # fmt: skip
    top = float(y[came].max(initial=0.0)) * 1.1 or 1.0
    panel.set_ylim(0, top)
    if len(lost):
        lost = lost[evenly(len(lost), DOTS // 3)]
        panel.plot(x[lost], np.full(len(lost), 0.97 * top), "x", color=look.BAD, markersize=5, label="failed",
                   clip_on=False)  # fmt: skip


def _draw_bounds(panel: Axes, slos: Mapping[str, float], scale: Scale) -> None:
    """A line for each bound, with its words where these have room; what is far above is only named."""
    top = panel.get_ylim()[1]
    far = [words for words, bound_s in slos.items() if bound_s / scale.divisor > FAR * top]
    near = sorted((bound_s / scale.divisor, words) for words, bound_s in slos.items() if words not in far)
    top = max([1.3 * top if far else top, *(1.25 * at for at, _ in near)])
    panel.set_ylim(0, top)
    free = 0.0
    for at, words in near:
        panel.axhline(at, color=look.GOOD, linestyle=look.DASHES[2], linewidth=1.6)
        if at >= free and at < 0.85 * top:
            look.write(
                panel, f"SLO {words}", (1, at), (-2, 3), look.GOOD, of=("axes fraction", "data"), ha="right"
            )
            free = at + 0.2 * top
    if far:
        text = f"SLO {', '.join(far)} is above"
        look.write(panel, text, (1, 1), (-2, -4), look.GOOD, of="axes fraction", ha="right", va="top")


def time_split(parts: Mapping[str, Floats], groups: Mapping[str, Ints], finding: str, also: str) -> Plot:
    """For each group of requests one bar in the parts of their mean time, in seconds."""
    longest_s = max(float(sum(each[own].mean() for each in parts.values())) for own in groups.values())
    means = {name: [float(each[own].mean()) for own in groups.values()] for name, each in parts.items()}
    means = {name: each for name, each in means.items() if max(each) > SEEN * longest_s}
    scale = scale_for("s", [longest_s])

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 28 * len(groups) + 80)
        bars = {name: [each / scale.divisor for each in each_s] for name, each_s in means.items()}
        stack(panel, bars, list(groups), [COLOURS.get(name, look.INK) for name in bars], width - 66)
        panel.set_xlabel(f"mean of the requests there ({scale.unit})", loc="right")
        look.head(panel, "")
        look.margins(figure, top=26, bottom=FOOT, left=56, right=10)
        return look.drawn(figure, drawing, panel, "")

    rows = [[name, *(number(each / scale.divisor) for each in means[name])] for name in means]
    title, drawings = "Where a request's time goes", (look.attempt("time-split", look.NARROW, draw),)
    shown = table(title, ["Part", *(f"{group} ({scale.unit})" for group in groups)], rows)
    return Plot("time-split", title, finding, say("figure.time-split", also=also), drawings, shown)


def ranges(
    known: Mapping[str, Mapping[str, Estimate]], values: Mapping[str, Floats], bounds: Bounds, finding: str
) -> Plot:
    """Each metric's percentiles on a line of its own from 0, with 95% intervals; dots where there are none.

    `values` are those of single requests, seconds: they are drawn where no percentile is known.
    """

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 52 * len(known) + 8)
        for k, (name, own) in enumerate(known.items()):
            served = values[name][np.isfinite(values[name])]
            scale = scale_of(own.values()) if own else scale_for("s", served.tolist())
            dots = served / scale.divisor
            ends = [figure.point / scale.divisor for figure in own.values()] or dots.tolist()
            slos = {words: at / scale.divisor for words, at in bounds.get(name, {}).items()}
            near = [at for at in (*ends, *slos.values()) if at <= FAR * max(ends)]
            top = max(near, default=1.0) * 1.04 or 1.0
            if own:
                _draw_range(panel, k, own, scale, top)
            else:
                panel.plot(dots / top, np.full(len(dots), k), "o", color=look.SERIES[0], alpha=0.5)
            for at in slos.values():
                if at <= top:
                    panel.plot([at / top] * 2, [k - 0.11, k + 0.11], color=look.GOOD, linewidth=2.4)
            look.write(panel, name, (0, k), (0, 11), look.INK)
            if slos:
                text = f"SLO {', '.join(slos)}{'' if min(slos.values()) <= top else ', to the right'}"
                look.write(panel, text, (1, k), (0, 11), look.GOOD, ha="right")
            told = [f"{'●' if p == 'p50' else '○'} {p} {point(figure, scale)}" for p, figure in own.items()]
            if not own and len(served):
                low, high = (number(each / scale.divisor) for each in (served.min(), served.max()))
                told = [f"{low} to {high}" if low != high else low]
            look.write(panel, f"{'   '.join(told)} {scale.unit}", (0, k), (0, -20))
        panel.set_xlim(0, 1)
        panel.set_ylim(len(known) - 0.45, -0.4)
        panel.set_axis_off()
        look.margins(figure, top=4, bottom=0, left=8, right=8)
        return look.drawn(figure, drawing, panel, "")

    title = "Percentiles" if any(known.values()) else "Each request"
    drawings = (look.attempt("ranges", look.NARROW, draw),)
    return Plot("ranges", title, finding, say("figure.ranges"), drawings, LATENCIES)


def _draw_range(panel: Axes, k: int, own: Mapping[str, Estimate], scale: Scale, top: float) -> None:
    reaches = [reach_of(figure, scale.divisor * top) for figure in own.values()]
    panel.plot([0, 1], [k, k], color=look.MUTED, linewidth=0.8, alpha=0.5)
    panel.plot([reaches[0].at, reaches[-1].at], [k, k], color=look.SERIES[0], linewidth=2)
    for p, reach in zip(own, reaches, strict=True):
        low, high = max(reach.low, 0.0), min(reach.high, 1.0)
        panel.plot([low, high], [k, k], color=look.SERIES[0], linewidth=11, alpha=0.22, solid_capstyle="butt")
        if math.isinf(reach.high):
            panel.plot([high], [k], ">", color=look.SERIES[0], markersize=6, clip_on=False)
        fill = look.SERIES[0] if p == "p50" else look.PAPER
        panel.plot([reach.at], [k], "o", color=look.SERIES[0], markerfacecolor=fill, markersize=7.5)


def stack(
    panel: Axes,
    bars: Mapping[str, Sequence[float]],
    names: Sequence[str],
    colours: Sequence[str],
    room: float,
    *,
    named: bool = False,
) -> None:
    """A bar of parts for each name, from the top; a part has its number, or its name, where that fits.

    `room` is how many CSS pixels the longest bar takes.
    """
    starts = np.zeros(len(names))
    longest = max(map(sum, zip(*bars.values(), strict=True)))
    for (part, lengths), color in zip(bars.items(), cycle(colours), strict=False):
        style: Any = {"height": 0.62, "color": color, "alpha": 0.9, "edgecolor": look.PAPER, "linewidth": 0.6}
        panel.barh(range(len(names)), lengths, left=starts, label=part, **style)
        for k, length in enumerate(lengths):
            text = part if named else number(length)
            if length * room / longest > 7 * len(text) + 8:
                at = (starts[k] + length / 2, k)
                panel.annotate(text, at, ha="center", va="center", color=look.PAPER)
        starts += lengths
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, longest)
    panel.grid(visible=False)


def methods(
    name: str, title: str, unit: str, amounts: Mapping[str, Mapping[str, float]], most: float = 0.0
) -> Plot:
    """Each method as a bar of its parts; a line at `most`, which a device has, where it is known."""
    names, totals = list(amounts), {method: sum(parts.values()) for method, parts in amounts.items()}
    parts = dict.fromkeys(part for own in amounts.values() for part, amount in own.items() if amount)
    bars = {part: [amounts[method].get(part, 0.0) for method in names] for part in parts}

    def draw(drawing: str, width: float) -> Drawing:
        n_columns = max(1, int((width - 170) // (26 + 6.4 * max(map(len, [*parts, "a device has"])))))
        figure, (panel,) = look.canvas(width, 27 * len(names) + 18 * -(-(len(parts) + 1) // n_columns) + 62)
        end = max(1.04 * most, *totals.values())
        stack(panel, bars, names, PARTS, (width - 184) * max(totals.values()) / end)
        panel.set_xlim(0, end)
        if most:
            panel.axvline(most, color=look.BAD, linestyle=look.DASHES[1], label="a device has")
        panel.set_xlabel(unit, loc="right")
        look.names_above(panel, n_columns)
        look.margins(figure, top=18 * -(-(len(parts) + 1) // n_columns) + 8, bottom=46, left=168)
        return look.drawn(figure, drawing, panel, "")

    best = min(totals, key=totals.__getitem__)
    finding = f"{title} from {number(totals[best])} {unit} ({best}) to {number(max(totals.values()))} {unit}."
    rows = [[method, *(number(bars[part][k]) for part in parts)] for k, method in enumerate(names)]
    shown = table(title, ["Method", *(f"{part} ({unit})" for part in parts)], rows)
    return Plot(name, title, finding, "", look.in_both_widths(name, draw), shown)
