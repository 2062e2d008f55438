"""Several runs of one system: pooled percentiles, and intervals between runs.

Runs of one server mostly differ by more than the requests of one run do. So runs are the units: intervals are
Student's t on the logarithms of the runs' own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from burstline.measure.stats.estimates import (
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
from burstline.measure.stats.quantiles import Samples, quantile

LEAST_RUNS: Final = 3


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
