"""Two single runs of one plan held against each other, request by request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from loadgen.record.columns import Floats, Ints
from loadgen.stats.blocks import block_length
from loadgen.stats.estimates import Absent, early_stopping_floor, label
from loadgen.stats.serial_correlation import LEAST_BLOCKS, LONGER
from loadgen.stats.significance import Difference

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
    draws = _resampled(a, b, block, enough, rng)
    for p, point, drawn in zip(enough, _log_ratios(a[None], b[None], enough)[0], draws.T, strict=True):
        found[p] = _difference(float(point), drawn, n, n / block)
    return found


def _resampled(a: Floats, b: Floats, block: int, ps: Sequence[float], rng: np.random.Generator) -> Floats:
    """One row of log ratios a draw, a few draws at a time: so many requests would not fit into memory."""
    n = len(a)
    n_draws, at_once = int(np.clip(5_000_000 // n, 200, N_DRAWS)), max(1, 500_000 // n)
    parts = []
    for k in range(0, n_draws, at_once):
        drawn = moving_blocks(n, block, min(at_once, n_draws - k), rng)
        parts.append(_log_ratios(a[drawn], b[drawn], ps))
    return np.concatenate(parts)


def _block(a: Floats, b: Floats) -> int:
    """How many neighbours stay together: as the ratios of the pairs depend on each other, failures apart."""
    both = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)
    n = len(a)
    longest = max(1, n // LEAST_BLOCKS)
    return min(LONGER * block_length(np.log(b[both] / a[both])), longest) if both.any() else longest


def _log_ratios(a: Floats, b: Floats, ps: Sequence[float]) -> Floats:
    """log(quantile of b / quantile of a) of each row and each of `ps`; NaN among failures and for 0."""
    below, above = (_quantiles(rows, ps) for rows in (a, b))
    known = (below > 0) & (above > 0) & np.isfinite(below) & np.isfinite(above)
    ratios = np.full(known.shape, np.nan)
    ratios[known] = np.log(above[known] / below[known])
    return ratios


def _quantiles(rows: Floats, ps: Sequence[float]) -> Floats:
    """Of each row, by linear interpolation as numpy's; +inf where the next rank up is a failure."""
    at = (rows.shape[1] - 1) * np.array(ps)
    low, high = np.floor(at).astype(int), np.ceil(at).astype(int)
    parted = np.partition(rows, np.unique([low, high]), axis=1)
    first, second = parted[:, low], parted[:, high]
    share = np.broadcast_to(at - low, first.shape)
    between = np.isfinite(second) & (share > 0)
    found = np.where(np.isfinite(second) | (share == 0), first, np.inf)
    found[between] += share[between] * (second[between] - first[between])
    return found


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
