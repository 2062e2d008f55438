"""Several runs of one system: pooled percentiles, intervals between runs, and the noise of a system (A/A).

Runs of one server mostly differ by more than the requests of one run do. So runs are the units: intervals are
Student's t on the logarithms of the runs' own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from burstline.loadgen.stats.estimates import (
    LEVEL,
    ONE_RUN,
    Absent,
    Estimate,
    Figure,
    Floats,
    among_failures,
    early_stopping_floor,
    label,
    students_t,
)
from burstline.loadgen.stats.quantiles import Samples, quantile

LEAST_RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class Noise:
    """How far runs of one system scatter: `spread` is the standard deviation of the logarithm."""

    spread: float
    n_runs: int

    @property
    def apart(self) -> float:
        """The relative difference that two runs of one system exceed once in twenty times."""
        return math.expm1(students_t(self.n_runs - 1) * self.spread * math.sqrt(2))


@dataclass(frozen=True, slots=True)
class Spreads:
    """The noise of a run at a freshly started server, and of a run repeated at the same server."""

    starts: Noise | Absent
    repeats: Noise | Absent


def spreads_of(starts: Sequence[Floats]) -> Spreads:
    """Both kinds of noise from one number of each run, grouped by the start of the server that it ran at.

    One-way random effects on the logarithms: the noise of repeats is the standard deviation within starts,
    pooled, and that of fresh starts adds to its variance the part between the starts' means that repeats do
    not explain.
    """
    for values in starts:
        if not np.isfinite(values).all() or (len(values) and values.min() <= 0):
            absent = Absent("noise between runs needs finite values above 0")
            return Spreads(absent, absent)
    logs = [np.log(values) for values in starts if len(values)]
    n, k = sum(map(len, logs)), len(logs)
    squares = sum(float(((own - own.mean()) ** 2).sum()) for own in logs)
    within: Noise | Absent = Absent(f"noise of repeats needs {LEAST_RUNS} runs of one start")
    if n - k >= LEAST_RUNS - 1:
        within = Noise(math.sqrt(squares / (n - k)), n - k + 1)
    if k < LEAST_RUNS:
        return Spreads(Absent(f"noise between starts needs {LEAST_RUNS} starts, there are {k}"), within)
    mean = float(np.concatenate(logs).mean())
    between = sum(len(own) * (own.mean() - mean) ** 2 for own in logs) / (k - 1)
    of_repeats = squares / (n - k) if n > k else 0.0
    size = (n - sum(len(own) ** 2 for own in logs) / n) / (k - 1)
    variance = max(float(between) - of_repeats, 0.0) / size + of_repeats
    return Spreads(Noise(math.sqrt(variance), k), within)


def noise_of(values: Floats) -> Noise | Absent:
    """The noise between runs from one number of each run."""
    if len(values) < LEAST_RUNS:
        return Absent(f"noise between runs needs {LEAST_RUNS} runs, there are {len(values)}")
    if not np.isfinite(values).all() or values.min() <= 0:
        return Absent("noise between runs needs finite values above 0")
    return Noise(float(np.log(values).std(ddof=1)), len(values))


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
    noise = noise_of(own)
    if isinstance(noise, Absent):
        return Estimate(point, None, None, None, n, unit, f"{note}; in some runs it lies among failures")
    reach = math.exp(students_t(len(own) - 1) * noise.spread / math.sqrt(len(own)))
    return Estimate(point, point / reach, point * reach, LEVEL, n, unit, f"{note}, Student's t between runs")
