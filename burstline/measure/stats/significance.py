"""Two systems compared in several numbers: different, the same, or inconclusive.

Everything is on the scale of logarithms, where a ratio is a difference. The error is how far runs of one
system scatter: servers are restarted between runs, and one run does not show how another start would do.

A candidate and its baseline are compared again after each run until it is decided. A first answer by chance
counts as much as a last one, so the level of each look is lower than that of the whole test. Student's t does
not depend on the unknown noise: its path over the looks is simulated once for the test's shape, and the level
of a look is read off there. Source: group-sequential tests with equal levels (Pocock 1977), for t (Jennison &
Turnbull 1999, 4.4).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from burstline.measure.stats.estimates import LEVEL, Absent, Estimate, Floats, students_t
from burstline.measure.stats.quantiles import LEAST_RUNS

MARGIN: Final = 0.03
"""Systems that differ by less are the same for a person who chooses between them."""
LEAST_PAIRS: Final = 5
"""With fewer repeats pairing costs more degrees of freedom than it wins."""
POWER: Final = 0.8
MOST_RUNS: Final = 100


class Answer(StrEnum):
    DIFFERENT = "different"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Difference:
    """log(b / a): `point` with its standard `error` and Student's `freedom` for it.

    `error` is None where one run each says nothing of how far runs scatter. `noise` is the standard deviation
    between runs of one system. `n_runs` and `note` say what it rests on.
    """

    point: float
    error: float | None
    freedom: float
    noise: float | None
    n_runs: tuple[int, int]
    note: str

    @property
    def p(self) -> float:
        """Two-sided, for no difference; 1 where nothing is known of the error."""
        if self.error is None:
            return 1.0
        if not self.error:
            return 0.0 if self.point else 1.0
        return float(2 * special.stdtr(self.freedom, -abs(self.point) / self.error))

    def within(self, margin: float) -> bool:
        """Whether they are equivalent: the 90% interval lies within the margin (TOST, Schuirmann 1987)."""
        if self.error is None:
            return False
        reach = self.error * students_t(self.freedom, 1 - LEVEL) if self.error else 0.0
        return abs(self.point) + reach < math.log1p(margin)


@dataclass(frozen=True, slots=True)
class Contrast:
    """The difference of b from a in one number.

    `ratio` is b over a, without an interval where nothing is known of the noise. Its interval and `p`, for no
    difference, are corrected for all numbers (Holm): what is DIFFERENT excludes 1, what is INCONCLUSIVE does
    not; what is the SAME has the 90% interval that says so. `detectable` is the relative difference that this
    comparison has 80% power to detect, `noise` the one that two runs of one system exceed once in twenty
    (A/A); both None where unknown. `more_runs` is how many more runs of each would decide (None where it is
    decided, or not even a hundred would).
    """

    answer: Answer
    ratio: Estimate
    p: float
    detectable: float | None
    noise: float | None
    more_runs: int | None


def between_runs(
    a: Floats, b: Floats, *, interleaved: bool = False, point: float | None = None
) -> Difference | Absent:
    """One number of each run, above 0; `interleaved`: run k of both were neighbours in time.

    `point` is the log ratio of the pooled numbers, where those are not the runs' geometric means. Welch's t,
    or pair by pair for five interleaved repeats and more. With fewer than three runs on a side both are taken
    to scatter alike (Student's t), which takes four runs in all.
    """
    n_runs = (len(a), len(b))
    if min(a.min(initial=1.0), b.min(initial=1.0)) <= 0:
        return Absent("a ratio needs values above 0")
    a, b = np.log(a), np.log(b)
    n = len(a) + len(b)
    point = float(b.mean() - a.mean()) if point is None else point
    if interleaved and n_runs[0] == n_runs[1] >= LEAST_PAIRS:
        spread = float((b - a).std(ddof=1))
        note = f"{len(a)} pairs of runs that were neighbours in time"
        error = spread / math.sqrt(len(a))
        return Difference(point, error, len(a) - 1, spread / math.sqrt(2), n_runs, note)
    note = f"{len(a)} and {len(b)} runs"
    if min(n_runs) >= LEAST_RUNS:
        parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
        error = math.sqrt(sum(parts))
        below = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
        freedom = sum(parts) ** 2 / below if below else n - 2
        return Difference(point, error, freedom, pooled_spread([a, b]), n_runs, note)
    if n < LEAST_RUNS + 1:
        return Difference(point, None, n - 1, None, n_runs, f"{note}: the noise between runs is unknown")
    spread = pooled_spread([a, b])
    error = spread * math.sqrt(1 / len(a) + 1 / len(b))
    return Difference(point, error, n - 2, spread, n_runs, f"{note}, assumed to scatter equally")


def pooled_spread(groups: Sequence[Floats]) -> float:
    """The standard deviation within groups that scatter alike."""
    freedom = sum(len(group) - 1 for group in groups)
    return math.sqrt(sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / freedom)


def judged(differences: Mapping[str, Difference | Absent]) -> dict[str, Contrast | Absent]:
    """Every number's contrast; any of several equal ones is called different once in twenty (Holm).

    Numbers that never vary are no matter of chance, and do not count among the several.
    """
    known = {name: each for name, each in differences.items() if isinstance(each, Difference)}
    uncertain = {name: each.p for name, each in known.items() if each.error}
    adjusted = dict(zip(uncertain, holm(list(uncertain.values())), strict=True))
    return {
        name: each
        if isinstance(each, Absent)
        else _judged(each, *adjusted.get(name, (each.p, LEVEL)), max(1, len(uncertain)))
        for name, each in differences.items()
    }


def _judged(difference: Difference, p: float, level: float, n_numbers: int) -> Contrast:
    error, freedom = difference.error, difference.freedom
    if difference.within(MARGIN):
        answer, level = Answer.SAME, 2 * LEVEL - 1
    else:
        answer = Answer.DIFFERENT if p < 1 - LEVEL else Answer.INCONCLUSIVE
    point, n = math.exp(difference.point), sum(difference.n_runs)
    if error:  # a zero-width interval would claim a certainty that readings without noise do not have
        reach = math.exp(students_t(freedom, (1 - level) / 2) * error)
        ratio = Estimate(point, point / reach, point * reach, level, n, "1", difference.note)
    else:
        ratio = Estimate(point, None, None, None, n, "1", difference.note)
    detects = None if error is None else math.expm1(min(float(_reach(freedom, n_numbers)) * error, 50.0))
    noise = difference.noise
    return Contrast(
        answer=answer,
        ratio=ratio,
        p=p,
        detectable=detects,
        noise=None if noise is None else math.expm1(students_t(freedom) * noise * math.sqrt(2)),
        more_runs=_more_runs(difference, n_numbers) if answer == Answer.INCONCLUSIVE else None,
    )


def _reach(freedom: NDArray[np.floating[Any]] | float, n_numbers: int) -> Floats:
    """How many standard errors make a difference that Holm's first step detects with 80% power."""
    alpha = (1 - LEVEL) / n_numbers
    return np.asarray(special.stdtrit(freedom, 1 - alpha / 2) + special.stdtrit(freedom, POWER))


def _more_runs(difference: Difference, n_numbers: int) -> int | None:
    """How many more runs of each would decide with 80% power, were the difference what it seems."""
    fewest = min(difference.n_runs)
    if difference.noise is None:
        return LEAST_RUNS - fewest
    runs = np.arange(max(fewest + 1, LEAST_RUNS), MOST_RUNS + 1)
    error, freedom = difference.noise * np.sqrt(2 / runs), 2.0 * runs - 2
    different = abs(difference.point) >= _reach(freedom, n_numbers) * error
    room = math.log1p(MARGIN) - abs(difference.point)
    same = room >= (special.stdtrit(freedom, LEVEL) + special.stdtrit(freedom, (1 + POWER) / 2)) * error
    enough = runs[different | same]
    return int(enough[0]) - fewest if len(enough) else None


def holm(p_values: Sequence[float]) -> list[tuple[float, float]]:
    """Each p-value adjusted for their number (Holm 1979), and the level at which its interval says the same.

    The k-th smallest of m values is tested at alpha / (m - k + 1), all behind the first that fails at its.
    """
    adjusted, most, left = [(1.0, LEVEL)] * len(p_values), 0.0, len(p_values)
    for rank, k in enumerate(np.argsort(p_values, kind="stable")):
        most = max(most, min(float(p_values[k]) * (len(p_values) - rank), 1.0))
        adjusted[k] = most, 1 - (1 - LEVEL) / left
        left -= most < 1 - LEVEL
    return adjusted


FALSE_ALARMS: Final = 1 - LEVEL
"""How often equal contenders are called different, and one that is off by the margin is called the same."""
LEAST_SERIES: Final = 5
"""So many runs of a series come before the first that is judged."""
LASTING: Final = 3
"""A change in a series is looked for in the mean of so many runs."""
_N_PATHS: Final = 20_000
_SMOOTHING: Final = (0.0, 0.2, 0.5, 0.9)
"""How much of a run's surprise its successors are expected to keep: 0 for a machine without drift."""


def _looks(values: Floats, stored: Floats) -> tuple[Floats, Floats, Floats]:
    """The mean of `values` against that of `stored`, which is 0 and certain where nothing is stored.

    With its standard error and Student's freedom, after each value along the last axis. Both scatter alike.
    """
    n, m = np.arange(1.0, values.shape[-1] + 1), stored.shape[-1]
    mean = np.cumsum(values, -1) / n
    squares = np.maximum(np.cumsum(values**2, -1) - n * mean**2, 0.0)
    freedom = n - 1
    if m:
        level = stored.mean(-1, keepdims=True)
        mean, freedom = mean - level, freedom + m - 1
        squares = squares + ((stored - level) ** 2).sum(-1, keepdims=True)
    variance = squares / np.maximum(freedom, 1.0)
    return mean, np.sqrt(variance * (1 / n + (1 / m if m else 0.0))), freedom


@cache
def _level_of_a_look(most: int, n_stored: int, alarms: float) -> float:
    """The two-sided level of each look at which one or more of all looks alarm with probability `alarms`."""
    draw = np.random.default_rng(20_261_126)
    values, stored = (draw.standard_normal((_N_PATHS, n)) for n in (most, n_stored))
    mean, error, freedom = _looks(values, stored)
    seen = freedom >= LEAST_RUNS - 1
    t = np.abs(mean[:, seen] / error[:, seen])
    return float(np.quantile(2 * special.stdtr(freedom[seen], -t).min(axis=1), alarms))


@dataclass(frozen=True, slots=True)
class Look:
    """What is known after some runs: the candidate over the baseline, and what that decides.

    The interval of `ratio` holds the truth at all looks together with probability 1 - FALSE_ALARMS, corrected
    for the `n_numbers` that are judged; it has no ends before there are enough runs.
    """

    answer: Answer
    ratio: Estimate


def look(values: Floats, stored: Floats, *, margin: float, most: int, n_numbers: int = 1) -> Look:
    """Judge log ratios of pairs of runs, or logarithms of a candidate's runs against `stored` ones.

    `margin` is the relative difference that is still the same, `most` how many values there can be. DIFFERENT
    excludes a ratio of 1, SAME a ratio beyond the margin to either side.
    """
    n, m = len(values), len(stored)
    mean, error, freedom = (float(each[-1]) for each in _looks(values, stored))
    pairs = f"{n} pair{'s' * (n > 1)} of runs that were neighbours in time"
    note = f"{m} stored and {n} new runs" if m else pairs
    if freedom < LEAST_RUNS - 1:
        return Look(Answer.INCONCLUSIVE, Estimate(math.exp(mean), None, None, None, n, "1", note))
    wide, narrow = (
        error * students_t(freedom, _level_of_a_look(most, m, alarms) / 2)
        for alarms in (FALSE_ALARMS / n_numbers, 2 * FALSE_ALARMS)
    )
    return _answered(mean, narrow, wide, margin, n, note)


def _answered(mean: float, narrow: float, wide: float, margin: float, n: int, note: str) -> Look:
    """What a mean of logarithms decides that is `narrow` to be the same, `wide` to be different."""
    answer = Answer.INCONCLUSIVE
    if abs(mean) + narrow < math.log1p(margin):
        answer = Answer.SAME
    elif abs(mean) > wide:
        answer = Answer.DIFFERENT
    ends = (math.exp(mean - wide), math.exp(mean + wide))
    return Look(answer, Estimate(math.exp(mean), *ends, LEVEL, n, "1", note))


def series(values: Floats, *, margin: float, n_numbers: int, lower_is_better: bool) -> list[Look | None]:
    """Judge each of a series of runs, logarithms in the order of time, by the good ones before it.

    A run stands for itself and the next ones, as far as they are there: a change lasts. One that is DIFFERENT
    is no good one; LEAST_SERIES better ones in a row are a new level, so that what was gained can be lost.
    None for the first few. The level follows a drift by exponential smoothing, as strongly as
    forecasts the good runs best; the noise is how far these forecasts were off, so what the machine drifts
    from run to run is part of it. A series without a change has a run that is called DIFFERENT with
    probability FALSE_ALARMS at most, in any of the `n_numbers` that are judged.
    """
    n_judged = n_numbers * max(1, len(values) - LEAST_SERIES)
    good: list[float] = []
    better: list[float] = []
    found: list[Look | None] = []
    for k, value in enumerate(values):
        judged = _against(np.array(good), values[k : k + LASTING], margin, n_judged)
        found.append(judged)
        if judged is None or judged.answer != Answer.DIFFERENT:
            good.append(float(value))
            better = []
        elif (judged.ratio.point < 1) == lower_is_better:
            better.append(float(value))
            if len(better) == LEAST_SERIES:
                good, better = better, []
    return found


def _against(good: Floats, values: Floats, margin: float, n_judged: int) -> Look | None:
    if len(good) < LEAST_SERIES:
        return None
    forecasts = (_forecast(good, each) for each in _SMOOTHING)
    _, level, error, noise = min(forecasts, key=lambda each: each[0])
    error = noise * math.hypot(error, 1.0)  # of one run: what drifts is no better known by several
    freedom = len(good) - 2  # the level and its smoothing
    mean = float(values.mean()) - level
    narrow, wide = (error * students_t(freedom, each) for each in (FALSE_ALARMS, FALSE_ALARMS / n_judged / 2))
    found = _answered(mean, narrow, wide, margin, len(good), f"{len(good)} runs before it")
    if found.answer == Answer.DIFFERENT and (values[0] - level) / mean <= 0.5:  # the next run is off
        return replace(found, answer=Answer.INCONCLUSIVE)
    return found


def _forecast(good: Floats, smoothing: float) -> tuple[float, float, float, float]:
    """Forecast each value by those before it; without smoothing by their mean.

    The sum of the squared misses, the next value's level, its error in units of the runs' noise, and that.
    """
    level, error, missed, squares = float(good[0]), 1.0, 0.0, 0.0
    for k, value in enumerate(good[1:], 2):
        off, gain = float(value) - level, max(smoothing, 1 / k)
        missed, squares = missed + off**2, squares + off**2 / (1 + error**2)
        level, error = level + gain * off, math.hypot((1 - gain) * error, gain)
    return missed, level, error, math.sqrt(squares / (len(good) - 2))
