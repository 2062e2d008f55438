"""Intervals of shares: one of a number of trials, and the difference of two in the same trials."""

from __future__ import annotations

import math

from scipy import special

from burstline.measure.stats.estimates import LEVEL, Estimate


def clopper_pearson(k: float, n: float) -> tuple[float, float]:
    """The exact binomial interval of a share, for numbers that need not be whole."""
    low = float(special.betaincinv(k, n - k + 1, (1 - LEVEL) / 2)) if k > 0 else 0.0
    return low, float(special.betaincinv(k + 1, n - k, (1 + LEVEL) / 2)) if k < n else 1.0


def share_of(k: int, n: int) -> Estimate:
    return Estimate(k / n, *clopper_pearson(k, n), LEVEL, n, "1", "exact binomial interval")


def paired_excess(n: int, first: int, second: int, both: int) -> Estimate:
    """The share of n trials in which one thing happened, minus the share in which another did.

    Of the trials in `first` and in `second`, `both` are the same. The interval is exact where the second
    never happened: it is that of the first. Otherwise it is Newcombe's for pairs (Statistics in Medicine 17,
    1998, p. 2635, method 10).
    """
    if not second:
        return share_of(first, n)
    p, q, z2 = first / n, second / n, float(special.ndtri((1 + LEVEL) / 2)) ** 2

    def wilson(k: int, sign: int) -> float:
        """An end of the score interval."""
        return (k + z2 / 2 + sign * math.sqrt(z2 * (k * (n - k) / n + z2 / 4))) / (n + z2)

    excess = both * (n - first - second + both) - (first - both) * (second - both)
    margins = first * (n - first) * second * (n - second)
    # Corrected for continuity where the two tend to happen together.
    phi = (max(excess - n / 2, 0) if excess > 0 else excess) / math.sqrt(margins) if margins else 0.0

    def reach(sign: int) -> float:
        a, b = wilson(first, sign) - p, q - wilson(second, -sign)
        return sign * math.sqrt(a**2 - 2 * phi * a * b + b**2)

    note = "Newcombe's interval for pairs"
    return Estimate(p - q, p - q + reach(-1), p - q + reach(1), LEVEL, n, "1", note)
