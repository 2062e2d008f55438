"""The figures: each function takes data and returns a Plot, with its finding in words and its numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray
from scipy import stats as sps

from reports.drawing import BAD, DASHES, GRID, INK, MUTED, SERIES, Plot, canvas, drawn, hover, legend
from reports.numbers import Scale, count, number, scale_for
from reports.series import Requests
from reports.tables import Cell, Row, Table, table

Floats = NDArray[np.float64]
BAND_LEVEL = 0.95
MARKED = (0.5, 0.9, 0.99)
TABLED = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
MOST_STEPS = 1500
ECDF_EXPLAINED = (
    "Read across from a share to the curve, then down: that share of all planned requests was at least that fast, "
    "and the vertical axis is stretched towards 100 % so that the tail can be seen. The curve ends below the top "
    "where requests failed; nothing here says when in the run a request came, and the band holds for each height "
    "by itself."
)


def ecdf(name: str, label: str, values_s: Floats, id: str) -> Plot | None:
    """The share of requests at or below each latency on a log-tail axis; None where nothing succeeded.

    +inf is a failed request, NaN is left out. The band is pointwise: at a rank k of n the exact binomial
    interval of the share (Clopper & Pearson, 1934), which is that of the order statistics.
    """
    values = np.sort(values_s[~np.isnan(values_s)])
    n, n_ok = len(values), int(np.isfinite(values).sum())
    if not n_ok:
        return None
    scale = scale_for("s", [float(values[n_ok - 1])])
    ranks = _tail_ranks(n, n_ok)
    x = values[ranks - 1] / scale.divisor
    low, high = share_band(ranks, n)
    figure, (panel,) = canvas(344, 300)
    top = _tail(1 - 0.4 / max(n, 20))
    heights = np.minimum(_tail((ranks - 0.5) / n), top)
    panel.fill_between(
        x, _tail(low), np.minimum(_tail(high), top), step="post", color=SERIES[0], alpha=0.16, linewidth=0
    )
    panel.plot(np.r_[x[0], x], np.r_[0, heights], drawstyle="steps-post", color=SERIES[0], solid_capstyle="round")
    _mark_quantiles(panel, values[:n_ok], n, scale)
    if n_ok < n:
        panel.axhline(_tail((n_ok + 0.0) / n), color=BAD, linewidth=1.4, linestyle=DASHES[1])
        panel.annotate(
            f"{n - n_ok:,} failed", (1, _tail(n_ok / n)), (0, 4), ("axes fraction", "data"),
            textcoords="offset points", ha="right", color=BAD,
        )  # fmt: skip
    _tail_axis(panel, top)
    _fit_x(panel, x)
    panel.set_xlabel(f"{label} ({scale.unit})", loc="right")
    figure.subplots_adjust(0.135, 0.145, 0.965, 0.97)
    return Plot(
        id, name, _ecdf_finding(label, values, n_ok, scale), "", drawn(figure, id),
        _ecdf_table(name, label, values, n_ok, scale), hover(panel),
    )  # fmt: skip


def share_band(ranks: NDArray[np.int64], n: int, level: float = BAND_LEVEL) -> tuple[Floats, Floats]:
    """The exact binomial interval of the true share below the k-th of n values, k >= 1."""
    tail = (1 - level) / 2
    low = sps.beta.ppf(tail, ranks, n - ranks + 1)
    high = np.where(ranks < n, sps.beta.ppf(1 - tail, ranks + 1, np.maximum(n - ranks, 1)), 1.0)
    return low, high


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a timeline's panel: a value per bin, NaN where there is none."""

    label: str
    values: Floats


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a timeline; `unit` is the stored unit of its lines."""

    title: str
    unit: str
    lines: tuple[Line, ...]


def timeline(edges: Floats, panels: Sequence[Panel], marks: Sequence[tuple[float, str]], finding: str) -> Plot:
    """Panels over one shared time axis in bins of equal width; `marks` are instants (s) worth a line."""
    figure, axes = canvas(960, 128 * len(panels) + 64, len(panels))
    scales = [scale_for(p.unit, [_greatest(line.values) for line in p.lines]) for p in panels]
    for panel, axis, scale in zip(panels, axes, scales, strict=True):
        for k, line in enumerate(panel.lines):
            axis.stairs(
                line.values / scale.divisor, edges, baseline=None, label=line.label, color=SERIES[k], linestyle=DASHES[k],
                linewidth=1.8,
            )  # fmt: skip
            if len(panel.lines) == 1:
                axis.stairs(line.values / scale.divisor, edges, fill=True, color=SERIES[k], alpha=0.12, linewidth=0)
        axis.set_ylim(0, max(_greatest(line.values) for line in panel.lines) / scale.divisor * 1.08 or 1)
        axis.set_title(f"{panel.title} ({scale.unit})", color=INK, loc="left")
        if len(panel.lines) > 1:
            legend(axis)
        for at_s, _ in marks:
            axis.axvline(at_s, color=MUTED, linewidth=1, linestyle=DASHES[2])
    for at_s, text in marks:
        axes[0].annotate(
            text, (at_s, 1), (5, -4), ("data", "axes fraction"), textcoords="offset points", va="top", color=MUTED
        )
    axes[-1].set_xlim(edges[0], edges[-1])
    axes[-1].set_xlabel("time since the run's start (s)", loc="right")
    height = 128 * len(panels) + 64
    figure.subplots_adjust(0.062, 46 / height, 0.985, 1 - 34 / height, hspace=0.42)
    width_s = edges[1] - edges[0]
    rows = [
        [number(edges[k]) if k else "0"]
        + [_level(line.values[k], scale) for p, scale in zip(panels, scales, strict=True) for line in p.lines]
        for k in range(len(edges) - 1)
    ]
    titles = ["From (s)"] + [
        f"{p.title}: {line.label} ({scale.unit})" if len(p.lines) > 1 else f"{p.title} ({scale.unit})"
        for p, scale in zip(panels, scales, strict=True)
        for line in p.lines
    ]
    return Plot(
        "timeline",
        "Everything on one time axis",
        finding,
        f"Look for what changes together: all panels share the axis, and every bin is {width_s:g} s wide. "
        "Rates are the bin's mean and levels its maximum, so a peak shorter than a bin shows in a level but is "
        "flattened in a rate.",
        drawn(figure, "timeline"),
        table(f"The timeline in bins of {width_s:g} s", titles, rows, text=()),
        hover(axes[-1]),
    )


def drain(rows: Requests, slope_s: float | None, finding: str) -> Plot | None:
    """TTFT against the place in the queue (order of sending), with the line of the slope; None without a TTFT."""
    position = np.arange(1, len(rows.index) + 1)
    kept = np.isfinite(rows.ttft)
    if not kept.any():
        return None
    scale = scale_for("s", [float(rows.ttft[kept].max())])
    figure, (panel,) = canvas(960, 330)
    y = rows.ttft / scale.divisor
    # Zero-length strokes with round caps: a thousand points as one path.
    panel.plot(*_segments(position[kept], position[kept], y[kept]), color=SERIES[0], linewidth=4.2, alpha=0.55,
               solid_capstyle="round", label="one request")  # fmt: skip
    if slope_s is not None:
        middle_x, middle_y = float(np.median(position[kept])), float(np.median(y[kept]))
        ends = np.array([1, len(position)])
        line = middle_y + slope_s / scale.divisor * (ends - middle_x)
        panel.plot(ends, line, color=SERIES[1], linestyle=DASHES[1], label=f"slope {_per_request(slope_s)}")
    for place in position[~rows.succeeded]:
        panel.axvline(place, color=BAD, linewidth=1, alpha=0.35)
    panel.set_ylim(0, float(y[kept].max()) * 1.06)
    panel.set_xlim(0, len(position) + 1)
    panel.set_title(f"TTFT ({scale.unit})", color=INK, loc="left")
    panel.set_xlabel("place in the queue (order of sending)", loc="right")
    legend(panel)
    figure.subplots_adjust(0.062, 0.15, 0.985, 0.9)
    picked = np.unique(np.linspace(0, len(position) - 1, min(len(position), 41)).round().astype(int))
    return Plot(
        "drain",
        "How the burst drains",
        finding,
        "A straight line means a server that takes requests one after another at a steady rate: its slope is the "
        "time each request ahead in the queue costs, the inverse of the prefill rate; steps are waves that wait "
        "for room in the KV cache or the batch. The horizontal axis is the order in which requests left the "
        "client, not time.",
        drawn(figure, "drain"),
        table(
            f"TTFT at {len(picked)} places in the queue",
            ["Place", "Request", f"TTFT ({scale.unit})"],
            [
                [count(position[k]), Cell(f"#{rows.index[k]}", href=f"#r{rows.index[k]}"), _finite(y[k])]
                for k in picked
            ],
            text=(),
        ),
        hover(panel),
    )


def request_rows(rows: Requests, order: NDArray[np.int64], name: str, title: str, finding: str, numbers: str) -> Plot | None:
    """One thin row per request in `order`: waiting from due to the first token, then decoding, failures marked.

    `numbers` is the id of the table that lists the requests.
    """
    begun = np.where(np.isfinite(rows.due), rows.due, 0)[order]
    first, last, closed = rows.first[order], rows.last[order], rows.closed[order]
    ended = np.where(np.isfinite(last), last, closed)
    if not np.isfinite(ended).any():
        return None
    place = np.arange(len(order))
    height = float(np.clip(3 * len(order), 90, 460))
    figure, (panel,) = canvas(960, height + 70)
    thickness = min(max(height / len(order) * 0.9, 0.45), 14)
    style = {"linewidth": thickness, "solid_capstyle": "butt"}
    waited = np.where(np.isfinite(first), first, ended)
    for start, end, where, color, label in (
        (begun, waited, np.isfinite(waited), SERIES[1], "due to first token (queue + prefill)"),
        (first, last, np.isfinite(first) & (last > first), SERIES[0], "decode"),
    ):
        panel.plot(*_segments(start[where], end[where], place[where]), color=color, label=label, **style)
    lost = ~rows.succeeded[order] & np.isfinite(ended)
    if lost.any():
        panel.plot(ended[lost], place[lost], "x", color=BAD, markersize=5, label="failed", linestyle="none")
    panel.set_ylim(len(order) - 0.5, -0.5)
    panel.set_xlim(min(float(np.nanmin(begun)), 0), float(np.nanmax(ended)) * 1.005)
    panel.grid(visible=False)
    panel.grid(visible=True, axis="x", color=GRID)
    panel.set_xlabel("time since the run's start (s)", loc="right")
    legend(panel)
    for handle in panel.get_legend().get_lines():
        handle.set_linewidth(6)
    total = height + 70
    figure.subplots_adjust(0.062, 46 / total, 0.985, 1 - 26 / total)
    return Plot(
        name,
        title,
        finding,
        "Each row is one request; the colour changes when its first token arrives, so a long first part is time "
        "in the queue and in prefill. The vertical axis is only an order, and rows are thinner than a pixel where "
        "there are many.",
        drawn(figure, name),
        numbers,
        hover(panel, "y"),
    )


def _segments(start: Floats, end: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Horizontal strokes as one broken line, which is one path in the SVG."""
    gap = np.full(len(y), np.nan)
    return np.column_stack([start, end, gap]).ravel(), np.column_stack([y, y, gap]).ravel()


