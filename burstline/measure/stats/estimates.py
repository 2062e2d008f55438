"""Estimates: a number with its interval, its sample size and its unit, or the reason why there is none.

Intervals of order statistics and of shares: one of a number of trials, and the difference of two in the same
trials.
"""

import math
from functools import cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats would take as long to import as all else that a report computes

from burstline.measure.stats.figure import Absent as Absent
from burstline.measure.stats.figure import Estimate as Estimate
from burstline.measure.stats.figure import Figure as Figure
from burstline.measure.stats.figure import measured as measured

LEVEL = 0.95
EARLY_STOPPING_CONFIDENCE = 0.99

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ONE_RUN = "1 run: repeat it (--repeats 3) for an interval"
"""The note of a number that rests on one observation of the system, however many requests it had."""


def students_t(freedom: float, tail: float = (1 - LEVEL) / 2) -> float:
    """The quantile of Student's t that leaves `tail` above it: half the width of an interval in errors."""
    return float(-special.stdtrit(freedom, tail))


def binom_cdf(k: Any, n: Any, p: Any) -> Any:
    k, n = np.asarray(k), np.asarray(n)
    return np.where(k < n, special.betaincc(k + 1, np.maximum(n - k, 1), p), 1.0)


def binom_ppf(q: Any, n: Any, p: Any) -> Any:
    """The least k whose cdf is at least q."""
    k = np.clip(np.ceil(special.bdtrik(q, n, p)), 0, n)
    # bdtrik inverts to rounding error: k may be one too many or too few.
    k = np.where(binom_cdf(k, n, p) < q, k + 1, k)
    before = np.maximum(k - 1, 0)
    return np.where(binom_cdf(before, n, p) >= q, before, k)


def order_statistic_ranks(n: int, p: float) -> tuple[int | None, int | None]:
    """Ranks (1-based) of the two order statistics that hold the quantile `p` with at least that probability.

    For independent samples only. At most 2.5% lies beyond either rank; None where the sample is too small for
    that side. Source: David & Nagaraja, Order Statistics (3rd ed.), 7.1.
    """
    tail = (1 - LEVEL) / 2
    low = int(binom_ppf(tail, n, p))
    high = int(binom_ppf(1 - tail, n, p)) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def early_stopping_discards(n: int, p: float) -> int:
    """MLPerf's t: the largest with find_min(t) + t <= n; find_min(t) is the least h: I_p(h, t + 1) < 1 - c.

    I_p(n - t, t + 1) is the probability that at most t of n samples exceed the quantile. 0 where even t = 0
    is not reached. Source: MLCommons inference rules, "Early stopping"
    (https://github.com/mlcommons/inference_policies/blob/master/inference_rules.adoc, appendix).
    """
    return max(int(binom_ppf(1 - EARLY_STOPPING_CONFIDENCE, n, 1 - p)) - 1, 0)


@cache
def early_stopping_floor(p: float) -> int:
    """The fewest samples for which early stopping gives a bound: 11, 64, 130, 662, 6,636 for p50 to p99.9."""
    # With so many samples it is rare enough that at most one exceeds the quantile.
    return next(n for n in count(2) if p**n + n * (1 - p) * p ** (n - 1) < 1 - EARLY_STOPPING_CONFIDENCE)


def early_stopping_bound(values: Floats, p: float, unit: str, n_effective: float | None = None) -> Figure:
    """A value the true quantile stays below with 99% confidence: the t-th largest sample.

    NaN is left out, +inf is a failed request. Dependent samples with the information of `n_effective`
    independent ones use the sample with the same share above it as the t-th largest of `n_effective`.
    """
    kept = np.sort(values[~np.isnan(values)])
    n = len(kept)
    effective = n if n_effective is None else min(n, int(n_effective))
    t = early_stopping_discards(effective, p) if effective else 0
    if t < 1:
        few = f"there are {n:,}{f' with an effective sample size of {effective:,}' * (effective < n)}"
        return Absent(f"a bound on {label(p)} needs {early_stopping_floor(p):,} samples, {few}")
    bound = float(kept[n - t * n // effective])
    if math.isinf(bound):
        return Absent(among_failures(int(np.isinf(kept).sum()), n, p))
    return Estimate(bound, None, bound, EARLY_STOPPING_CONFIDENCE, n, unit, "one-sided upper bound")


def label(p: float) -> str:
    """`p99` for 0.99, `p99.9` for 0.999."""
    return f"p{p * 100:g}"


def among_failures(n_failed: float, n: int, p: float, *, of_tokens: bool = False) -> str:
    """Why a percentile is absent where too many failed; `of_tokens`: n counts tokens, not requests."""
    of = "tokens belong to requests that" if of_tokens else "measured requests"
    late = f"{of} did not succeed and count as infinitely late"
    return f"{n_failed:,.0f} of the {n:,} {late}, so {label(p)} does not exist"


def clopper_pearson(k: float, n: float) -> tuple[float, float]:
    """The exact binomial interval of a share, for numbers that need not be whole."""
    low = float(special.betaincinv(k, n - k + 1, (1 - LEVEL) / 2)) if k > 0 else 0.0
    return low, float(special.betaincinv(k + 1, n - k, (1 + LEVEL) / 2)) if k < n else 1.0


def share_of(k: int, n: int) -> Estimate:
    return Estimate(k / n, *clopper_pearson(k, n), LEVEL, n, "1", "exact binomial interval")


def paired_excess(n: int, first: int, second: int, both: int) -> Estimate:
    """The share of n trials in which one thing happened, minus the share in which another did.

    Of the trials in `first` and in `second`, `both` are the same. The interval is exact where the second
    never happened: it is that of the first. Otherwise it is Newcombe's for pairs (Statistics in Medicine 17,
    1998, p. 2635, method 10).
    """
    if not second:
        return share_of(first, n)
    p, q, z2 = first / n, second / n, float(special.ndtri((1 + LEVEL) / 2)) ** 2

    def wilson(k: int, sign: int) -> float:
        """An end of the score interval."""
        return (k + z2 / 2 + sign * math.sqrt(z2 * (k * (n - k) / n + z2 / 4))) / (n + z2)

    excess = both * (n - first - second + both) - (first - both) * (second - both)
    margins = first * (n - first) * second * (n - second)
    # Corrected for continuity where the two tend to happen together.
    phi = (max(excess - n / 2, 0) if excess > 0 else excess) / math.sqrt(margins) if margins else 0.0

    def reach(sign: int) -> float:
        a, b = wilson(first, sign) - p, q - wilson(second, -sign)
        return sign * math.sqrt(a**2 - 2 * phi * a * b + b**2)

    note = "Newcombe's interval for pairs"
    return Estimate(p - q, p - q + reach(-1), p - q + reach(1), LEVEL, n, "1", note)
