"""Two runs of the same plan held against each other: is one faster, are they the same, or can nobody tell?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as sps

from loadgen.columns import Floats, Ints
from loadgen.stats import LEVEL, Absent, Estimate, interval

MARGIN = 0.03
N_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio` is b over a. `p` is two-sided, for no difference; `equivalent`: within the margin, by TOST.

    `detectable` is the relative difference that a comparison of this size finds four times out of five.
    """

    ratio: Estimate
    p: float
    equivalent: bool
    detectable: float


def compare_means(
    a: Floats, b: Floats, block: int, rng: np.random.Generator, margin: float = MARGIN
) -> Comparison | Absent:
    """The ratio of two means, pair by pair (the same request, or the same block of time, under both).

    Moving blocks of `block` successive pairs are resampled together, so that neighbours stay neighbours.
    Equivalence is that the 90 % interval lies within 1/(1 + margin) .. 1 + margin (Schuirmann 1987).
    """
    both = np.isfinite(a) & np.isfinite(b)
    n = int(both.sum())
    if n < 2 * block or n < 8:
        return Absent(f"a comparison needs 8 pairs and two blocks of {block}, there are {n} pairs")
    a, b = a[both], b[both]
    if a.min() <= 0 or b.min() <= 0:
        return Absent("a ratio needs values above 0")
    drawn = moving_blocks(n, block, N_DRAWS, rng)
    logs = np.log(b[drawn].mean(axis=1) / a[drawn].mean(axis=1))
    point = math.log(b.mean() / a.mean())
    error = float(logs.std(ddof=1))
    low, high = (math.exp(bound) for bound in interval(logs))
    inner_low, inner_high = interval(logs, 0.90)
    bound = math.log1p(margin)
    return Comparison(
        ratio=Estimate(math.exp(point), low, high, LEVEL, n, "1", f"moving blocks of {block} pairs"),
        p=float(2 * sps.norm.sf(abs(point) / error)) if error else float(point == 0),
        equivalent=-bound < inner_low and inner_high < bound,
        detectable=math.expm1((sps.norm.ppf(0.975) + sps.norm.ppf(0.8)) * error),
    )


def moving_blocks(n: int, block: int, n_draws: int, rng: np.random.Generator) -> Ints:
    """Indices of `n_draws` resampled series of length n, each made of random runs of `block` neighbours."""
    n_blocks = -(-n // block)
    starts = rng.integers(0, n - block + 1, (n_draws, n_blocks, 1))
    return (starts + np.arange(block)).reshape(n_draws, -1)[:, :n]


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for there being several (Holm 1979), in their own order."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    raised = np.maximum.accumulate(np.asarray(p_values, dtype=float)[order] * factors)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(raised, 1.0)
    return [float(p) for p in adjusted]


def survival(times_s: Floats, ended: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[Floats, Floats]:
    """When requests end, where some still ran when we stopped looking (Kaplan and Meier 1958).

    `times_s` is how long each was seen, `ended` whether it ended then. Returns the moments of ends,
    ascending, and the share that still ran after each.
    """
    moments, ends = np.unique(times_s[ended], return_counts=True)
    at_risk = len(times_s) - np.searchsorted(np.sort(times_s), moments, side="left")
    return moments, np.cumprod(1 - ends / at_risk, dtype=np.float64)
