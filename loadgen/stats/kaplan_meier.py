"""Latency where requests were cut off: one that was given up after 60 s would have taken 60 s or more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats as sps

from loadgen.record.columns import Columns, Floats
from loadgen.record.record import Outcome
from loadgen.stats.estimates import LEVEL, Absent, Estimate, Figure, early_stopping_floor, label

QUANTILES: Final = (0.5, 0.9, 0.99)
NOBODY_CUT_OFF: Final = Absent("no request was cut off", "none-cut-off")

_CUT_OFF = (Outcome.TIMEOUT.value, Outcome.CANCELLED.value)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The share of requests that still run after each moment at which one ends, with its 95 % band.

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


def survival(c: Columns) -> dict[str, dict[str, Figure]]:
    """TTFT and E2E of all requests that set out, with those cut off counted for as long as they ran.

    By metric and quantile. Cut off is what we ended ourselves, at its deadline or with the run, though it
    never got as far as a connection; a request that failed in another way never ends.
    """
    outcome = c.table.column("outcome").to_numpy()
    cut_off, set_out = np.isin(outcome, _CUT_OFF), outcome != Outcome.NOT_SENT.value
    if not cut_off.any():
        return {name: {label(p): NOBODY_CUT_OFF for p in QUANTILES} for name in ("ttft", "e2e")}
    seen_s = np.where(cut_off, c.closed_s - c.due_s, np.inf)
    began, ended = ~np.isnan(c.first_s) & (c.ok | cut_off), c.ok
    return {
        "ttft": _figures(np.where(began, c.first_s - c.due_s, seen_s)[set_out], began[set_out]),
        "e2e": _figures(np.where(ended, c.last_s - c.due_s, seen_s)[set_out], ended[set_out]),
    }


def curve(seen_s: Floats, ended: NDArray[np.bool_]) -> Curve:
    """Kaplan and Meier (1958): `seen_s` is how long each was watched, `ended` whether it ended then.

    The band is Greenwood's (1926) on the scale of log(-log), where it stays within 0..1. It has none at 0,
    when nobody is left: the upper edge stays where it was.
    """
    moments, ends = np.unique(seen_s[ended], return_counts=True)
    at_risk = len(seen_s) - np.searchsorted(np.sort(seen_s), moments, side="left")
    running = np.cumprod(1 - ends / at_risk, dtype=np.float64)
    some = running > 0
    left = at_risk[some] - ends[some]
    error = np.sqrt(np.cumsum(ends[some] / (at_risk[some] * left))) / -np.log(running[some])
    reach = np.exp(float(sps.norm.ppf((1 + LEVEL) / 2)) * error)
    low, high = np.zeros(len(moments)), np.ones(len(moments))
    low[some], high[some] = running[some] ** reach, running[some] ** (1 / reach)
    high[~some] = high[some][-1:] if some.any() else 1.0
    return Curve(moments, running, low, high)


def _figures(seen_s: Floats, ended: NDArray[np.bool_]) -> dict[str, Figure]:
    found = curve(seen_s, ended)
    return {label(p): _figure(found, p, len(seen_s)) for p in QUANTILES}


def _figure(found: Curve, p: float, n: int) -> Figure:
    if n < (floor := early_stopping_floor(p)):
        return Absent(f"{label(p)} needs {floor:,} samples, there are {n:,}")
    point = found.quantile(p)
    if point is None:
        left = float(found.running[-1]) if len(found.running) else 1.0
        return Absent(f"{math.ceil(left * 1000) / 10:g} % had not ended when they were last seen")
    low, high = found.interval(p)
    return Estimate(point, low, high, LEVEL, n, "s", "Kaplan-Meier")


def _first_at_most(moments: Floats, shares: Floats, share: float) -> float | None:
    k = int(np.argmax(shares <= share + 1e-12)) if len(shares) else 0
    return float(moments[k]) if len(shares) and shares[k] <= share + 1e-12 else None
