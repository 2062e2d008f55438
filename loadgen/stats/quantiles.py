"""Percentiles and means of samples: the one estimator behind every table, figure, ratio and export.

A failed request is infinitely late: it enters as +inf, so that shedding load never looks faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.stats.estimates import (
    ONE_RUN,
    Absent,
    Estimate,
    Figure,
    Floats,
    Ints32,
    among_failures,
    early_stopping_floor,
    label,
)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Values, ascending; value i counts `weight[i]` times and belongs to request `owner[i]`."""

    value: Floats
    weight: Ints32
    owner: Ints32

    @classmethod
    def sorted(cls, value: Floats, weight: Ints32, owner: Ints32) -> Samples:
        """These samples, ascending; equal ones keep their order only where weights differ.

        Where they do not, it changes no result, and a sort that keeps it takes ten times as long.
        """
        uniform = not len(weight) or weight.min() == weight.max()
        order = np.argsort(value, kind="quicksort" if uniform else "stable")
        return cls(value[order], weight[order], owner[order])

    @classmethod
    def per_request(cls, values: Floats) -> Samples:
        """One value a request, in the order of the requests; NaN is left out."""
        order = np.argsort(values, kind="stable")[: len(values) - int(np.isnan(values).sum())]
        return cls(values[order], np.ones(len(order), np.int32), order.astype(np.int32))


def quantile(ordered: Floats, p: float, cumulated: Floats | None = None) -> float:
    """The quantile `p` (0..1) of ascending values by linear interpolation, as numpy's default.

    `cumulated` are the running totals of the weights: each value then stands as often as its weight says.
    +inf where the rank, or the next rank that it interpolates towards, is a failure.
    """
    total = float(len(ordered)) if cumulated is None else float(cumulated[-1])
    rank = (total - 1) * p
    # A rank that floating point leaves a hair off an integer must not reach for its (infinite) neighbour.
    below = math.floor(rank + 1e-9)
    share = rank - below
    above = min(below + 1, total - 1)
    if cumulated is None:
        first, second = int(below), int(above)
    else:
        first, second = np.searchsorted(cumulated, [below, above], side="right").clip(max=len(ordered) - 1)
    if share < 1e-9 or first == second:
        return float(ordered[first])
    if math.isinf(ordered[second]):
        return math.inf
    return float(ordered[first] + share * (ordered[second] - ordered[first]))


def quantile_of(values: Floats, p: float) -> float:
    """The same of values in any order; NaN is left out, and NaN comes back where nothing is left."""
    kept = np.sort(values[~np.isnan(values)])
    return quantile(kept, p) if len(kept) else math.nan


def percentiles(samples: Samples, ps: Sequence[float], unit: str) -> dict[float, Figure]:
    """The percentiles `ps` as plain readings: one run is one observation, its requests share one queue.

    Below MLPerf's early-stopping floor a percentile is Absent, and where it lies among failures.
    """
    cumulated = np.cumsum(samples.weight, dtype=np.float64)
    return {p: _percentile(samples, cumulated, p, unit) for p in ps}


def percentile(values: Floats, p: float, unit: str) -> Figure:
    """The percentile `p` of one value a request; see `percentiles`."""
    return percentiles(Samples.per_request(values), (p,), unit)[p]


def mean(samples: Samples, unit: str) -> Figure:
    """The weighted mean as a plain reading; Absent where nothing is known or any failed."""
    total = int(samples.weight.sum())
    if not total:
        return Absent("there is no value to average")
    failed = np.isinf(samples.value)
    if failed.any():
        n_failed, n = len(np.unique(samples.owner[failed])), len(np.unique(samples.owner))
        return Absent(f"{n_failed:,} of {n:,} did not succeed and have no finite latency to average")
    point = float((samples.value * samples.weight).sum() / total)
    return Estimate(point, None, None, None, total, unit, ONE_RUN)


def _percentile(samples: Samples, cumulated: Floats, p: float, unit: str) -> Figure:
    n, floor = int(cumulated[-1]) if len(cumulated) else 0, early_stopping_floor(p)
    if n < floor:
        return Absent(f"{label(p)} needs {floor:,} samples, there are {n:,}")
    point = quantile(samples.value, p, cumulated)
    if not math.isfinite(point):
        n_failed = float(samples.weight[np.isinf(samples.value)].sum())
        of_tokens = n > len(np.unique(samples.owner))
        return Absent(among_failures(n_failed, n, p, of_tokens=of_tokens))
    return Estimate(point, None, None, None, n, unit, ONE_RUN)
