"""Stationarity of a series: where its warm-up ends (MSER-5), and whether the rest drifts or takes a step."""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import numpy as np
from scipy import special

from burstline.measure.stats.estimates import Floats, students_t

BATCH = 5
LEAST_KEPT = 5
LATE_GAIN = 0.25
WORTH_A_CUT = 0.7
"""A cut that lowers the error by less is left: to choose the start by what came out is a bias itself."""


def warm_up_end(series: Floats) -> int | None:
    """How many leading values to drop (MSER-5), at most half; None where the series settles only after that.

    The cut minimises the squared standard error of what is kept, over means of five. White, "An effective
    truncation heuristic for bias reduction in simulation output", Simulation 69 (1997). A stretch near the
    end that happens to be calm also lowers that error, so a cut past the middle counts only if it lowers it
    to a quarter and leaves a tenth of the series.
    """
    means = series[: len(series) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    n = len(means)
    if n < 4:
        return None
    kept = np.arange(n, 0, -1)
    # Sums over the tail that begins at each place.
    sums, squares = (np.cumsum(values[::-1])[::-1] for values in (means, means**2))
    errors = np.maximum(squares - sums**2 / kept, 0) / kept**2
    cut = int(np.argmin(errors[: n // 2 + 1]))
    if errors[cut] > WORTH_A_CUT * errors[0]:
        cut = 0
    last = n - max(LEAST_KEPT, math.ceil(n / 10))
    late = errors[n // 2 + 1 : last]
    return None if len(late) and late.min() < LATE_GAIN * errors[cut] else cut * BATCH


def mann_kendall(series: Floats) -> tuple[float, float] | None:
    """Kendall's correlation with time (-1..1), and the chance of one as strong without a trend.

    None for fewer than 8 values.

    The variance grows by what the significant autocorrelations of the ranks explain: Hamed and Rao, "A
    modified Mann-Kendall trend test for autocorrelated data", Journal of Hydrology 204 (1998). On short
    series it helps but in part: with 60 values of autocorrelation 0.6, one in five is called a trend at 5%.
    """
    n = len(series)
    if n < 8:
        return None
    later, earlier = np.tril_indices(n, -1)
    score = float(np.sign(series[later] - series[earlier]).sum())
    _, ties = np.unique(series, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    variance *= _variance_inflation(series)
    if variance <= 0:
        return 0.0, 1.0
    z = (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0
    return score / (n * (n - 1) / 2), float(2 * special.ndtr(-abs(z)))


def _variance_inflation(series: Floats) -> float:
    n = len(series)
    slope = theil_slope(series)
    ranks = rankdata(series - slope * np.arange(n))
    ranks -= ranks.mean()
    power = float((ranks**2).sum())
    if power == 0:
        return 1.0
    lags = np.arange(1, n - 1)
    rho = np.array([(ranks[lag:] * ranks[:-lag]).sum() for lag in lags]) / power
    significant = np.abs(rho) > special.ndtri(0.975) / math.sqrt(n)
    weights = (n - lags) * (n - lags - 1.0) * (n - lags - 2.0)
    # Never below 1: the correction is here to call fewer things a trend, not more.
    return max(1.0, 1 + 2 / (n * (n - 1) * (n - 2)) * float((weights * rho)[significant].sum()))


def outgrown(in_flight: Floats, tail: float) -> bool:
    """Whether more are in flight than a server just at its capacity would leave from an empty start.

    There the queue is a random walk that cannot fall below 0, whose end exceeds z standard deviations of the
    walk at most twice as often as a normal variable does. Below capacity it does so less often.
    """
    ends = in_flight[np.linspace(0, len(in_flight) - 1, N_BATCHES + 1).astype(int)]
    steps = np.diff(ends)
    spread = float(steps.std(ddof=1)) * math.sqrt(N_BATCHES)
    return bool(ends[-1] > max(students_t(N_BATCHES - 1, tail / 2) * spread, 4.0))


def theil_slope(series: Floats) -> float:
    """The median of the slopes between all pairs of points, their places 1 apart (Theil 1950)."""
    later, earlier = np.tril_indices(len(series), -1)
    return float(np.median((series[later] - series[earlier]) / (later - earlier)))


N_BATCHES: Final = 16
COSINES: Final = 8
MOST_COSINES: Final = 6
"""Of these the error of a mean is made: faster ones know less of slow changes."""
LEAST_COSINES: Final = 4
STEPS: Final = tuple(k / 10 for k in range(1, 10))
N_DRAWN: Final = 20_000
BATCHES: Final = 100
CLEAR: Final = 2.5
"""Errors of a correlation of independent values: what is above is hardly chance."""


def cosines(series: Floats, n: int) -> Floats:
    """The coefficients of `n` slow cosines, of 1 to `n` half turns over the series.

    Where neighbours depend on each other for much less than a half turn, these are independent and normal,
    and each has the variance of the series' mean times its length (Müller, "A theory of robust long-run
    variance estimation", Journal of Econometrics 141 (2007)).
    """
    turns = np.outer(np.arange(1, n + 1), (np.arange(len(series)) + 0.5) * np.pi / len(series))
    return np.asarray((np.cos(turns) * series).sum(axis=1)) * math.sqrt(2 / len(series))


def correlation_length(series: Floats) -> float:
    """Over what share of a series its neighbours stay alike: until their correlation falls by a factor e.

    Of the means of a hundred batches, from the first lag on, so that what each value has for itself counts
    for nothing. 0 where the first correlation may be chance.
    """
    n = min(BATCHES, len(series) // 3)
    if n < 8 or not np.ptp(series):
        return 0.0
    means = np.array([batch.mean() for batch in np.array_split(series, n)])
    means -= means.mean()
    covariance = np.array([(means[lag:] * means[: n - lag]).sum() for lag in range(n)])
    correlation = covariance / covariance[0]
    if correlation[1] < CLEAR / math.sqrt(n):
        return 0.0
    target = float(correlation[1]) / math.e
    lag = int(np.argmax(correlation < target))
    before, after = float(correlation[lag - 1]), float(correlation[lag])
    return (lag - 2 + (before - target) / (before - after)) / n


def shift(series: Floats, n_blocks: float) -> tuple[float | None, float, float] | None:
    """A series' likeliest step, at this share of it, or its straight drift if that is likelier (None).

    With it the change from start to end, and the chance of one as clear in a series that has neither. Values
    depend on each other within each of so many blocks.

    The change stands out from what is left of the slow cosines without it; None for too short a series.
    """
    n = min(COSINES, int(n_blocks))
    if n < LEAST_COSINES or not np.ptp(series):
        return None
    found = cosines(series, n)
    sizes, clear = _fits(found[None])
    k = int(np.argmax(clear))
    p = (1 + float((_by_chance(n) >= clear[0, k]).sum())) / (1 + N_DRAWN)
    return (None, *STEPS)[k], float(sizes[0, k]) / math.sqrt(len(series)), p


def _fits(found: Floats) -> tuple[Floats, Floats]:
    """By row of coefficients and shape (a drift, the steps): the size of the best fit, and Fisher's F."""
    j = np.arange(1, found.shape[1] + 1)
    drift = ((-1.0) ** j - 1) / (np.pi * j) ** 2
    shapes = math.sqrt(2) * np.vstack([drift, *(-np.sin(np.pi * j * at) / (np.pi * j) for at in STEPS)])
    lengths = np.sqrt((shapes**2).sum(axis=1))
    along = (found[:, None] * shapes).sum(axis=2) / lengths
    rest = np.maximum((found**2).sum(axis=1, keepdims=True) - along**2, 1e-300)
    return along / lengths, along**2 / rest * (found.shape[1] - 1)


@cache
def _by_chance(n: int) -> Floats:
    """The largest F of series of which nothing changes."""
    drawn = np.random.default_rng(20_261_128).standard_normal((N_DRAWN, n))
    return np.asarray(_fits(drawn)[1].max(axis=1))


def rankdata(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[place]
    return ranks
