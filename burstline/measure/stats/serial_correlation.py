"""Series whose neighbours depend on each other, as the requests of an open or closed loop do.

Where the warm-up of a series ends (MSER-5), whether the rest drifts or takes a step, and intervals within
one run.

The error of a mean or a share comes from blocks of neighbours in time (overlapping batch means: Meketon and
Schmeiser, Winter Simulation Conference 1984), with Student's t for the number of blocks. A block is
`LENGTHENED` times the one that estimates the variance best, and there are `LEAST_BLOCKS` at least: shorter
ones miss the rare long waits that make a queue's mean. In a closed loop no queue builds up, but all are as
fast as the server is then: the error comes from the slowest cosines, which know the slow changes (Lazarus,
Lewis, Stock and Watson, "HAR inference", Journal of Business & Economic Statistics 36 (2018)). Coverage is
simulated in tests/measure (open loops: M/M/1 from empty; closed loops: 8 and 64 at a time).
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from scipy import special

from burstline.measure.stats.estimates import (
    LEVEL,
    Absent,
    Estimate,
    Figure,
    Floats,
    Ints,
    clopper_pearson,
    early_stopping_bound,
    label,
    students_t,
)
from burstline.measure.stats.quantiles import Samples

LENGTHENED: Final = 5
LEAST_BLOCKS: Final = 3
SCARCEST: Final = 1000.0
"""By how much scarcer than the values above a percentile those above its interval may be."""
BELOW: Final = (0.5, 0.9, 0.95)
"""A percentile has no more information than those below it: the values above a p99 came in a crowd or two,
which say little about how often crowds come."""

SHORT: Final = 1000
"""At 80% load the intervals of 260 requests cover 72 to 91%: such a run has not seen how long waits get."""
OPEN: Final = "no upper bound"
NARROW: Final = f"the intervals of fewer than {SHORT:,} correlated values are often too narrow"
CROWD: Final = 0.1
"""In simulated queues this share of the requests, and any less, come in crowds alike."""


@dataclass(frozen=True, slots=True, eq=False)
class OrderedSamples:
    """Samples, +inf for a failure, of requests whose `order` in time is known; `weights` are theirs in it.

    In a closed loop `n_cosines` say how far their means may be off; None in an open loop.
    """

    samples: Samples
    order: Ints
    weights: Floats
    n_cosines: int | None = None
    sizes: dict[float, float] = field(default_factory=dict)
    """By percentile the effective sample size, once it is known."""

    @classmethod
    def of(cls, samples: Samples, at_s: Floats, n_cosines: int | None = None) -> Self:
        """Order the requests of `samples` by `at_s`, one time a request."""
        order = np.argsort(at_s, kind="stable")
        return cls(samples, order, samples.by_request(samples.weight)[order], n_cosines)

    def sums(self, amount: NDArray[Any]) -> Floats:
        return np.asarray(self.samples.by_request(amount * self.samples.weight)[self.order])


def mean_in_order(mean: Figure, samples: OrderedSamples) -> Figure:
    """The mean with an interval that allows for serial correlation.

    It is symmetrical in the mean's reciprocal: a mean wait goes as 1 / (1 - load), so near saturation the
    reciprocal has the symmetrical error. No upper bound where the error is as large as the mean.
    """
    if isinstance(mean, Absent):
        return mean
    weights = samples.weights
    residuals = (samples.sums(samples.samples.value) - mean.point * weights) / weights.mean()
    error, freedom = _error_of_requests(residuals, samples.n_cosines)
    half = students_t(freedom) * error
    n_independent = float(residuals.var()) / error**2 if error else math.inf
    note = _effective(len(weights), n_independent, samples.n_cosines)
    mean = replace(mean, level=LEVEL, note=note)
    if mean.point <= 0:
        return replace(mean, low=mean.point - half, high=mean.point + half)
    share = half / mean.point
    if share >= 1:
        return replace(mean, low=mean.point / (1 + share), high=None, note=f"{note}, so there is {OPEN}")
    return replace(mean, low=mean.point / (1 + share), high=mean.point / (1 - share))


def percentile_in_order(percentile: Figure, samples: OrderedSamples, p: float) -> Figure:
    """The percentile `p` with the interval of as many independent samples as these have information.

    Clopper and Pearson's interval for the share below, read as order statistics; above the largest value as
    an exponential tail, the limit of all light ones (Pickands 1975). Open upwards only where failures lie
    there, or where the tail would be a guess: then the note says how much longer the run must be. All are
    times, so that nothing lies below 0.
    """
    if isinstance(percentile, Absent):
        return percentile
    n_effective = effective_size(samples, p)
    low_share, high_share = clopper_pearson(p * n_effective, n_effective)
    ranked = samples.samples.ranked
    total = ranked.total
    low_rank, high_rank = math.floor(low_share * total), math.ceil(high_share * total) + 1
    low = ranked.at(low_rank - 0.5) if low_rank >= 1 else min(0.0, float(ranked.value[0]))
    note = _effective(len(samples.order), n_effective, samples.n_cosines)
    if high_rank <= total:
        high = ranked.at(high_rank - 0.5)
    elif _scarcer(p, n_effective) <= SCARCEST:
        reach = math.log(_scarcer(p, n_effective)) * ranked.excess(percentile.point)
        high = max(ranked.value[-1], percentile.point + reach)
    else:
        high = math.inf
    if math.isinf(high):
        note = f"{note}, so {label(p)} has {OPEN}"
    if math.isinf(high) and math.isfinite(ranked.value[-1]):
        times = next((k for k in range(2, 1000) if _scarcer(p, k * n_effective) <= SCARCEST), 1000)
        note = f"{note}; run {times} times as long"
    high_s = None if math.isinf(high) else float(high)
    return replace(percentile, low=low, high=high_s, level=LEVEL, note=note)


def _scarcer(p: float, n: float) -> float:
    """How many times as many of `n` independent values may lie above `p` as above its interval."""
    return (1 - p) / max(1 - clopper_pearson(p * n, n)[1], 1e-300)


def bound_in_order(samples: OrderedSamples, p: float, unit: str) -> Figure:
    """A value the true quantile stays below with 99% confidence, from the effective sample size."""
    value = samples.samples.value
    return early_stopping_bound(value, p, unit, effective_size(samples, p) if len(value) else 0.0)


def share_in_order(missed: OrderedSamples) -> Figure:
    """The share of requests whose value is at most 1, with an interval that allows for their order.

    The others come in crowds. A crowd or two say little about how often crowds come, and none say nothing:
    where less than a tenth is beyond 1, the highest tenth of the values must not say more.
    """
    n, value = len(missed.order), missed.samples.value
    if not n:
        return Absent("nothing was planned")
    share = float((value <= 1).mean())
    n_effective = _effective_at(missed, 1.0)
    if (rest := 1 - share) < CROWD or share < CROWD:
        n_effective = min(n_effective, size_at(missed, 1 - CROWD if rest < CROWD else CROWD))
    low, high = clopper_pearson(share * n_effective, n_effective)
    return Estimate(share, low, high, LEVEL, n, "1", _effective(n, n_effective))


def rate_interval(sums: Floats, weights: Floats, least_block: int) -> tuple[float, float] | None:
    """The 95% interval of sum(sums) / sum(weights) over bins of time; None where blocks are too few.

    On the scale of logarithms where the rate is above 0. `least_block` is in bins.
    """
    if len(sums) < LEAST_BLOCKS * least_block:
        return None
    point = float(sums.sum() / weights.sum())
    residuals = np.asarray((sums - point * weights) / weights.mean(), dtype=np.float64)
    error, freedom = standard_error(residuals, least_block)
    half = students_t(freedom) * error
    if point <= 0 or half >= point:
        return 0.0, point + half
    reach = math.exp(half / point)
    return point / reach, point * reach


def ratio_interval(amounts: Floats, stays: Floats, n_cosines: int) -> tuple[float, float]:
    """By which factors a closed loop's rate may be off, 95%.

    A loop that is kept full has as many requests in flight at any time, so that its rate is known as well as
    sum(amounts) / sum(stays) over its requests, in the order of their dispatch. In blocks of time the counts
    of slots that are independent scatter more than over a long time.
    """
    if not amounts.mean() > 0:
        return 1.0, 1.0
    ratio = float(amounts.sum() / stays.sum())
    residuals = np.asarray((amounts - ratio * stays) / amounts.mean(), dtype=np.float64)
    error, freedom = _error_of_requests(residuals, n_cosines)
    reach = math.exp(students_t(freedom) * error)
    return 1 / reach, reach


def effective_size(samples: OrderedSamples, p: float) -> float:
    """How many independent samples would say as much of the percentile `p`."""
    upto = (*(q for q in BELOW if q < p), p)
    samples.sizes.update({q: size_at(samples, q) for q in upto if q not in samples.sizes})
    return min(samples.sizes[q] for q in upto)


def size_at(samples: OrderedSamples, p: float) -> float:
    """How many independent samples would give the share above the percentile `p` its error."""
    ranked = samples.samples.ranked
    return _effective_at(samples, ranked.at(p * ranked.total))


def _effective_at(samples: OrderedSamples, most: float) -> float:
    total, weights = samples.samples.ranked.total, samples.weights
    below = samples.sums(samples.samples.value <= most)
    share = float(below.sum() / total)
    residuals = (below - share * weights) / weights.mean()
    error, freedom = _error_of_requests(residuals, samples.n_cosines)
    if not error:
        return total
    # Student's t is turned into fewer trials.
    widened = error * students_t(freedom) / float(special.ndtri((1 + LEVEL) / 2))
    return min(total, share * (1 - share) / widened**2)


def _error_of_requests(residuals: Floats, n_cosines: int | None) -> tuple[float, float]:
    """`standard_error` of one value a request; of a closed loop by so many cosines."""
    if n_cosines is None:
        return standard_error(residuals)
    variance = float((cosines(residuals, n_cosines) ** 2).mean()) / len(residuals)
    return math.sqrt(variance), float(n_cosines)


def standard_error(residuals: Floats, least_block: int = 1) -> tuple[float, float]:
    """The standard error of the mean of a series around 0, and Student's degrees of freedom for it."""
    n = len(residuals)
    block = max(1, min(max(LENGTHENED * block_length(residuals), least_block), n // LEAST_BLOCKS))
    if n <= block:
        return 0.0, 1.0
    total = np.concatenate([[0.0], np.cumsum(residuals)])
    means = (total[block:] - total[:-block]) / block
    variance = block * float((means**2).sum()) / ((n - block) * (n - block + 1))
    return math.sqrt(variance), n / block - 1


def block_length(series: Floats) -> int:
    """How many neighbours belong together: the block that estimates the mean's variance best.

    Politis and White, "Automatic block-length selection for the dependent bootstrap", Econometric Reviews 23
    (2004), section 3, with the moving blocks' D and the correction of Patton, Politis and White (2009).
    """
    n = len(series)
    if n < 2 or np.ptp(series) == 0:
        return 1
    # A power of two: a length with a large prime factor takes twenty times as long.
    size = 1 << (2 * n - 1).bit_length()
    power = np.abs(np.fft.rfft(series - series.mean(), size)) ** 2
    covariance = np.fft.irfft(power)[:n] / n
    reach = _reach(covariance / covariance[0], n)
    lags = np.abs(np.arange(-reach, reach + 1))
    flat_top = np.minimum(1.0, 2 * (1 - lags / reach)) * covariance[lags]
    spectrum, slope = float(flat_top.sum()), float((lags * flat_top).sum())
    if spectrum <= 0:
        return 1
    best = float(np.cbrt(1.5 * slope**2 / spectrum**2 * n))
    return max(1, math.ceil(min(best, 3 * math.sqrt(n), n / 3)))


def _reach(correlation: Floats, n: int) -> int:
    """Twice the lag after which no correlation is significant for a while, the paper's M."""
    n_quiet = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = min(math.ceil(math.sqrt(n)) + n_quiet, n - 1)
    quiet = np.abs(correlation[1 : most + 1]) < 2 * math.sqrt(math.log10(n) / n)
    last = next((lag for lag in range(most) if quiet[lag : lag + n_quiet].all()), most)
    return min(max(2 * last, 2), most)


def _effective(n: int, n_effective: float, n_cosines: int | None = None) -> str:
    note = f"1 run; {n:,} correlated values have an effective sample size of {min(n_effective, n):,.0f}"
    is_narrow = n_cosines is None and n < SHORT and n_effective < n / 10
    return f"{note} ({NARROW})" if is_narrow else note


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
    to a quarter and leaves a tenth of the series. What begins as it goes on has no warm-up but a spell.
    """
    means = series[: len(series) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    if (n := len(means)) < 4:
        return None
    kept = np.arange(n, 0, -1)
    # Sums over the tail that begins at each place.
    sums, squares = (np.cumsum(values[::-1])[::-1] for values in (means, means**2))
    errors = np.maximum(squares - sums**2 / kept, 0) / kept**2
    least = errors[cut := int(np.argmin(errors[: n // 2 + 1]))]
    is_spell = abs(np.median(means[: cut // 4 + 1]) - means[cut:].mean()) <= 2 * means[cut:].std()
    if is_spell or least > WORTH_A_CUT * errors[0]:
        cut = 0
    last = n - max(LEAST_KEPT, math.ceil(n / 10))
    late = errors[n // 2 + 1 : last]
    return None if len(late) and late.min() < LATE_GAIN * least else cut * BATCH


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
