"""The figures on the hardware: the roofline of a phase, and the gap between ceiling and measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from burstline.reports.blocks import Drawing, Plot, Table, table
from burstline.reports.figures import drawing as look
from burstline.reports.figures.first_screen import stack
from burstline.reports.number_format import Scale, duration, number, scale_for
from burstline.reports.sentences import say
from burstline.roofline.reconcile.reconciliation import (
    WAITING,
    Bar,
    DeviceFacts,
    PhaseRow,
    Reconciliation,
    largest_gap,
)

HEAD, FOOT = 46, 46
LETTER = 6.4
"""About how many CSS pixels a letter of a label takes."""


@dataclass(frozen=True, slots=True)
class _Dot:
    """An op of the typical step: FLOP per byte, and FLOP/s as predicted and, where it is known, measured."""

    name: str
    intensity: float
    predicted: float
    measured: float | None

    @property
    def lowest(self) -> float:
        return min(self.predicted, self.measured or self.predicted)


LEAST_SHARE = 0.002
"""Parts of the waterfall below this share of the run are not drawn."""


def roofline(phase: PhaseRow, device: DeviceFacts, of: str = "", wide: float = look.HALF) -> Plot | None:
    """One phase's products and attention under the device's ceilings; None where it has none.

    `of` begins its name and that of the table with its numbers, where a page has two of a phase.
    """
    ops = [op for op in phase.ops if op.flops and op.predicted_flops_per_s]
    dots = [
        _Dot(op.label, op.intensity, op.predicted_flops_per_s, op.achieved_flops_per_s)
        for op in sorted(ops, key=lambda op: op.intensity)
    ]
    if not dots:
        return None
    name, numbers = f"{of}roofline-{phase.phase}", f"{of}bounds-{phase.phase}"
    finding = _roofline_finding(phase, dots, device)
    return _under_roofs(name, f"Roofline of {phase.phase}", finding, dots, device, numbers, 400, wide)


def overview(found: Reconciliation) -> Plot:
    """Each phase as one dot under the device's ceilings: the whole run at a glance."""
    device, dots = found.device, []
    scale, memory = _rate_scale(device.peak_flops_per_s), _memory_bytes_per_s(device)
    for row in found.phases:
        intensity = row.mfu.ceiling * device.peak_flops_per_s / (row.mbu.ceiling * memory)
        predicted, measured = (
            None if share is None else share * device.peak_flops_per_s
            for share in (row.mfu.reachable, row.mfu.measured)
        )
        reached = f"{number((measured or predicted or 0.0) / scale.divisor)} {scale.unit}"
        dots.append(_Dot(f"{row.phase} {reached}", intensity, predicted or 0.0, measured))
    dots.sort(key=lambda dot: dot.intensity)
    at = "; ".join(f"{dot.name} at {number(dot.intensity)} FLOP per byte" for dot in dots)
    finding = f"{at[:1].upper()}{at[1:]}. {device.name}, {device.known_by} ceilings."
    numbers = f"bounds-{found.phases[-1].phase}"
    return _under_roofs("limit", "Against the machine's limit", finding, dots, device, numbers, 264)


def _under_roofs(
    name: str,
    title: str,
    finding: str,
    dots: Sequence[_Dot],
    device: DeviceFacts,
    numbers: str,
    height: float,
    wide: float = look.NARROW,
) -> Plot:
    """Drawn `wide` and narrow; one drawing serves every screen where these are the same."""
    scale = _rate_scale(device.peak_flops_per_s)

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, height)
        x0, x1 = _ends(dots, device, width - 74)
        rows = _label_rows(dots, (x0, x1), width - 74)
        low = min(dot.lowest for dot in dots) / scale.divisor
        top = device.peak_flops_per_s / scale.divisor
        floor = 10 ** (math.log10(low) - 48 / height * (max(rows) + 2) * max(1.0, math.log10(top / low)))
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlim(x0, x1)
        names_px = 8 + 13 * sum(level.bytes_per_s is not None for level in device.levels)
        panel.set_ylim(floor, top * (top / floor) ** (names_px / (height - HEAD - FOOT - names_px)))
        _draw_ceilings(panel, device, scale, (x0, x1))
        _draw_dots(panel, dots, rows, scale, floor)
        _log_axes(panel, low)
        panel.set_xlabel("intensity (FLOP per byte of memory traffic)", loc="right")
        look.head(panel, f"{scale.unit}, log axes")
        look.margins(figure, top=HEAD, bottom=FOOT, right=28)
        return look.drawn(figure, drawing, panel, "")

    is_narrow = wide == look.NARROW
    drawings = (look.attempt(name, wide, draw),) if is_narrow else look.in_both_widths(name, draw, wide=wide)
    return Plot(name, title, finding, "", drawings, numbers)


