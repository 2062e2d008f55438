"""Intervals for requests that depend on their neighbours: in an open loop they wait in the same queue.

How far a mean or a share errs is read off blocks of neighbours (overlapping batch means: Meketon and
Schmeiser, Winter Simulation Conference 1984). Blocks are five times as long as `block_length` finds best for
the error's own error: shorter ones miss the rare long waits that make a queue's mean. The price is Student's
t for fewer blocks. Of 1,000 requests to M/M/1, from empty, 95 % intervals of the mean hold the truth in 95 %
of runs at half load, 95 % at 70 %, 94 % at 80 %, and 87 % at 90 %, where 1,000 are few (tests/loadgen).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats as sps

from loadgen.metrics.definitions import Metric, latencies
from loadgen.record.columns import Columns, Floats, Ints32
from loadgen.stats.blocks import block_length
from loadgen.stats.estimates import LEVEL, Absent, Estimate, Figure, early_stopping_bound, label

LONGER: Final = 5
LEAST_BLOCKS: Final = 4
BELOW: Final = (0.5, 0.9, 0.95)
"""A percentile counts as worth no more than those below it: what lies above a p99 came in one crowd or two,
which do not tell how often crowds come."""


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """Samples, ascending by value, of requests that are numbered in the order in which they were due.

    Sample i counts `weight[i]` times and is of request `owner[i]`, 0 to `n_requests` - 1; +inf is a failure.
    """

    value: Floats
    weight: Ints32
    owner: Ints32
    n_requests: int


def timed(metric: Metric, c: Columns) -> Timed:
    """The metric's samples with their requests' places in time; what is undefined is left out."""
    place = np.empty(len(c), dtype=np.int32)
    place[np.argsort(c.due_s, kind="stable")] = np.arange(len(c))
    if metric.pooled is not None:
        samples = metric.pooled(c)
        return Timed(samples.value, samples.weight, place[samples.owner], len(c))
    value = latencies(metric, c)
    order = np.argsort(value, kind="stable")[: len(value) - int(np.isnan(value).sum())]  # NaN sorts last
    return Timed(value[order], np.ones(len(order), np.int32), place[order], len(c))


def mean_in_time(mean: Figure, samples: Timed) -> Figure:
    """The mean with an interval that allows for the order of the requests.

    It is symmetrical in the mean's reciprocal: a mean wait goes as 1 / (1 - load), so that near saturation
    it is the reciprocal that errs alike whatever it is. No upper bound where the error is as large as that.
    """
    if isinstance(mean, Absent):
        return mean
    sums = np.bincount(samples.owner, samples.value * samples.weight, samples.n_requests)
    weights = np.bincount(samples.owner, samples.weight, samples.n_requests)
    residuals = np.asarray((sums - mean.point * weights) / weights.mean(), dtype=np.float64)
    error, freedom = _error(residuals)
    half = _student(freedom) * error
    note = _said(samples.n_requests, float(residuals.var()) / error**2 if error else math.inf)
    if mean.point <= 0:
        return replace(mean, low=mean.point - half, high=mean.point + half, note=note)
    share = half / mean.point
    if share >= 1:
        return replace(mean, low=mean.point / (1 + share), high=None, note=f"{note}: no upper bound")
    return replace(mean, low=mean.point / (1 + share), high=mean.point / (1 - share), note=note)


def percentile_in_time(percentile: Figure, samples: Timed, p: float) -> Figure:
    """The percentile `p` with the interval that as many independent samples as these are worth would give.

    It is Clopper and Pearson's interval for the share below, read as order statistics.
    """
    if isinstance(percentile, Absent):
        return percentile
    n_worth = worth(samples, p)
    low_share, high_share = _clopper_pearson(p * n_worth, n_worth)
    cumulated = np.cumsum(samples.weight)
    total = float(cumulated[-1])

    def at(rank: float) -> float | None:
        if not 1 <= rank <= total:
            return None
        value = float(samples.value[np.searchsorted(cumulated, rank - 0.5)])
        return value if math.isfinite(value) else None

    low, high = at(math.floor(low_share * total)), at(math.ceil(high_share * total) + 1)
    note = _said(samples.n_requests, n_worth)
    if high is None:
        note = f"{note}: {label(p)} has no upper bound"
    return replace(percentile, low=low, high=high, note=note)


def bound_in_time(samples: Timed, p: float, unit: str) -> Figure:
    """A value the true quantile stays below with 99 % confidence, from what the samples are worth."""
    n_worth = worth(samples, p) if len(samples.value) else 0.0
    return early_stopping_bound(samples.value, p, unit, n_worth)


def share_in_time(met: NDArray[np.bool_], due_s: Floats) -> Figure:
    """The share of requests of which `met` is true, with an interval that allows for their order."""
    n = len(met)
    if not n:
        return Absent("nothing was planned")
    share = float(met.mean())
    error, freedom = _error(met[np.argsort(due_s, kind="stable")].astype(np.float64) - share)
    n_worth = _independent(share, error, freedom, n)
    low, high = _clopper_pearson(share * n_worth, n_worth)
    return Estimate(share, low, high, LEVEL, n, "1", _said(n, n_worth))


def worth(samples: Timed, p: float) -> float:
    """How many independent samples would say as much of the percentile `p`."""
    return min(_worth(samples, q) for q in (*(q for q in BELOW if q < p), p))


def _worth(samples: Timed, p: float) -> float:
    cumulated = np.cumsum(samples.weight)
    total = float(cumulated[-1])
    edge = samples.value[np.searchsorted(cumulated, p * total)]
    n_below = int(np.searchsorted(samples.value, edge, side="right"))
    below = np.bincount(samples.owner[:n_below], samples.weight[:n_below], samples.n_requests)
    all_of = np.bincount(samples.owner, samples.weight, samples.n_requests)
    share = float(below.sum() / total)
    return _independent(share, *_error((below - share * all_of) / all_of.mean()), total)


def _independent(share: float, error: float, freedom: float, most: float) -> float:
    """How many independent trials give a share this error, with Student's t turned into fewer trials."""
    if not error:
        return most
    widened = error * _student(freedom) / float(sps.norm.ppf((1 + LEVEL) / 2))
    return min(most, share * (1 - share) / widened**2)


def _clopper_pearson(k: float, n: float) -> tuple[float, float]:
    """The exact binomial interval of a share, for numbers that need not be whole."""
    low = float(sps.beta.ppf((1 - LEVEL) / 2, k, n - k + 1)) if k > 0 else 0.0
    return low, float(sps.beta.ppf((1 + LEVEL) / 2, k + 1, n - k)) if k < n else 1.0


def _error(residuals: Floats) -> tuple[float, float]:
    """The standard error of the mean of a series around 0, and the freedom Student's t has for it."""
    n = len(residuals)
    block = max(1, min(LONGER * block_length(residuals), n // LEAST_BLOCKS))
    total = np.concatenate([[0.0], np.cumsum(residuals)])
    means = (total[block:] - total[:-block]) / block
    variance = block * float((means**2).sum()) / ((n - block) * (n - block + 1))
    return math.sqrt(variance), n / block - 1


def _student(freedom: float) -> float:
    return float(sps.t.ppf((1 + LEVEL) / 2, freedom))


def _said(n: int, n_worth: float) -> str:
    return f"{n:,} requests are worth {min(n_worth, n):,.0f} independent ones"
