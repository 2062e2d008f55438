"""Two systems compared in several numbers: different, the same, or inconclusive.

Everything is on the scale of logarithms, where a ratio is a difference. The error is how far runs of one
system scatter: servers are restarted between runs, and one run does not show how another start would do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from burstline.measure.stats.across_runs import LEAST_RUNS
from burstline.measure.stats.estimates import LEVEL, Absent, Estimate, Floats, students_t

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
    between runs of one system. `n` and `note` say what it rests on.
    """

    point: float
    error: float | None
    freedom: float
    noise: float | None
    n_runs: tuple[int, int]
    n: int
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
        return Difference(point, error, len(a) - 1, spread / math.sqrt(2), n_runs, n, note)
    note = f"{len(a)} and {len(b)} runs"
    if min(n_runs) >= LEAST_RUNS:
        parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
        error = math.sqrt(sum(parts))
        below = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
        freedom = sum(parts) ** 2 / below if below else n - 2
        return Difference(point, error, freedom, pooled_spread([a, b]), n_runs, n, note)
    if n < LEAST_RUNS + 1:
        return Difference(point, None, n - 1, None, n_runs, n, f"{note}: the noise between runs is unknown")
    spread = pooled_spread([a, b])
    error = spread * math.sqrt(1 / len(a) + 1 / len(b))
    return Difference(point, error, n - 2, spread, n_runs, n, f"{note}, assumed to scatter equally")


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
    levels = dict(zip(uncertain, _holm_levels(list(uncertain.values())), strict=True))
    return {
        name: each
        if isinstance(each, Absent)
        else _judged(each, adjusted.get(name, each.p), levels.get(name, LEVEL), max(1, len(uncertain)))
        for name, each in differences.items()
    }


def _holm_levels(p_values: Sequence[float]) -> list[float]:
    """The level of each number's interval, at which it excludes 0 just where Holm calls it different.

    The k-th smallest of m values is tested at alpha / (m - k + 1), all behind the first that fails at its.
    """
    order = np.argsort(p_values, kind="stable")
    levels, left, is_open = [0.0] * len(p_values), len(p_values), True
    for k in order:
        alpha = (1 - LEVEL) / left
        levels[k] = 1 - alpha
        is_open = is_open and p_values[k] < alpha
        left -= is_open
    return levels


def _judged(difference: Difference, p: float, level: float, n_numbers: int) -> Contrast:
    error, freedom = difference.error, difference.freedom
    if difference.within(MARGIN):
        answer, level = Answer.SAME, 2 * LEVEL - 1
    else:
        answer = Answer.DIFFERENT if p < 1 - LEVEL else Answer.INCONCLUSIVE
    point = math.exp(difference.point)
    if error:  # a zero-width interval would claim a certainty that readings without noise do not have
        reach = math.exp(students_t(freedom, (1 - level) / 2) * error)
        ratio = Estimate(point, point / reach, point * reach, level, difference.n, "1", difference.note)
    else:
        ratio = Estimate(point, None, None, None, difference.n, "1", difference.note)
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


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number (Holm 1979), in their own order."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    raised = np.maximum.accumulate(np.asarray(p_values, dtype=float)[order] * factors)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(raised, 1.0)
    return [float(p) for p in adjusted]