def _rate_scale(peak_flops_per_s: float) -> Scale:
    return Scale(1e12, "TFLOP/s") if peak_flops_per_s >= 1e12 else Scale(1e9, "GFLOP/s")


def _memory_bytes_per_s(device: DeviceFacts) -> float:
    rate = device.levels[-1].bytes_per_s
    assert rate is not None  # only nearer levels may lack it
    return rate


def _ridge(device: DeviceFacts) -> float:
    return float(device.peak_flops_per_s / _memory_bytes_per_s(device))


def _ends(dots: Sequence[_Dot], device: DeviceFacts, width: float) -> tuple[float, float]:
    """The ends of the axis: some room on the left, on the right as much as the longest name takes."""
    values = [dot.intensity for dot in dots] + [_ridge(device)]
    low, high = min(values) / 4, max(values)
    name = max(len(dot.name) for dot in dots) * LETTER + 12
    decades = math.log10(high / low) * name / (width - name)
    return low, float(high * 10 ** max(decades, 0.4))


def _draw_ceilings(panel: Axes, device: DeviceFacts, scale: Scale, ends: tuple[float, float]) -> None:
    def roof(flops_per_s: float, bytes_per_s: float, **style: Any) -> None:
        ridge = min(max(flops_per_s / bytes_per_s, ends[0]), ends[1])
        x = np.array([ends[0], ridge, ends[1]])
        panel.plot(x, np.minimum(flops_per_s, x * bytes_per_s) / scale.divisor, **style)

    peak, (*nearer, memory) = device.peak_flops_per_s, device.levels
    rates = [(level.name, level.bytes_per_s) for level in nearer if level.bytes_per_s]
    for _, bytes_per_s in rates:
        roof(peak, bytes_per_s, color=look.MUTED, linewidth=1.1)
    roof(peak, _memory_bytes_per_s(device), color=look.INK)
    for k, (name, bytes_per_s) in enumerate([(memory.name, _memory_bytes_per_s(device)), *reversed(rates)]):
        at = max(peak / bytes_per_s, ends[0]), peak / scale.divisor
        text = f"{name}, {number(bytes_per_s / 1e9)} GB/s"
        panel.annotate(text, at, (4, 5 + 13 * k), textcoords="offset points", color=look.MUTED)
    if device.reached_flops_per_s and device.reached_bytes_per_s:
        reached = device.reached_flops_per_s, device.reached_bytes_per_s
        roof(*reached, color=look.SERIES[1], linestyle=look.DASHES[1], linewidth=1.4, label="calibrated")
    panel.axvline(_ridge(device), color=look.MUTED, linewidth=1, linestyle=look.DASHES[2])


