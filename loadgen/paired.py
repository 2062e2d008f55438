"""Two single runs of one plan held against each other, request by request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from loadgen.blocks import block_length
from loadgen.columns import Floats, Ints
from loadgen.contrast import Difference
from loadgen.dependent import LEAST_BLOCKS, LONGER
from loadgen.stats import Absent, early_stopping_floor, label

N_DRAWS: Final = 1000


def paired_percentiles(
    a: Floats, b: Floats, ps: Sequence[float], rng: np.random.Generator
) -> dict[float, Difference | Absent]:
    """The percentiles `ps` of b over those of a; request k of both is the same, in the order of time.

    +inf is a failed request, NaN in either leaves the pair out. Runs of neighbouring pairs are resampled
    together: what makes a request long makes it long in both, what slows a server slows neighbours.
    """
    known = ~(np.isnan(a) | np.isnan(b))
    a, b = a[known], b[known]
    n = len(a)
    enough = [p for p in ps if n >= early_stopping_floor(p)]
    found: dict[float, Difference | Absent] = {
        p: Absent(f"{label(p)} needs {early_stopping_floor(p):,} pairs of requests, there are {n:,}")
        for p in ps
    }
    if not enough:
        return found
    block = _block(a, b)
    draws = np.array([_log_ratios(a[k], b[k], enough) for k in moving_blocks(n, block, _n_draws(n), rng)])
    for p, point, drawn in zip(enough, _log_ratios(a, b, enough), draws.T, strict=True):
        found[p] = _difference(point, drawn, n, n / block)
    return found


def _block(a: Floats, b: Floats) -> int:
    """How many neighbours stay together: as the ratios of the pairs depend on each other, failures apart."""
    both = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)
    n = len(a)
    longest = max(1, n // LEAST_BLOCKS)
    return min(LONGER * block_length(np.log(b[both] / a[both])), longest) if both.any() else longest


def _n_draws(n: int) -> int:
    return int(np.clip(5_000_000 // n, 200, N_DRAWS))


def _log_ratios(a: Floats, b: Floats, ps: Sequence[float]) -> list[float]:
    """log(quantile of b / quantile of a) for each of `ps`; NaN where either lies among failures or is 0."""
    ratios = []
    for p in ps:
        low, high = (_quantile(values, p) for values in (a, b))
        known = 0 < low < math.inf and 0 < high < math.inf
        ratios.append(math.log(high / low) if known else math.nan)
    return ratios


def _quantile(values: Floats, p: float) -> float:
    """Linear interpolation as numpy's; +inf where the next rank up is a failure."""
    at = (len(values) - 1) * p
    below, above = math.floor(at), math.ceil(at)
    parted = np.partition(values, [below, above])
    low, high = float(parted[below]), float(parted[above])
    return low if low == high else low + (at - below) * (high - low)


def _difference(point: float, drawn: Floats, n: int, n_blocks: float) -> Difference | Absent:
    if not math.isfinite(point) or not np.isfinite(drawn).all():
        return Absent("so many requests failed, which count as infinitely late, that it may lie among them")
    error = float(drawn.std(ddof=1)) * math.sqrt(n_blocks / (n_blocks - 1))
    note = f"one run each, {n:,} pairs of requests: how far runs of one system lie apart is not known"
    return Difference(point, error, n_blocks - 1, None, (1, 1), n, note)


def moving_blocks(n: int, block: int, n_draws: int, rng: np.random.Generator) -> Ints:
    """Indices of `n_draws` resampled series of length n, each made of random runs of `block` neighbours."""
    n_blocks = -(-n // block)
    starts = rng.integers(0, n - block + 1, (n_draws, n_blocks, 1))
    return (starts + np.arange(block)).reshape(n_draws, -1)[:, :n]
