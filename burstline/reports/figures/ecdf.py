"""The share of requests at or below each latency of 1 to n contenders, failures as the gap below 1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes

from burstline.measure.record.columns import Floats
from burstline.measure.stats.estimates import early_stopping_floor
from burstline.measure.stats.figure import Estimate
from burstline.measure.stats.quantiles import quantile
from burstline.reports.blocks import Drawing, Plot, Table, table
from burstline.reports.figures import drawing as look
from burstline.reports.figures.run_figures import evenly
from burstline.reports.number_format import Scale, number, point, scale_for

MARKED = (0.5, 0.9, 0.99)
TABLED = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
MOST_STEPS = 500
LEGEND_LINE = 18
NO_BOUNDS: Mapping[str, float] = {}


@dataclass(frozen=True, eq=False)
class Curve:
    """One contender's requests: +inf is a failed one, NaN is left out. `known` are its percentiles, s."""

    label: str
    values_s: Floats
    known: Mapping[float, Estimate]

    @cached_property
    def values(self) -> Floats:
        """In ascending order."""
        return np.sort(self.values_s[~np.isnan(self.values_s)])

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def n_ok(self) -> int:
        return int(np.isfinite(self.values).sum())

    def at(self, p: float, scale: Scale) -> str:
        """The percentile as all tables have it; a dash where they leave it out, ∞ among failures."""
        if p in self.known:
            return point(self.known[p], scale)
        value = quantile(self.values, p) if self.n else np.nan
        is_enough = self.n >= early_stopping_floor(max(p, 1 - p)) or np.isinf(value)
        return number(value / scale.divisor) if is_enough else "–"


def ecdf(
    name: str, title: str, label: str, curves: Sequence[Curve], bounds: Mapping[str, float] = NO_BOUNDS
) -> Plot | None:
    """The share of requests at or below each latency; None without two successes anywhere.

    A single curve has its percentiles written beside it, several are named. One contender has one colour and
    dash through the whole page. `bounds` are those of SLOs in seconds, by their words.
    """
    shown = [(k, curve) for k, curve in enumerate(curves) if curve.n_ok >= 2]
    if not shown:
        return None
    scale = scale_for("s", [float(curve.values[curve.n_ok - 1]) for _, curve in shown])
    several = len(curves) > 1
    legend = LEGEND_LINE * len(shown) * several

    def draw(name: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 290 + legend)
        ends = []
        for k, curve in shown:
            # Evenly spaced where there are many; the last ones all: the tail is steep in x.
            ranks = np.r_[evenly(curve.n_ok, MOST_STEPS), np.arange(max(curve.n_ok - 100, 0), curve.n_ok)]
            ranks = np.unique(ranks) + 1
            x = curve.values[ranks - 1] / scale.divisor
            heights = 100 * (ranks - 0.5) / curve.n
            panel.plot(
                np.r_[x[0], x], np.r_[0, heights], drawstyle="steps-post", label=curve.label,
                color=look.SERIES[k % 4], linestyle=look.DASHES[(k + k // 4) % 4],
            )  # fmt: skip
            ends += [float(x[0]), float(x[-1])]
        fit_x(panel, np.sort(ends))
        if several:
            look.names_above(panel)
        else:
            _mark_quantiles(panel, scale, {p: curves[0].known[p] for p in MARKED if p in curves[0].known})
            _mark_failures(panel, curves[0].n_ok, curves[0].n)
        for k, (words, bound_s) in enumerate(bounds.items()):
            at, (first, last) = bound_s / scale.divisor, panel.get_xlim()
            if first < at < last:
                panel.axvline(at, color=look.GOOD, linestyle=look.DASHES[2], linewidth=1.6)
                left = at < 0.5 * (first + last)
                look.write(panel, f"SLO {words}", (at, 0), (4 if left else -4, 4 + 14 * k), look.GOOD,
                      ha="left" if left else "right")  # fmt: skip
        panel.set_ylim(0, 102)
        panel.set_yticks([0, 25, 50, 75, 100], ["0", "25%", "50%", "75%", "100%"])
        panel.set_xlabel(f"{label} ({scale.unit})", loc="right")
        look.margins(figure, top=10 + legend, bottom=44, left=48, right=12)
        return look.drawn(figure, name, panel)

    medians = [(each.label, each.at(0.5, scale)) for _, each in shown]
    told = "; ".join(f"{p50} {scale.unit} for {name}" for name, p50 in medians if p50 != "–")
    finding = f"{label} p50: {told}." * bool(told) if several else _finding(label, curves[0], scale)
    rows = _table(title, label, curves, scale)
    return Plot(name, title, finding, "", (look.attempt(name, 310, draw),), rows)


def fit_x(panel: Axes, x: Floats) -> None:
    """From zero unless the values lie far from it."""
    first, last = float(x[0]), float(x[-1])
    if first < 0.5 * last or not last:
        panel.set_xlim(0, last * 1.05 or 1)
    else:
        margin = (last - first) * 0.05 or last * 0.05
        panel.set_xlim(first - margin, last + margin)


def _mark_quantiles(panel: Axes, scale: Scale, marked: Mapping[float, Estimate]) -> None:
    for p, figure in marked.items():
        value = figure.point / scale.divisor
        panel.plot([value], [100 * p], "o", color=look.SERIES[0], markersize=5.5)
        on_left = value > 0.5 * sum(panel.get_xlim())
        off, side = ((-8, 5), "right") if on_left else ((8, -10), "left")
        look.write(panel, f"p{p * 100:g}  {point(figure, scale)}", (value, 100 * p), off, look.INK, ha=side)


def _mark_failures(panel: Axes, n_ok: int, n: int) -> None:
    if n_ok == n:
        return
    height = 100 * n_ok / n
    panel.axhline(height, color=look.BAD, linewidth=1.4, linestyle=look.DASHES[1])
    look.write(panel, f"{n - n_ok:,} not served", (0, height), (4, 5), look.BAD, of=("axes fraction", "data"))


def _finding(label: str, curve: Curve, scale: Scale) -> str:
    n, n_ok = curve.n, curve.n_ok
    first, last = (f"{number(curve.values[k] / scale.divisor)} {scale.unit}" for k in (0, n_ok - 1))
    failed = f"; {n - n_ok:,} of {n:,} failed, so their latency counts as infinite" if n_ok < n else ""
    middle = f"half within {curve.at(0.5, scale)} {scale.unit}, " if 0.5 in curve.known else ""
    return f"{label}: fastest {first}, {middle}slowest {last}{failed}."


def _table(title: str, label: str, curves: Sequence[Curve], scale: Scale) -> Table:
    rows = [[f"{p * 100:g}%", *(curve.at(p, scale) for curve in curves)] for p in TABLED]
    if len(curves) > 1:
        columns = ["Share of requests", *(f"{curve.label} ({scale.unit})" for curve in curves)]
        return table(f"{title}: percentiles of {label} over the measured requests", columns, rows)
    (curve,) = curves
    rows.append([f"{curve.n_ok / curve.n:.1%}", number(curve.values[curve.n_ok - 1] / scale.divisor)])
    columns = ["Share of requests", f"{label} ({scale.unit})"]
    return table(f"{title}: percentiles of {label} over {curve.n:,} requests", columns, rows)