def _draw_dots(panel: Axes, dots: Sequence[_Dot], rows: Sequence[int], scale: Scale, floor: float) -> None:
    x = [dot.intensity for dot in dots]
    predicted = [dot.predicted / scale.divisor for dot in dots]
    panel.plot(
        x, predicted, "o", color=look.SERIES[0], markerfacecolor="none", markersize=8, label="predicted"
    )
    seen = [(dot.intensity, dot.measured / scale.divisor) for dot in dots if dot.measured]
    if seen:
        panel.plot(*zip(*seen, strict=True), "o", color=look.SERIES[0], markersize=5.5, label="measured")
    below = math.log10(min(dot.lowest for dot in dots) / scale.divisor / floor) / (max(rows) + 2)
    for dot, row in zip(dots, rows, strict=True):
        at = floor * 10 ** (below * (row + 0.7))
        panel.plot([dot.intensity] * 2, [at, dot.lowest / scale.divisor], color=look.MUTED, linewidth=0.8)
        panel.annotate(
            dot.name, (dot.intensity, at), (3, 0), textcoords="offset points", va="center", color=look.INK
        )


def _label_rows(dots: Sequence[_Dot], ends: tuple[float, float], width: float) -> list[int]:
    """For each dot the lowest line under the figure where its name has room."""
    per_decade = width / math.log10(ends[1] / ends[0])
    taken: list[float] = []
    rows = []
    for dot in dots:
        at = math.log10(dot.intensity / ends[0]) * per_decade
        row = next((k for k, end in enumerate(taken) if end + 8 < at), len(taken))
        # A name stands to the right of its line: no line of a dot further right may end below and cross it.
        end = at + len(dot.name) * LETTER
        taken[: row + 1] = [max(end, before) for before in [*taken, end][: row + 1]]
        rows.append(row)
    return rows


def _log_axes(panel: Axes, low: float) -> None:
    panel.xaxis.set_major_locator(LogLocator(10))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    bottom, top = panel.get_ylim()
    first, last = math.ceil(math.log10(low) - 0.3), math.floor(math.log10(top))
    decades = [10.0**k for k in range(first, last + 1)]
    ticks = decades if len(decades) > 1 else [k * 10.0 ** (first - 1) for k in (1, 2, 5, 10, 20, 50, 100)]
    panel.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low / 2 < tick < top]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.set_ylim(bottom, top)


def _roofline_finding(phase: PhaseRow, dots: Sequence[_Dot], device: DeviceFacts) -> str:
    left = [dot.name for dot in dots if dot.intensity < _ridge(device)]
    where = f"{len(left)} of {len(dots)} operations lie left of" if left else "All operations lie right of"
    largest = max((op for op in phase.ops if op.flops), key=lambda op: op.share)
    reached = largest.achieved_flops_per_s or largest.predicted_flops_per_s
    how = "reaches" if largest.achieved_flops_per_s else "should reach"
    share = reached * largest.ideal_s / largest.flops
    ridge, shares = number(_ridge(device)), {"of_step": f"{largest.share:.0%}", "share": f"{share:.0%}"}
    return say("roofline", where=where, ridge=ridge, largest=largest.label, how=how, **shares)


def modules(phase: PhaseRow) -> Plot:
    """A profiled step as one bar of its modules, the same step as predicted below it."""
    name = f"modules-{phase.phase}"
    scale = scale_for("s", [phase.step_s])
    seconds = [(op.label, op.measured_s or 0.0, op.predicted_s) for op in phase.ops]
    seconds += [(label, rest_s, 0.0) for label, rest_s in phase.rest.items()]
    bars = {label: [took_s / scale.divisor, said_s / scale.divisor] for label, took_s, said_s in seconds}

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 132)
        stack(panel, bars, ["measured", "predicted"], look.SERIES, width - 88, named=True)
        panel.set_xlabel(f"time of the step ({scale.unit})", loc="right")
        look.margins(figure, top=8, bottom=FOOT, left=72)
        return look.drawn(figure, drawing, panel, "")

    longest = max(seconds, key=lambda row: row[1])
    title = f"A step of {phase.phase}, module by module"
    finding = f"Of {duration(phase.step_s)} {longest[0]} takes {longest[1] / phase.step_s:.0%}."
    numbers = f"profile-bounds-{phase.phase}"
    return Plot(name, title, finding, say("figure.modules"), look.in_both_widths(name, draw), numbers)


