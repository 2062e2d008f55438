"""The share of requests at or below each latency, failures as the gap below 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from loadgen.record.columns import Floats, Ints
from loadgen.stats.quantiles import quantile
from reports.figures.drawing import BAD, DASHES, INK, SERIES, TEXT, Plot, canvas, drawn, margins
from reports.number_format import Scale, number, scale_for
from reports.tables import Table, table

MARKED = (0.5, 0.9, 0.99)
TABLED = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
MOST_STEPS = 1500
EXPLAINED = (
    "Read across from a share to the curve, then down: that share of all planned requests was at least "
    "that fast, and the vertical axis is stretched towards 100% so that the tail can be seen. The curve "
    "ends below the top where requests failed; nothing here says when in the run a request came, and no "
    "curve says how much another run would differ."
)


def ecdf(name: str, title: str, label: str, values_s: Floats, marked: Mapping[float, float]) -> Plot | None:
    """The share of requests at or below each latency on a log-tail axis; None with fewer than two successes.

    +inf is a failed request, NaN is left out; the percentiles in `marked`, in seconds, get a label.
    """
    values = np.sort(values_s[~np.isnan(values_s)])
    n, n_ok = len(values), int(np.isfinite(values).sum())
    if n_ok < 2:
        return None
    scale = scale_for("s", values.tolist())
    figure, (panel,) = canvas(310, 290)
    ranks = tail_ranks(n, n_ok)
    x = values[ranks - 1] / scale.divisor
    top = float(nines(1 - 0.4 / max(n, 20)))
    if n_ok < n:  # no room for a tail that has no curve
        top = min(top, 1.25 * float(nines(n_ok / n)))
    heights = np.minimum(nines((ranks - 0.5) / n), top)
    panel.plot(np.r_[x[0], x], np.r_[0, heights], drawstyle="steps-post", color=SERIES[0])
    fit_x(panel, x)
    _mark_quantiles(panel, scale, marked)
    _mark_failures(panel, n_ok, n)
    tail_axis(panel, top)
    panel.set_xlabel(f"{label} ({scale.unit})", loc="right")
    margins(figure, top=10, bottom=44, left=48, right=12)
    finding = _finding(label, values, n_ok, scale, marked.get(0.5))
    drawings = (drawn(figure, name, panel),)
    return Plot(name, title, finding, "", drawings, _table(title, label, values, n_ok, scale))


def nines(share: Floats | float) -> Floats:
    """Height on the log-tail axis: one unit for each nine."""
    return np.asarray(-np.log10(1 - np.minimum(share, 1 - 1e-12)))


def tail_ranks(n: int, n_ok: int) -> Ints:
    """Every rank, or beyond MOST_STEPS those evenly spaced on the log-tail axis and on the plain one."""
    if n_ok <= MOST_STEPS:
        return np.arange(1, n_ok + 1)
    even = np.linspace(1, n_ok, MOST_STEPS // 2)
    tail = n * (1 - 10.0 ** -np.linspace(0, math.log10(n), MOST_STEPS // 2))
    ranks: Ints = np.unique(np.r_[even, tail, n_ok].clip(1, n_ok).astype(np.int64))
    return ranks


def tail_axis(panel: Axes, top: float) -> None:
    shares = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999]
    if top < 1:  # most requests failed, or nearly: the curve has no tail
        shares = list(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, 1 - 10**-top))
    ticks = [s for s in shares if 0 <= nines(s) <= top]
    panel.set_ylim(0, top)
    panel.yaxis.set_major_locator(FixedLocator([float(nines(s)) for s in ticks]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda _, k: f"{ticks[k or 0] * 100:g}%"))


def fit_x(panel: Axes, x: Floats) -> None:
    """From zero unless the values lie far from it."""
    first, last = float(x[0]), float(x[-1])
    if first < 0.5 * last:
        panel.set_xlim(0, last * 1.05 or 1)
    else:
        margin = (last - first) * 0.05 or last * 0.05
        panel.set_xlim(first - margin, last + margin)


def _mark_quantiles(panel: Axes, scale: Scale, marked: Mapping[float, float]) -> None:
    for p, value_s in marked.items():
        value = value_s / scale.divisor
        panel.plot([value], [nines(p)], "o", color=SERIES[0], markersize=5.5)
        on_left = value > 0.5 * sum(panel.get_xlim())
        panel.annotate(
            f"p{p * 100:g}  {number(value)}", (value, float(nines(p))), (-8, 5) if on_left else (8, -10),
            textcoords="offset points", ha="right" if on_left else "left", color=INK, fontsize=TEXT,
        )  # fmt: skip


def _mark_failures(panel: Axes, n_ok: int, n: int) -> None:
    if n_ok == n:
        return
    height = float(nines(n_ok / n))
    panel.axhline(height, color=BAD, linewidth=1.4, linestyle=DASHES[1])
    panel.annotate(
        f"{n - n_ok:,} not served", (0, height), (4, 5), ("axes fraction", "data"), "offset points",
        color=BAD, fontsize=TEXT,
    )  # fmt: skip


def _finding(label: str, values: Floats, n_ok: int, scale: Scale, median_s: float | None) -> str:
    n = len(values)
    first, last = (f"{number(values[k] / scale.divisor)} {scale.unit}" for k in (0, n_ok - 1))
    lost = f"; {n - n_ok:,} of {n:,} were not served and count as infinitely late" if n_ok < n else ""
    middle = "" if median_s is None else f"half within {number(median_s / scale.divisor)} {scale.unit}, "
    return f"{label}: fastest {first}, {middle}slowest {last}{lost}."


def _table(name: str, label: str, values: Floats, n_ok: int, scale: Scale) -> Table:
    n = len(values)
    rows = [[f"{p * 100:g}%", value_at(values, p, scale)] for p in TABLED]
    rows.append([f"{n_ok / n:.1%}", number(values[n_ok - 1] / scale.divisor)])
    made = table(
        f"{name}: {label} of {n:,} requests", ["Requests at or below", f"{label} ({scale.unit})"], rows
    )
    return replace(made, id=f"ecdf-{label.lower()}-numbers")


def value_at(ordered: Floats, p: float, scale: Scale) -> str:
    """The quantile p as all tables have it; a dash where the sample is too small, ∞ among failures."""
    if not len(ordered) or len(ordered) * min(p, 1 - p) < 1:
        return "–"
    return number(quantile(ordered, p) / scale.divisor)
