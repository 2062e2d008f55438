"""Is a candidate as fast as its baseline, asked again after each run until it is decided; and series of runs.

Everything is on the scale of logarithms. A first answer by chance counts as much as a last one, so the level
of each look is lower than that of the whole test. Student's t does not depend on the unknown noise: its
path over the looks is simulated once for the test's shape, and the level of a look is read off there.
Source: group-sequential tests with equal levels (Pocock 1977), for t (Jennison & Turnbull 1999, 4.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
from scipy import special

from burstline.measure.stats.across_runs import LEAST_RUNS
from burstline.measure.stats.estimates import LEVEL, Estimate, Floats, students_t
from burstline.measure.stats.significance import Answer

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


def series(
    values: Floats, *, margin: float, n_numbers: int = 1, lower_is_better: bool = True
) -> list[Look | None]:
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
