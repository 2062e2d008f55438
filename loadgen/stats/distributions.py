"""The distributions and rank statistics that intervals need, under scipy.stats' names and with its numbers.

By the ufuncs of scipy.special: importing scipy.stats would take as long as all else that a report computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantile, distribution and survival function; the arguments after the first are its parameters."""

    ppf: Callable[..., Any]
    cdf: Callable[..., Any]
    sf: Callable[..., Any]


def _binom_cdf(k: Any, n: Any, p: Any) -> Any:
    k, n = np.asarray(k), np.asarray(n)
    return np.where(k < n, special.betaincc(k + 1, np.maximum(n - k, 1), p), 1.0)


def _binom_ppf(q: Any, n: Any, p: Any) -> Any:
    """The least k whose cdf is at least q."""
    k = np.clip(np.ceil(special.bdtrik(q, n, p)), 0, n)
    # bdtrik inverts to rounding error: k may be one too many or too few.
    k = np.where(_binom_cdf(k, n, p) < q, k + 1, k)
    before = np.maximum(k - 1, 0)
    return np.where(_binom_cdf(before, n, p) >= q, before, k)


norm: Final = Distribution(special.ndtri, special.ndtr, lambda x: special.ndtr(-x))
t: Final = Distribution(
    lambda q, freedom: special.stdtrit(freedom, q),
    lambda x, freedom: special.stdtr(freedom, x),
    lambda x, freedom: special.stdtr(freedom, -x),
)
beta: Final = Distribution(
    lambda q, a, b: special.betaincinv(a, b, q),
    lambda x, a, b: special.betainc(a, b, x),
    lambda x, a, b: special.betaincc(a, b, x),
)
binom: Final = Distribution(_binom_ppf, _binom_cdf, lambda k, n, p: special.betainc(k + 1, n - k, p))


def theil_slope(series: Floats) -> float:
    """The median of the slopes between all pairs of points, their places 1 apart (Theil 1950)."""
    later, earlier = np.tril_indices(len(series), -1)
    return float(np.median((series[later] - series[earlier]) / (later - earlier)))


def rankdata(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[place]
    return ranks