def _tail(share: Floats | float) -> Floats:
    """Height on the log-tail axis: one unit for each nine."""
    return -np.log10(1 - np.minimum(share, 1 - 1e-12))


def _tail_ranks(n: int, n_ok: int) -> NDArray[np.int64]:
    """Every rank, or beyond MOST_STEPS those evenly spaced on the log-tail axis and on the plain one."""
    if n_ok <= MOST_STEPS:
        return np.arange(1, n_ok + 1)
    even = np.linspace(1, n_ok, MOST_STEPS // 2)
    tail = n * (1 - 10.0 ** -np.linspace(0, math.log10(n), MOST_STEPS // 2))
    ranks: NDArray[np.int64] = np.unique(np.r_[even, tail, n_ok].clip(1, n_ok).astype(np.int64))
    return ranks


def _tail_axis(panel: Axes, top: float) -> None:
    shares = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999]
    ticks = [s for s in shares if _tail(s) <= top]
    panel.set_ylim(0, top)
    panel.yaxis.set_major_locator(FixedLocator([float(_tail(s)) for s in ticks]))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda _, k: f"{ticks[k or 0] * 100:g} %"))


def _fit_x(panel: Axes, x: Floats) -> None:
    """From zero unless the values lie far from it."""
    first, last = float(x[0]), float(x[-1])
    if first < 0.5 * last:
        panel.set_xlim(0, last * 1.05 or 1)
    else:
        margin = (last - first) * 0.05 or last * 0.05
        panel.set_xlim(first - margin, last + margin)


