"""Numbers as people read them: one unit a row, three significant digits unless the interval allows more."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from burstline.measure.stats.figure import Absent, Estimate, Figure

SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "ns": ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "fraction": ((1e-2, "%"),),
    "1/s": ((1.0, "req/s"),),
    "1": ((1.0, ""),),
    "s/request": ((1.0, "s/request"), (1e-3, "ms/request"), (1e-6, "µs/request")),
}
"""Units shown as others: (how many of the stored unit make one of the shown, its name), large to small."""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
ARROWS = {"lower": "↓", "higher": "↑"}
"""Which way is better, as shown after a metric's name."""
COUNTED = ("requests", "sessions", "turns")  # a whole number of them is shown as one
TINY = 1e-6
"""Below it digits are counted from the first that is not 0."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How values of one stored unit are shown: `value / divisor`, in `unit`."""

    divisor: float
    unit: str


def scale_for(unit: str, values: Iterable[float | None]) -> Scale:
    """The largest shown unit in which the greatest of `values` is at least 1."""
    steps = SCALES.get(unit, ((1.0, unit),))
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    return Scale(*next((step for step in steps if largest >= step[0]), steps[-1] if largest else steps[0]))


def number(value: float, half_width: float | None = None) -> str:
    """`value` with thousands separators: three significant digits, four where its interval allows.

    `half_width` is half of the interval around it.
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    if half_width:
        decimals = max(decimals, min(-math.floor(math.log10(half_width)), decimals + 1))
    if abs(value) < TINY:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa} × 10{str(int(exponent)).translate(RAISED)}".replace("-", "−")
    rounded = round(value, decimals)
    return f"{rounded:,.{max(decimals, 0)}f}".replace("-", "−")


def ratio_text(value: float) -> str:
    """A ratio, as 1 only where it is 1: `1.0004`."""
    if not math.isfinite(value) or value == 1 or round(value, 2) != 1:
        return number(value)
    return f"{value:.{-math.floor(math.log10(abs(value - 1)))}f}"


def duration(value_s: float) -> str:
    """Seconds in words, e.g. "26.5 ms"."""
    scale = scale_for("s", [value_s])
    return f"{number(value_s / scale.divisor)} {scale.unit}"


def error(value_s: float) -> str:
    """The bound of an error in seconds, which the clock's own steps keep above 0: "26.5 µs", "1 µs"."""
    return duration(value_s) if value_s > 1e-6 else "1 µs"


def prefixed(value: float, unit: str = "") -> str:
    """`1.23 TFLOP/s`: three digits and a decimal prefix."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{number(value / power)} {prefix}{unit}"
    return f"{number(value)} {unit}".rstrip()


def changed(share: float) -> str:
    """`+12%`, `−3%`, `0%`."""
    return f"{share:+.0%}".replace("-", "−") if round(100 * share) else "0%"


def count(value: float) -> str:
    return f"{value:,.0f}"


def scale_of(figures: Iterable[Figure], *, share: bool = False) -> Scale:
    """The scale that suits all of them, which have one unit; a share is shown in percent."""
    known = [figure for figure in figures if isinstance(figure, Estimate)]
    unit = known[0].unit if known else ""
    return scale_for("fraction" if share and unit == "1" else unit, [figure.point for figure in known])


def point(figure: Figure, scale: Scale) -> str:
    """The value in the scale's unit, a dash where it is absent."""
    if isinstance(figure, Absent):
        return "–"
    is_counted = scale.unit in COUNTED or (scale.unit == "tok" and figure.point >= 1000)
    if is_counted and figure.low is None and figure.point.is_integer():
        return count(figure.point)
    return number(figure.point / scale.divisor, _half_width(figure, scale))


def interval(figure: Figure, scale: Scale) -> str:
    """The interval as "[low, high]" in the scale's unit, ∞ where no bound exists; "" where there is none."""
    if isinstance(figure, Absent) or figure.low is figure.high is None:
        return ""
    low, high = figure.low, figure.high
    half = _half_width(figure, scale)
    below = "(−∞" if low is None else f"[{number(low / scale.divisor, half)}"
    above = "∞)" if high is None else f"{number(high / scale.divisor, half)}]"
    return f"{below}, {above}"


def with_unit(figure: Estimate) -> str:
    """`1.23 s`."""
    scale = scale_of([figure])
    return f"{point(figure, scale)} {scale.unit}".rstrip()


def with_interval(figure: Figure) -> str:
    """`1.23 s [1.20, 1.31]`, a dash where there is no number."""
    if isinstance(figure, Absent):
        return "–"
    return f"{with_unit(figure)} {interval(figure, scale_of([figure]))}".rstrip()


def in_brackets(figures: Iterable[Figure]) -> str:
    """`; 95% intervals in brackets` where any of them has one."""
    known = any(isinstance(figure, Estimate) and figure.low is not None for figure in figures)
    return "; 95% intervals in brackets" if known else ""


def _half_width(figure: Estimate, scale: Scale) -> float | None:
    low, high = figure.low, figure.high
    return None if low is None or high is None else (high - low) / 2 / scale.divisor


@dataclass(frozen=True, slots=True)
class Reach:
    """A value with its interval: an end without a bound is infinite, without an interval it is the value."""

    low: float
    at: float
    high: float


def reach_of(figure: Estimate, divisor: float) -> Reach:
    """Without a level a figure has no interval; with one, an end that is missing has no bound."""
    low, high = figure.low, figure.high
    beyond = (-math.inf, math.inf) if figure.level else (figure.point, figure.point)
    ends = (beyond[0] if low is None else low, figure.point, beyond[1] if high is None else high)
    return Reach(*(end / divisor for end in ends))
