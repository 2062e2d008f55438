"""Estimates: no number leaves without its interval, its n and its unit, or the reason why it is absent.

A failed request is infinitely late: it enters a percentile as +inf, so that shedding load never looks faster.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats as sps

from loadgen.stats.figure import Absent as Absent
from loadgen.stats.figure import Estimate as Estimate
from loadgen.stats.figure import Figure as Figure
from loadgen.stats.figure import measured as measured

LEVEL = 0.95
EARLY_STOPPING_CONFIDENCE = 0.99

Floats = NDArray[np.float64]


def percentile(values: Floats, p: float, unit: str) -> Figure:
    """The quantile `p` (0..1) by linear interpolation, with its distribution-free 95 % interval.

    +inf is a failed request, NaN is left out. The interval is that of order statistics: its coverage is exact
    binomial whatever the distribution. Below MLPerf's early-stopping floor the percentile is Absent.
    """
    kept = np.sort(values[~np.isnan(values)])
    n = len(kept)
    floor = early_stopping_floor(p)
    if n < floor:
        return Absent(f"{label(p)} needs {floor:,} samples, there are {n:,}")
    point = _interpolated(kept, p)
    if not math.isfinite(point):
        return Absent(_too_many_failed(kept, p))
    low_rank, high_rank = order_statistic_ranks(n, p)
    low = float(kept[low_rank - 1]) if low_rank is not None else None
    high = float(kept[high_rank - 1]) if high_rank is not None else None
    note = None
    if high is None:
        note = f"{n:,} samples give {label(p)} no upper bound"
    elif math.isinf(high):
        high, note = None, "the upper bound lies among the failed requests"
    return Estimate(point, low, high, LEVEL, n, unit, note)


def mean(values: Floats, unit: str, rng: np.random.Generator) -> Figure:
    """The mean with a bootstrap interval over requests; Absent when any of them failed (+inf)."""
    kept = values[~np.isnan(values)]
    if len(kept) < 2:
        return Absent(f"a mean with an interval needs 2 samples, there are {len(kept)}")
    n_failed = int(np.isinf(kept).sum())
    if n_failed:
        return Absent(
            f"{n_failed:,} of {len(kept):,} failed: a failed request has no finite latency to average"
        )
    low, high = interval(resampled_means(kept, rng))
    return Estimate(float(kept.mean()), low, high, LEVEL, len(kept), unit, "bootstrap over requests")


def order_statistic_ranks(n: int, p: float, level: float = LEVEL) -> tuple[int | None, int | None]:
    """Ranks (1-based) of the two order statistics that hold the quantile `p` with at least that probability.

    At most (1 - level)/2 lies beyond either; None where the sample is too small for that side. Binomial(n, p)
    of the n samples lie below the quantile: David & Nagaraja, Order Statistics (3rd ed.), 7.1.
    """
    tail = (1 - level) / 2
    low = int(sps.binom.ppf(tail, n, p))
    high = int(sps.binom.ppf(1 - tail, n, p)) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def early_stopping_discards(n: int, p: float, confidence: float = EARLY_STOPPING_CONFIDENCE) -> int:
    """MLPerf's t: the largest with find_min(t) + t <= n; find_min(t) is the least h: I_p(h, t + 1) < 1 - c.

    I_p(n - t, t + 1) is the probability that at most t of n samples exceed the quantile. 0 where even t = 0
    is not reached. Source: MLCommons inference rules, "Early stopping"
    (https://github.com/mlcommons/inference_policies/blob/master/inference_rules.adoc, appendix).
    """
    guess = int(sps.binom.ppf(1 - confidence, n, 1 - p))
    while guess >= 0 and sps.binom.cdf(guess, n, 1 - p) >= 1 - confidence:
        guess -= 1
    return max(guess, 0)


@cache
def early_stopping_floor(p: float) -> int:
    """The fewest samples for which early stopping gives a bound: 11, 64, 130, 662, 6,636 for p50 to p99.9."""
    low, high = 1, 2
    while early_stopping_discards(high, p) < 1:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if early_stopping_discards(middle, p) >= 1 else (middle, high)
    return high


def early_stopping_bound(values: Floats, p: float, unit: str, n_worth: float | None = None) -> Figure:
    """A value the true quantile stays below with 99 % confidence: the t-th largest sample.

    Of samples that depend on each other and are worth `n_worth` independent ones it is that many's t-th
    largest, the sample with the same share above it.
    """
    kept = np.sort(values[~np.isnan(values)])
    n = len(kept)
    alone = n if n_worth is None else min(n, int(n_worth))
    t = early_stopping_discards(alone, p) if alone else 0
    if t < 1:
        few = f"there are {n:,}" + (f" worth {alone:,} independent ones" if alone < n else "")
        return Absent(f"a bound on {label(p)} needs {early_stopping_floor(p):,} samples, {few}")
    bound = float(kept[n - t * n // alone])
    if math.isinf(bound):
        return Absent(_too_many_failed(kept, p))
    return Estimate(bound, None, bound, EARLY_STOPPING_CONFIDENCE, len(kept), unit, "one-sided upper bound")


def resampled_means(values: Floats, rng: np.random.Generator) -> Floats:
    """Means of bootstrap samples, 200 to 1000 of them (fewer for long samples, whose means hardly vary)."""
    n = len(values)
    n_draws = replicates(n)
    at_once = max(1, 1_000_000 // n)
    parts = [
        values[rng.integers(0, n, (min(at_once, n_draws - k), n))].mean(axis=1)
        for k in range(0, n_draws, at_once)
    ]
    return np.concatenate(parts)


def replicates(n: int) -> int:
    """How many bootstrap samples of n observations are drawn: 1000, down to 200 where n is large."""
    return int(np.clip(20_000_000 // max(n, 1), 200, 1000))


def label(p: float) -> str:
    """`p99` for 0.99, `p99.9` for 0.999."""
    return f"p{p * 100:g}"


def _interpolated(ordered: Floats, p: float) -> float:
    at = (len(ordered) - 1) * p
    # A rank that floating point leaves a hair off an integer must not drag in its (infinite) neighbour.
    below = round(at) if math.isclose(at, round(at), abs_tol=1e-9) else math.floor(at)
    share = at - below
    if share < 1e-9:
        return float(ordered[below])
    if math.isinf(ordered[below + 1]):
        return math.inf
    return float(ordered[below] + share * (ordered[below + 1] - ordered[below]))


def _too_many_failed(ordered: Floats, p: float) -> str:
    n_failed = int(np.isinf(ordered).sum())
    return (
        f"{n_failed:,} of {len(ordered):,} failed, which count as infinitely late: {label(p)} lies among them"
    )


def interval(draws: Floats, level: float = LEVEL) -> tuple[float, float]:
    """The percentile interval of bootstrap draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
