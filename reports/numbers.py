"""Numbers as people read them: one unit a row, three significant digits unless the interval allows more."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ESTIMATE_KEYS = frozenset({"point", "unit"})
SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "ns": ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "fraction": ((1e-2, "%"),),
}
"""Units that are shown as others: (how many of the stored unit one shown unit is, its name), large to small."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How values of one stored unit are shown: `value / divisor`, in `unit`."""

    divisor: float
    unit: str


def is_estimate(value: object) -> bool:
    """Whether a node of the summary is an estimate (or an absence of one) rather than a folder of them."""
    return isinstance(value, Mapping) and "point" in value


def scale_for(unit: str, values: Iterable[float | None]) -> Scale:
    """The largest shown unit in which the greatest of `values` is at least 1."""
    steps = SCALES.get(unit, ((1.0, unit),))
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    fitting = (step for step in steps if largest >= step[0])
    return Scale(*next(fitting, steps[-1] if largest else steps[0]))


def number(value: float, half_width: float | None = None) -> str:
    """`value` with thousands separators: three significant digits, or as many as its interval supports.

    `half_width` is half of the interval around it; the last digit shown is then no finer than a tenth of it.
    """
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    if half_width:
        decimals = max(decimals, min(-math.floor(math.log10(half_width)), decimals + 3))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(decimals, 0)}f}".replace("-", "−")


def count(value: float) -> str:
    """A whole number with thousands separators."""
    return f"{value:,.0f}"


def point(estimate: Mapping[str, Any], scale: Scale) -> str:
    """The estimate's value in the scale's unit, "not provided" where it is absent."""
    if estimate["point"] is None:
        return "∞" if estimate.get("low") is not None else "not provided"
    low, high = estimate.get("low"), estimate.get("high")
    finite = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    half = (high - low) / 2 / scale.divisor if finite else None
    return number(estimate["point"] / scale.divisor, half)


def interval(estimate: Mapping[str, Any], scale: Scale) -> str:
    """The estimate's interval as "[low, high]" in the scale's unit, "" where it has none."""
    low, high = estimate.get("low"), estimate.get("high")
    if low is None and high is None:
        return ""
    if low == high == estimate.get("point"):
        return ""
    half = (high - low) / 2 / scale.divisor if low is not None and high is not None else None
    ends = [number(end / scale.divisor, half) if end is not None else "?" for end in (low, high)]
    return f"[{ends[0]}, {ends[1]}]"
