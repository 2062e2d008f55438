"""Percentiles and means of samples: the one estimator behind every table, figure, ratio and export.

A failed request is infinitely late: it enters as +inf, so that shedding load never looks faster.

Runs of one server mostly differ by more than the requests of one run do. So of several runs these are the
units: intervals are Student's t on the logarithms of the runs' own numbers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from burstline.measure.stats.estimates import (
    LEVEL,
    ONE_RUN,
    Absent,
    Estimate,
    Figure,
    Floats,
    Ints,
    among_failures,
    early_stopping_floor,
    label,
    students_t,
)

LEAST_RUNS: Final = 3
"""So many runs have an interval: their scatter is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Values, ascending, and the running totals of their weights; None where each counts once."""

    value: Floats
    cumulated: Floats | None = None

    @classmethod
    def of(cls, value: Floats, weight: NDArray[Any]) -> Self:
        """Where all weights are 1 only values are sorted: to carry weights along takes ten times as long."""
        if not len(weight) or weight.min() == weight.max() == 1:
            return cls(np.sort(value))
        order = np.argsort(value)
        return cls(value[order], np.cumsum(weight[order], dtype=np.float64))

    @property
    def total(self) -> float:
        if self.cumulated is None or not len(self.value):
            return float(len(self.value))
        return float(self.cumulated[-1])

    def at(self, rank: float) -> float:
        """The first value at which the running total reaches `rank`."""
        if self.cumulated is None:
            return float(self.value[max(math.ceil(rank) - 1, 0)])
        return float(self.value[np.searchsorted(self.cumulated, rank)])

    def excess(self, above: float) -> float:
        """By how much the values above this exceed it on average; 0 where there is none."""
        first = int(np.searchsorted(self.value, above, side="right"))
        if first == len(self.value):
            return 0.0
        weights = None if self.cumulated is None else np.diff(self.cumulated, prepend=0.0)[first:]
        return float(np.average(self.value[first:], weights=weights)) - above

    def quantile(self, p: float) -> float:
        return quantile(self.value, p, self.cumulated)


@dataclass(frozen=True, eq=False)
class Samples:
    """Values, request by request: `counts[k]` of request k. Value i counts `weight[i]` times."""

    value: Floats
    weight: NDArray[Any]
    counts: Ints

    @classmethod
    def per_request(cls, values: Floats) -> Self:
        """One value a request; NaN is left out."""
        is_known = ~np.isnan(values)
        known = values[is_known]
        return cls(known, each_once(known), is_known.astype(np.int64))

    @cached_property
    def ranked(self) -> Ranked:
        return Ranked.of(self.value, self.weight)

    def ranked_for(self, ps: Iterable[float]) -> Ranked:
        """The same, in order only as far as the quantiles `ps` and the largest value need."""
        if len(self.weight) and not self.weight.min() == self.weight.max() == 1:
            return self.ranked
        value = self.value.copy()
        order_for(value, ps)
        return Ranked(value)

    def by_request(self, amount: NDArray[Any]) -> Floats:
        """The sum of `amount`, one for each sample, of each request."""
        some, sums = self.counts > 0, np.zeros(len(self.counts))
        starts = (np.cumsum(self.counts) - self.counts)[some]
        exact = np.float64 if amount.dtype.kind == "f" else np.int64
        sums[some] = np.add.reduceat(amount, starts, dtype=exact)
        return sums


def each_once(values: Floats) -> NDArray[Any]:
    """Weights of 1, which take no memory."""
    return np.broadcast_to(np.int8(1), len(values))


def quantile(ordered: Floats, p: float, cumulated: Floats | None = None) -> float:
    """The quantile `p` (0..1) of ascending values by linear interpolation, as numpy's default.

    `cumulated` are the running totals of the weights: each value then stands as often as its weight says.
    +inf where the rank, or the next rank that it interpolates towards, is a failure.
    """
    total = float(len(ordered)) if cumulated is None else float(cumulated[-1])
    below, share = _rank(total, p)
    above = min(below + 1, total - 1)
    if cumulated is None:
        first, second = int(below), int(above)
    else:
        first, second = np.searchsorted(cumulated, [below, above], side="right").clip(max=len(ordered) - 1)
    if share < 1e-9 or first == second or math.isinf(ordered[first]):
        return float(ordered[first])
    if math.isinf(ordered[second]):
        return math.inf
    return float(ordered[first] + share * (ordered[second] - ordered[first]))


def _rank(total: float, p: float) -> tuple[int, float]:
    """The rank just below the quantile `p` of `total` values, and the fraction towards the next rank."""
    rank = (total - 1) * p
    # A rank that floating point leaves a hair off an integer must not reach for its (infinite) neighbour.
    below = math.floor(rank + 1e-9)
    return below, rank - below


def order_for(values: Floats, ps: Iterable[float]) -> None:
    """Have the quantiles `ps`, and the largest value, stand in place.

    To sort millions of values takes five times as long on processors where AVX-512 is slow (AMD's Zen 4).
    """
    if len(values):
        last = len(values) - 1
        below = [_rank(len(values), p)[0] for p in ps]
        values.partition(sorted({last, *below, *(min(k + 1, last) for k in below)}))


def quantile_of(values: Floats, p: float) -> float:
    """The same of values in any order; NaN is left out, and NaN comes back where nothing is left."""
    kept = values[~np.isnan(values)]
    order_for(kept, (p,))
    return quantile(kept, p) if len(kept) else math.nan


def percentiles(samples: Samples, ps: Sequence[float], unit: str) -> dict[str, Figure]:
    """The percentiles `ps` by name, as plain readings: one run is one observation, with one queue.

    Below MLPerf's early-stopping floor a percentile is Absent, and where it lies among failures.
    """
    return {label(p): _percentile(samples, p, unit) for p in ps}


def mean(samples: Samples, unit: str) -> Figure:
    """The weighted mean as a plain reading; Absent where nothing is known or any failed."""
    ranked = samples.ranked
    total = int(ranked.total)
    if not total:
        return Absent("there is no value to average")
    if math.isinf(ranked.value[-1]):
        n_failed = np.count_nonzero(samples.by_request(np.isinf(samples.value)))
        n = np.count_nonzero(samples.counts)
        return Absent(f"{n_failed:,} of the {n:,} requests failed, so the mean does not exist")
    each = ranked.value if ranked.cumulated is None else samples.value * samples.weight
    return Estimate(float(each.sum() / total), None, None, None, total, unit, ONE_RUN)


def extremes(samples: Samples, unit: str) -> dict[str, Figure]:
    """The standard deviation (n - 1), the least and the greatest value, as plain readings."""
    average, total = mean(samples, unit), int(samples.ranked.total)
    if isinstance(average, Absent):
        return dict.fromkeys(("std", "min", "max"), average)
    squares = float((samples.weight * (samples.value - average.point) ** 2).sum())
    ends = (float(samples.value.min()), float(samples.value.max()))
    std = math.sqrt(squares / max(total - 1, 1))
    known = zip(("std", "min", "max"), (std, *ends), strict=True)
    return {name: Estimate(value, None, None, None, total, unit) for name, value in known}


def _percentile(samples: Samples, p: float, unit: str) -> Figure:
    n, floor = int(samples.ranked.total), early_stopping_floor(p)
    if n < floor and not (n and math.isinf(samples.ranked.quantile(p))):  # more samples would not help
        return Absent(f"{label(p)} needs {floor:,} samples, there are {n:,}")
    point = samples.ranked.quantile(p)
    if not math.isfinite(point):
        n_failed = float(samples.weight[np.isinf(samples.value)].sum())
        of_tokens = n > int(np.count_nonzero(samples.counts))
        return Absent(among_failures(n_failed, n, p, of_tokens=of_tokens))
    return Estimate(point, None, None, None, n, unit, ONE_RUN)


def percentile_over_runs(runs: Sequence[Samples], p: float, unit: str) -> Figure:
    """The percentile `p` of all requests, every run with equal weight; from 3 runs on with an interval.

    The point is never an average of percentiles. The interval's width comes from how far the runs' own
    percentiles scatter. +inf is a failed request.
    """
    k, n = len(runs), sum(int(run.ranked.total) for run in runs)
    if any(len(run.value) == 0 for run in runs):
        return Absent("a run has no value at all")
    if n < early_stopping_floor(p):
        return Absent(f"{label(p)} needs {early_stopping_floor(p):,} samples, there are {n:,}")
    value, cumulated = pooled(runs)
    point = quantile(value, p, cumulated)
    if not math.isfinite(point):
        n_failed = sum(float(run.weight[np.isinf(run.value)].sum()) for run in runs)
        return Absent(among_failures(n_failed, n, p))
    own = np.array([run.ranked.quantile(p) for run in runs])
    return _with_interval(point, own, n, unit, f"{k} runs pooled with equal weight")


def over_runs(values: Floats, unit: str) -> Figure:
    """One number a run: their geometric mean, from 3 runs on with Student's interval."""
    if not len(values) or not np.isfinite(values).all() or values.min() < 0:
        return Absent("a run has no value at all")
    if values.min() == 0:
        return Estimate(float(values.mean()), None, None, None, len(values), unit, "some runs have 0")
    point = math.exp(float(np.log(values).mean()))
    return _with_interval(point, values, len(values), unit, f"geometric mean of {len(values)} runs")


def pooled(runs: Sequence[Samples]) -> tuple[Floats, Floats]:
    """All values ascending with the running totals of their weights; every run weighs as much as another."""
    totals = [run.ranked.total for run in runs]
    value = np.concatenate([run.value for run in runs])
    weight = np.concatenate(
        [run.weight * (max(totals) / total) for run, total in zip(runs, totals, strict=True)]
    )
    order = np.argsort(value, kind="stable")
    return value[order], np.cumsum(weight[order])


def _with_interval(point: float, own: Floats, n: int, unit: str, note: str) -> Figure:
    """Student's t on the logarithms of the runs' own numbers, laid around the point."""
    if len(own) == 1:
        return Estimate(point, None, None, None, n, unit, ONE_RUN)
    if len(own) < LEAST_RUNS:
        return Estimate(point, None, None, None, n, unit, f"{note}; {LEAST_RUNS} runs give an interval")
    if not np.isfinite(own).all() or own.min() <= 0:
        return Estimate(point, None, None, None, n, unit, f"{note}; in some runs it lies among failures")
    spread = float(np.log(own).std(ddof=1))
    reach = math.exp(students_t(len(own) - 1) * spread / math.sqrt(len(own)))
    return Estimate(point, point / reach, point * reach, LEVEL, n, unit, f"{note}, Student's t between runs")
