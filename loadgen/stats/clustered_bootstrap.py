"""Percentiles and means over samples that come in groups: the tokens of a request stutter together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.stats.estimates import (
    LEVEL,
    Absent,
    Estimate,
    Figure,
    Floats,
    early_stopping_floor,
    interval,
    label,
    replicates,
)

Groups = NDArray[np.int32] | NDArray[np.int64]
Weights = Floats | NDArray[np.int32]

MIN_GROUPS = early_stopping_floor(0.5)
"""Resampling fewer would understate how much they differ; a median over requests needs as many."""


def pooled_percentiles(
    values: Floats,
    weights: Weights,
    groups: Groups,
    ps: Sequence[float],
    unit: str,
    rng: np.random.Generator,
) -> dict[float, Figure]:
    """Quantiles over samples that come in groups (the tokens of a request), by bootstrap over the groups.

    Sample i counts `weights[i]` times and belongs to the group `groups[i]`. Tokens of one request stutter
    together, so an interval that took them for independent would be far too narrow; fewer than 11 groups
    give none.
    """
    members, n_groups = _dense(groups)
    if (values[1:] < values[:-1]).any():
        order = np.argsort(values, kind="stable")
        values, weights, members = values[order], weights[order], members[order]
    draws = np.empty((0, len(ps)))
    if n_groups >= MIN_GROUPS:
        draws = _resampled_quantiles(values, weights, members, n_groups, ps, rng)
    return {p: _pooled_figure(values, weights, p, draws[:, k], unit) for k, p in enumerate(ps)}


def pooled_mean(
    values: Floats, weights: Weights, groups: Groups, unit: str, rng: np.random.Generator
) -> Figure:
    """The weighted mean of samples in groups, by bootstrap over the groups; Absent when any failed."""
    if np.isinf(values).any():
        n_failed = _dense(groups[np.isinf(values)])[1]
        return Absent(f"{n_failed:,} requests failed: a failed request has no finite latency to average")
    members, n = _dense(groups)
    if n < 2:
        return Absent(f"a mean with an interval needs 2 requests, there are {n}")
    sums, counts = np.bincount(members, values * weights), np.bincount(members, weights)
    draws = np.empty(replicates(n))
    for k in range(len(draws)):
        drawn = rng.integers(0, n, n)
        draws[k] = sums[drawn].sum() / counts[drawn].sum()
    low, high = interval(draws)
    total = int(weights.sum())
    return Estimate(float(sums.sum() / total), low, high, LEVEL, total, unit, "bootstrap over requests")


@dataclass(frozen=True, slots=True)
class _Window:
    """The sorted samples among which a resampled quantile falls; `below[g]` is what group g has before."""

    values: Floats
    weights: Weights
    members: NDArray[np.int32]
    below: Floats


def _dense(groups: Groups) -> tuple[NDArray[np.int32], int]:
    """The groups numbered from 0 without gaps, in their order, and how many there are."""
    there = np.bincount(groups) > 0
    return (np.cumsum(there, dtype=np.int32) - np.int32(1))[groups], int(there.sum())


def _resampled_quantiles(
    values: Floats,
    weights: Weights,
    members: NDArray[np.int32],
    n_groups: int,
    ps: Sequence[float],
    rng: np.random.Generator,
) -> Floats:
    windows = [_window(values, weights, members, p, n_groups) for p in ps]
    group_weights = np.bincount(members, weights)
    draws = np.empty((replicates(len(values)), len(ps)))
    for row in draws:
        times = np.bincount(rng.integers(0, n_groups, n_groups), minlength=n_groups).astype(np.float64)
        total = float(times @ group_weights)
        for k, (p, near) in enumerate(zip(ps, windows, strict=True)):
            cumulated = times @ near.below + np.cumsum(times[near.members] * near.weights)
            row[k] = weighted_quantile(near.values, cumulated, total, p)
    return draws


def _window(values: Floats, weights: Weights, members: NDArray[np.int32], p: float, n_groups: int) -> _Window:
    # Were every group a block of equal samples, the quantile's rank would vary by this standard error; ten of
    # them leave nothing out, and spare most of the work.
    reach = 10 * math.sqrt(p * (1 - p) / n_groups)
    cumulated = np.cumsum(weights, dtype=np.float64)
    edges = np.array([p - reach, p + reach]) * cumulated[-1]
    low, high = np.searchsorted(cumulated, edges, side="right")
    near = slice(low, high + 2)
    below = np.bincount(members[:low], weights[:low], minlength=n_groups).astype(np.float64)
    return _Window(values[near], weights[near], members[near], below)


def weighted_quantile(ordered: Floats, cumulated: Floats, total: float, p: float) -> float:
    """The weighted quantile as numpy interpolates it, each value standing as often as its weight says."""
    rank = (total - 1) * p
    below = math.floor(rank + 1e-9)
    ranks = [below, min(below + 1, total - 1)]
    first, second = np.searchsorted(cumulated, ranks, side="right").clip(max=len(ordered) - 1)
    share = rank - below
    if share < 1e-9 or first == second:
        return float(ordered[first])
    if math.isinf(ordered[second]):
        return math.inf
    return float(ordered[first] + share * (ordered[second] - ordered[first]))


def _pooled_figure(values: Floats, weights: Weights, p: float, draws: Floats, unit: str) -> Figure:
    total, floor = int(weights.sum()), early_stopping_floor(p)
    if total < floor:
        return Absent(f"{label(p)} needs {floor:,} samples, there are {total:,}")
    point = weighted_quantile(values, np.cumsum(weights, dtype=np.float64), total, p)
    if math.isinf(point):
        share = weights[np.isinf(values)].sum() / total
        return Absent(
            f"{share:.1%} of the tokens never came (their requests failed): {label(p)} lies among them"
        )
    if not len(draws):
        return Estimate(point, None, None, None, total, unit, f"an interval needs {MIN_GROUPS} requests")
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
    if math.isinf(high):
        return Estimate(
            point, float(low), None, LEVEL, total, unit, "the upper bound lies among failed requests"
        )
    return Estimate(point, float(low), float(high), LEVEL, total, unit, "bootstrap over requests")