def waterfall(bars: Sequence[Bar], measured_s: float, *, seen: bool) -> Plot:
    """From the ceiling to what was measured, one bar for each thing between."""
    ends = np.cumsum([bar.seconds for bar in bars])
    scale = scale_for("s", [float(max(ends.max(), measured_s))])
    spans = [
        (bar.name, (end - bar.seconds) / scale.divisor, end / scale.divisor)
        for k, (bar, end) in enumerate(zip(bars, ends.tolist(), strict=True))
        if k == 0 or abs(bar.seconds) >= LEAST_SHARE * measured_s  # the table has them all
    ]
    spans.append(("measured", 0.0, measured_s / scale.divisor))

    def draw(name: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 26 * len(spans) + HEAD + FOOT)
        _draw_spans(panel, spans)
        _write_values(panel, spans, scale)
        panel.set_xlabel(f"time of the whole run ({scale.unit})", loc="right")
        look.head(panel, "Ceiling to measured", named=False)
        look.margins(figure, top=40, bottom=FOOT, left=158)
        return look.drawn(figure, name, panel, "y")

    gap, is_paced = largest_gap(bars), bars[-1].name == WAITING
    busy_s = measured_s - bars[-1].seconds * is_paced
    ideal, busy, took, most = map(duration, (bars[0].seconds, busy_s, measured_s, gap.seconds))
    busy += "" if seen else " (predicted)"
    finding = say("waterfall.paced" if is_paced else "waterfall", ideal=ideal, took=took, busy=busy)
    if gap.seconds > 0:
        finding += say("waterfall.gap", gap=gap.name, most=most, share=f"{gap.seconds / busy_s:.0%}")
    drawings, shown = look.in_both_widths("waterfall", draw), _spans_table(bars, measured_s, scale)
    return Plot("waterfall", "Where the time went", finding, say("figure.waterfall"), drawings, shown)


def _write_values(panel: Axes, spans: Sequence[tuple[str, float, float]], scale: Scale) -> None:
    """How long each bar is, to its right, or to its left where there is no room."""
    left, right = panel.get_xlim()
    for k, (_, start, end) in enumerate(spans):
        value = duration((end - start) * scale.divisor)
        is_far = max(start, end) > left + 0.84 * (right - left)
        inside = is_far and abs(end - start) > 0.3 * (right - left)
        at = max(start, end) if not is_far or inside else min(start, end)
        side, color = "right" if is_far else "left", look.PAPER if inside else look.INK
        look.write(panel, value, (at, k), (-6 if is_far else 6, 0), color, ha=side, va="center")


def _draw_spans(panel: Axes, spans: Sequence[tuple[str, float, float]]) -> None:
    """Bars by name, start and end, from the top; the first and the last stand for a whole run."""
    last = len(spans) - 1
    for k, (_, start, end) in enumerate(spans):
        whole = k in (0, last)
        color = look.SERIES[0] if whole else look.SERIES[1] if end >= start else look.BAD
        panel.barh(k, end - start, left=start, height=0.62, color=color, alpha=0.9 if whole else 0.75)
        if k + 1 < last:
            panel.plot([end, end], [k, k + 1], color=look.MUTED, linewidth=0.8)
    panel.set_yticks(range(len(spans)), [name for name, *_ in spans])
    panel.set_ylim(last + 0.6, -0.6)
    panel.set_xlim(min(0.0, *(end for *_, end in spans)), None)
    panel.grid(visible=False, axis="y")
    panel.grid(visible=True, axis="x")


def _spans_table(bars: Sequence[Bar], measured_s: float, scale: Scale) -> Table:
    whole = Bar("measured", measured_s, "from the first request to the last token")
    rows = [
        [bar.name, number(bar.seconds / scale.divisor), f"{bar.seconds / measured_s:z.1%}", bar.why]
        for bar in (*bars, whole)
    ]
    columns = ["Part", f"Time ({scale.unit})", "Of the run", "What it is"]
    return table("Where the time went", columns, rows, text=(0, 3))
