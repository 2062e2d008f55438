"""The distributions and rank statistics that intervals need, under scipy.stats' names and with its numbers.

By the ufuncs of scipy.special alone: importing scipy.stats would take as long as all else that a report
computes, and scipy.special itself brings variants for other array libraries, numpy.f2py and numpy.testing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def _ufuncs() -> Any:
    """The ufuncs of scipy.special without the rest of it, which can still be imported later."""
    name = "scipy.special"
    if name not in sys.modules:
        bare = ModuleType(name)
        bare.__path__ = [f"{folder}/special" for folder in scipy.__path__]
        sys.modules[name] = bare
        try:
            ufuncs = importlib.import_module(f"{name}._ufuncs")
            if all(hasattr(ufuncs, each) for each in _NEEDED):
                return ufuncs
        except ImportError:
            pass  # this scipy keeps them elsewhere
        finally:
            # A later import of all of it begins anew, and then has its own attributes.
            # The copy: another thread may import something meanwhile.
            for each in [each for each in list(sys.modules) if each == name or each.startswith(f"{name}.")]:
                del sys.modules[each]
    return importlib.import_module(name)


_NEEDED: Final = ("bdtrik", "betainc", "betaincc", "betaincinv", "ndtr", "ndtri", "stdtr", "stdtrit")
special = _ufuncs()


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
