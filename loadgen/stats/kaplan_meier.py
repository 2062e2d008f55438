"""Kaplan-Meier: latency where requests were cut off; one given up after 60 s takes at least 60 s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.stats import distributions
from loadgen.stats.estimates import LEVEL, Absent, Estimate, Figure, Floats, early_stopping_floor, label

QUANTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The share of requests that still run after each moment at which one ends, with its 95% band.

    `moments` ascend; `running`, `low` and `high` are 0..1, one a moment.
    """

    moments: Floats
    running: Floats
    low: Floats
    high: Floats

    def quantile(self, p: float) -> float | None:
        return _first_at_most(self.moments, self.running, 1 - p)

    def interval(self, p: float) -> tuple[float | None, float | None]:
        """Every moment at which the band holds the quantile (Brookmeyer & Crowley 1982)."""
        return _first_at_most(self.moments, self.low, 1 - p), _first_at_most(self.moments, self.high, 1 - p)


def curve(watched_s: Floats, ended: NDArray[np.bool_]) -> Curve:
    """Kaplan and Meier (1958): `watched_s` is how long each was watched, `ended` whether it ended then.

    The band is Greenwood's (1926) on the scale of log(-log), where it stays within 0..1. It has none at 0,
    where none is left; the upper edge stays where it was.
    """
    moments, ends = np.unique(watched_s[ended], return_counts=True)
    at_risk = len(watched_s) - np.searchsorted(np.sort(watched_s), moments, side="left")
    running = np.cumprod(1 - ends / at_risk, dtype=np.float64)
    some = running > 0
    left = at_risk[some] - ends[some]
    error = np.sqrt(np.cumsum(ends[some] / (at_risk[some] * left))) / -np.log(running[some])
    reach = np.exp(float(distributions.norm.ppf((1 + LEVEL) / 2)) * error)
    low, high = np.zeros(len(moments)), np.ones(len(moments))
    low[some], high[some] = running[some] ** reach, running[some] ** (1 / reach)
    high[~some] = high[some][-1:] if some.any() else 1.0
    return Curve(moments, running, low, high)


def survival_percentiles(watched_s: Floats, ended: NDArray[np.bool_]) -> dict[str, Figure]:
    """QUANTILES of how long requests take, in seconds; see `curve`. +inf is one that never ends."""
    survival = curve(watched_s, ended)
    return {label(p): _figure(survival, p, len(watched_s)) for p in QUANTILES}


def _figure(survival: Curve, p: float, n: int) -> Figure:
    if n < (floor := early_stopping_floor(p)):
        return Absent(f"{label(p)} needs {floor:,} samples, there are {n:,}")
    point = survival.quantile(p)
    if point is None:
        left = float(survival.running[-1]) if len(survival.running) else 1.0
        return Absent(f"{math.ceil(left * 1000) / 10:g}% had not ended when they were cut off")
    low, high = survival.interval(p)
    return Estimate(point, low, high, LEVEL, n, "s", "Kaplan-Meier")


def _first_at_most(moments: Floats, shares: Floats, share: float) -> float | None:
    k = int(np.argmax(shares <= share + 1e-12)) if len(shares) else 0
    return float(moments[k]) if len(shares) and shares[k] <= share + 1e-12 else None
