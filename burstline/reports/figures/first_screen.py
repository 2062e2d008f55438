"""The pictures of a run's first screen: latency over time, where a request's time goes, percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from burstline.measure.record.columns import Floats, Ints
from burstline.measure.stats.figure import Estimate
from burstline.reports.blocks import LATENCIES, Drawing, Plot, table
from burstline.reports.figures.drawing import (
    BAD,
    DASHES,
    GOOD,
    INK,
    MUTED,
    NARROW,
    PAPER,
    SERIES,
    attempt,
    canvas,
    drawn,
    head,
    in_both_widths,
    margins,
    write,
)
from burstline.reports.figures.run_figures import FOOT, Span, evenly, grey, head_room, outline, segments
from burstline.reports.number_format import Scale, number, point, reach_of, scale_for, scale_of

Bounds = Mapping[str, Mapping[str, float]]
"""By metric the bounds of its SLOs, in seconds, by their words: `{"TTFT": {"p90 ≤ 100 ms": 0.1}}`."""
DOTS = 360
"""At most about so many requests are drawn in a panel: a page has six of them."""
FEWEST = 16
"""A rolling percentile is of at least so many neighbours."""
SEEN = 0.004
"""A part below this share of the longest bar is not drawn."""
COLOURS = {"sent late": MUTED, "queue + prefill": SERIES[1], "queue": SERIES[1], "prefill": SERIES[2]}
COLOURS |= {"decode": SERIES[0], "stalls": SERIES[3]}
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
        figure, panels = canvas(width, (88 if width == NARROW else 104) * len(values) + 92, len(values))
        for k, (panel, (name, each)) in enumerate(zip(panels, values.items(), strict=True)):
            scale, slos = scales[name], bounds.get(name, {})
            _draw_requests(panel, x, each / scale.divisor, few=width == NARROW, named=not k)
            if len(starts):
                own = np.where(np.isfinite(rolled[name]), rolled[name], np.nan)
                style: Any = {"color": SERIES[0], "linewidth": 1.5}
                panel.plot(middles, own[0], **style, label="" if k else f"p50 of {size:,}")
                panel.plot(middles, own[1], **style, linestyle=DASHES[1], label="" if k else "p90")
            _draw_bounds(panel, slos, scale)
            head(panel, f"{name} ({scale.unit})", named=not k)
        span = float(np.ptp(x)) or 1.0
        panels[-1].set_xlim(min(x[0], 0) - 0.01 * span, max(x[-1], x[0] + span) + 0.01 * span)
        grey(panels, greyed, x[-1])
        panels[-1].set_xlabel(label, loc="right")
        margins(figure, top=head_room(width), bottom=FOOT, left=46, right=26)
        figure.subplots_adjust(hspace=0.42)
        return drawn(figure, drawing, panels[-1], "")

    thinned = ", thinned to the fastest, the median and the slowest of each few" if len(x) > DOTS else ""
    return Plot(
        "over-time",
        title,
        finding,
        f"Each dot is a request{thinned}. A drift, a stall or a slow start shows here and in no percentile."
        f"{' The grey parts are not measured.' if greyed else ''}",
        in_both_widths("over-time", draw, wide=wide),
        ALL_REQUESTS,
    )


def _rolled(values: Floats, starts: Ints, size: int) -> Floats:
    """p50 and p90 of `size` neighbours from each start on; +inf among failures, NaN without a value."""
    found = np.full((2, len(starts)), np.nan)
    for k, start in enumerate(starts):
        own = values[start : start + size]
        own = own[~np.isnan(own)]
        if len(own):
            found[:, k] = np.quantile(own, (0.5, 0.9), method="inverted_cdf")
    return found


def _draw_requests(panel: Axes, x: Floats, y: Floats, *, few: bool, named: bool) -> None:
    """A dot a request; what failed is a cross at the top."""
    came, lost = np.flatnonzero(np.isfinite(y)), np.flatnonzero(np.isposinf(y))
    came = came[outline(y[came], DOTS // 2 if few else DOTS)]
    dot = (float(np.ptp(x)) or 1.0) * 2e-4
    # Very short strokes with round caps: hundreds of points as one path.
    panel.plot(*segments(x[came] - dot, x[came] + dot, y[came]), color=SERIES[0], alpha=0.4,
               linewidth=8 if len(x) < FEWEST else 3.6, solid_capstyle="round",
               label="request" if named else "")  # fmt: skip
    top = float(y[came].max(initial=0.0)) * 1.1 or 1.0
    panel.set_ylim(0, top)
    if len(lost):
        lost = lost[evenly(len(lost), DOTS // 3)]
        panel.plot(x[lost], np.full(len(lost), 0.97 * top), "x", color=BAD, markersize=5, label="failed",
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
        panel.axhline(at, color=GOOD, linestyle=DASHES[2], linewidth=1.6)
        if at >= free and at < 0.85 * top:
            write(panel, f"SLO {words}", (1, at), (-2, 3), GOOD, of=("axes fraction", "data"), ha="right")
            free = at + 0.2 * top
    if far:
        text = f"SLO {', '.join(far)} is above"
        write(panel, text, (1, 1), (-2, -4), GOOD, of="axes fraction", ha="right", va="top")


def time_split(parts: Mapping[str, Floats], groups: Mapping[str, Ints], finding: str, also: str) -> Plot:
    """For each group of requests one bar in the parts of their mean time, in seconds."""
    longest_s = max(float(sum(each[own].mean() for each in parts.values())) for own in groups.values())
    means = {name: [float(each[own].mean()) for own in groups.values()] for name, each in parts.items()}
    means = {name: each for name, each in means.items() if max(each) > SEEN * longest_s}
    scale = scale_for("s", [longest_s])

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = canvas(width, 28 * len(groups) + 80)
        starts = np.zeros(len(groups))
        room = (width - 66) / (longest_s / scale.divisor)
        for name, each_s in means.items():
            color = COLOURS.get(name, INK)
            each = np.array(each_s) / scale.divisor
            panel.barh(range(len(groups)), each, left=starts, height=0.62, color=color, alpha=0.9, label=name)
            for k, length in enumerate(each):
                text = number(length)
                if length * room > 7 * len(text) + 8:
                    at = (starts[k] + length / 2, k)
                    panel.annotate(text, at, ha="center", va="center", color=PAPER)
            starts += each
        panel.set_yticks(range(len(groups)), list(groups))
        panel.set_ylim(len(groups) - 0.5, -0.5)
        panel.set_xlim(0, starts.max())
        panel.grid(visible=False)
        panel.set_xlabel(f"mean of the requests there ({scale.unit})", loc="right")
        head(panel, "")
        margins(figure, top=26, bottom=FOOT, left=56, right=10)
        return drawn(figure, drawing, panel, "")

    rows = [[name, *(number(each / scale.divisor) for each in means[name])] for name in means]
    return Plot(
        "time-split",
        "Where a request's time goes",
        finding,
        "Each bar is the mean of the requests whose E2E lies round that percentile, from the client's own "
        f"records. A stall is a gap between tokens longer than 200 ms and than 5 median gaps.{also}",
        (attempt("time-split", NARROW, draw),),
        table("Where a request's time goes", ["Part", *(f"{g} ({scale.unit})" for g in groups)], rows),
    )


def ranges(
    known: Mapping[str, Mapping[str, Estimate]],
    values: Mapping[str, Floats],
    bounds: Bounds,
    finding: str,
) -> Plot:
    """Each metric's percentiles on a line of its own from 0, with 95% intervals; dots where there are none.

    `values` are those of single requests, seconds: they are drawn where no percentile is known.
    """

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = canvas(width, 54 * len(known) + 8)
        for k, (name, own) in enumerate(known.items()):
            served = values[name][np.isfinite(values[name])]
            scale = scale_of(own.values()) if own else scale_for("s", served.tolist())
            ends = [figure.point / scale.divisor for figure in own.values()] or (
                served / scale.divisor
            ).tolist()
            slos = {words: at / scale.divisor for words, at in bounds.get(name, {}).items()}
            top = (
                max((at for at in [*ends, *slos.values()] if at <= FAR * max(ends)), default=1.0) * 1.04
                or 1.0
            )
            if own:
                _draw_range(panel, k, own, scale, top)
            else:
                rows = np.full(len(served), k)
                panel.plot(served / scale.divisor / top, rows, "o", color=SERIES[0], alpha=0.5)
            for at in slos.values():
                if at <= top:
                    panel.plot([at / top] * 2, [k - 0.11, k + 0.11], color=GOOD, linewidth=2.4)
            write(panel, name, (0, k), (0, 11), INK)
            if slos:
                text = f"SLO {', '.join(slos)}{'' if min(slos.values()) <= top else ', to the right'}"
                write(panel, text, (1, k), (0, 11), GOOD, ha="right")
            told = [f"{'●' if p == 'p50' else '○'} {p} {point(figure, scale)}" for p, figure in own.items()]
            if not own and len(served):
                low, high = (number(each / scale.divisor) for each in (served.min(), served.max()))
                told = [f"{low} to {high}" if low != high else low]
            write(panel, f"{'   '.join(told)} {scale.unit}", (0, k), (0, -20))
        panel.set_xlim(0, 1)
        panel.set_ylim(len(known) - 0.45, -0.4)
        panel.set_axis_off()
        margins(figure, top=4, bottom=0, left=8, right=8)
        return drawn(figure, drawing, panel, "")

    title = "Percentiles" if any(known.values()) else "Each request"
    return Plot(
        "ranges",
        title,
        finding,
        "Each line begins at 0 and has its own scale. The dot is the median, rings are higher percentiles, "
        "pale bars 95% confidence intervals, with an arrow where one has no upper end.",
        (attempt("ranges", NARROW, draw),),
        LATENCIES,
    )


def _draw_range(panel: Axes, k: int, own: Mapping[str, Estimate], scale: Scale, top: float) -> None:
    reaches = [reach_of(figure, scale.divisor * top) for figure in own.values()]
    panel.plot([0, 1], [k, k], color=MUTED, linewidth=0.8, alpha=0.5)
    panel.plot([reaches[0].at, reaches[-1].at], [k, k], color=SERIES[0], linewidth=2)
    for p, reach in zip(own, reaches, strict=True):
        low, high = max(reach.low, 0.0), min(reach.high, 1.0)
        panel.plot([low, high], [k, k], color=SERIES[0], linewidth=11, alpha=0.22, solid_capstyle="butt")
        if math.isinf(reach.high):
            panel.plot([high], [k], ">", color=SERIES[0], markersize=6, clip_on=False)
        fill = SERIES[0] if p == "p50" else PAPER
        panel.plot([reach.at], [k], "o", color=SERIES[0], markerfacecolor=fill, markersize=7.5)