def _mark_quantiles(panel: Axes, succeeded: Floats, n: int, scale: Scale) -> None:
    right = succeeded[-1] / scale.divisor
    for p in MARKED:
        rank = math.ceil(p * n)
        if rank > len(succeeded) or n * (1 - p) < 1:
            continue
        value = succeeded[rank - 1] / scale.divisor
        panel.plot([value], [_tail(p)], "o", color=SERIES[0], markersize=5.5)
        on_left = value > 0.5 * (right + panel.get_xlim()[0])
        panel.annotate(
            f"p{p * 100:g}  {number(value)}", (value, float(_tail(p))), (-8, 5) if on_left else (8, -10),
            textcoords="offset points", ha="right" if on_left else "left", color=INK,
        )  # fmt: skip


def _ecdf_finding(label: str, values: Floats, n_ok: int, scale: Scale) -> str:
    n = len(values)
    half = number(values[math.ceil(n / 2) - 1] / scale.divisor)
    ends = f"{number(values[0] / scale.divisor)} to {number(values[n_ok - 1] / scale.divisor)} {scale.unit}"
    lost = f"; {n - n_ok:,} of {n:,} failed and count as infinitely late" if n_ok < n else ""
    middle = f"half within {half} {scale.unit}, " if half != "∞" else ""
    return f"{label} of {n_ok:,} requests: {middle}{ends} in all{lost}."


def _ecdf_table(name: str, label: str, values: Floats, n_ok: int, scale: Scale) -> Table:
    n = len(values)
    ranks = np.unique([min(max(math.ceil(p * n), 1), n_ok) for p in TABLED] + [n_ok])
    low, high = share_band(ranks, n)
    rows = [
        [number(values[k - 1] / scale.divisor), f"{k / n:.1%}", f"{a:.1%}", f"{b:.1%}"]
        for k, a, b in zip(ranks, low, high, strict=True)
    ]
    columns = [f"{label} ({scale.unit})", "Requests at or below", "95 % low", "95 % high"]
    return table(f"{name}: share of {n:,} requests at or below", columns, rows, text=())


def _greatest(values: Floats) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else 0.0


def _level(value: float, scale: Scale) -> str:
    return number(value / scale.divisor) if math.isfinite(value) else "–"


def _finite(value: float) -> str:
    return number(value) if math.isfinite(value) else "failed"


def _per_request(slope_s: float) -> str:
    scale = scale_for("s", [slope_s])
    return f"{number(slope_s / scale.divisor)} {scale.unit} per request"
