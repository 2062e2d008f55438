"""One system held against another in several numbers: are they different, the same, or can nobody tell?

Everything is on the scale of logarithms, where a ratio is a difference. What governs is how far runs of one
system lie apart, for servers are restarted between runs and no run knows what another start would have given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats as sps

from loadgen.record.columns import Floats
from loadgen.stats.estimates import LEVEL, Absent, Estimate

MARGIN: Final = 0.03
"""Systems that differ by less are the same for all who choose between them."""
ASSUMED_NOISE: Final = 0.10
"""How far apart two runs of one system may lie where no repeat says it: an assumption, and shown as one."""
LEAST_RUNS: Final = 3
LEAST_PAIRS: Final = 5
"""Of fewer repeats pairing costs more freedom than it wins, unless neighbours in time agree by far."""
POWER: Final = 0.8
MOST_RUNS: Final = 100


class Answer(StrEnum):
    DIFFERENT = "different"
    SAME = "same"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Difference:
    """log(b / a): `point` with its standard `error` and Student's `freedom` for it.

    `noise` is the standard deviation between runs of one system, None where nothing repeats; then two runs
    of one system may differ by `allowance` and prove nothing. `n` and `note` say what it rests on.
    """

    point: float
    error: float
    freedom: float
    noise: float | None
    n_runs: tuple[int, int]
    n: int
    note: str

    @property
    def allowance(self) -> float:
        return math.log1p(ASSUMED_NOISE) if self.noise is None else 0.0

    @property
    def p(self) -> float:
        """Two-sided, for the systems differing by no more than the allowance."""
        beyond = abs(self.point) - self.allowance
        if beyond <= 0:
            return 1.0
        return float(2 * sps.t.sf(beyond / self.error, self.freedom)) if self.error else 0.0

    def within(self, margin: float) -> bool:
        """Whether they are equivalent: the 90 % interval lies within the margin (TOST, Schuirmann 1987)."""
        reach = self.error * float(sps.t.ppf(LEVEL, self.freedom))
        return self.noise is not None and abs(self.point) + reach < math.log1p(margin)


@dataclass(frozen=True, slots=True)
class Contrast:
    """What can be said of b against a in one number.

    `ratio` is b over a, `p` for no difference after Holm over all numbers. `detectable` is the relative
    difference that such a comparison finds four times out of five, `noise` the one that two runs of one
    system exceed once in twenty (A/A; None where nothing repeats), `more_runs` how many more of each would
    tell (at least, where nothing repeats; None where it is told, or where not even a hundred would).
    """

    answer: Answer
    ratio: Estimate
    p: float
    detectable: float
    noise: float | None
    more_runs: int | None


def between_runs(a: Floats, b: Floats, *, interleaved: bool = False) -> Difference | Absent:
    """One number of each run, above 0; `interleaved`: run k of both were neighbours in time.

    Welch's t, or pair by pair for five interleaved repeats and more. With fewer than three runs on a side
    both are taken to scatter alike (Student's t), which takes four runs in all.
    """
    n_runs = (len(a), len(b))
    if min(a.min(initial=1.0), b.min(initial=1.0)) <= 0:
        return Absent("a ratio needs values above 0")
    a, b = np.log(a), np.log(b)
    point, n = float(b.mean() - a.mean()), len(a) + len(b)
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
        return Absent(f"{len(a)} and {len(b)} runs do not say how far runs of one system lie apart")
    spread = pooled_spread([a, b])
    error = spread * math.sqrt(1 / len(a) + 1 / len(b))
    return Difference(point, error, n - 2, spread, n_runs, n, f"{note}, taken to scatter alike")


def between_estimates(a: Estimate, b: Estimate) -> Difference | Absent:
    """One run each, by their own 95 % intervals, taken to err independently."""
    ends = (a.low, a.high, b.low, b.high)
    if any(end is None or end <= 0 for end in ends):
        return Absent("one run each, and a number without an interval")
    errors = [
        math.log(x.high / x.low) / (2 * sps.norm.ppf((1 + LEVEL) / 2)) for x in (a, b) if x.high and x.low
    ]
    note = "one run each: how far runs of one system lie apart is not known"
    n = min(a.n, b.n)
    return Difference(math.log(b.point / a.point), math.hypot(*errors), math.inf, None, (1, 1), n, note)


def pooled_spread(groups: Sequence[Floats]) -> float:
    """The standard deviation within groups that scatter alike."""
    freedom = sum(len(group) - 1 for group in groups)
    return math.sqrt(sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / freedom)


def judged(differences: Mapping[str, Difference | Absent]) -> dict[str, Contrast | Absent]:
    """Every number's contrast; that any of equal ones is called different happens once in twenty (Holm).

    Readings that never vary are no matter of chance, and none of the several.
    """
    known = {name: each for name, each in differences.items() if isinstance(each, Difference)}
    uncertain = {name: each.p for name, each in known.items() if each.error}
    adjusted = dict(zip(uncertain, holm(list(uncertain.values())), strict=True))
    return {
        name: each
        if isinstance(each, Absent)
        else _judged(each, adjusted.get(name, each.p), max(1, len(uncertain)))
        for name, each in differences.items()
    }


def _judged(found: Difference, p: float, n_numbers: int) -> Contrast:
    if found.within(MARGIN):
        answer = Answer.SAME
    else:
        answer = Answer.DIFFERENT if p < 1 - LEVEL else Answer.CANNOT_TELL
    reach = float(sps.t.ppf((1 + LEVEL) / 2, found.freedom)) * found.error
    low, high = math.exp(found.point - reach), math.exp(found.point + reach)
    finds = found.allowance + float(_reach(found.freedom, n_numbers)) * found.error
    return Contrast(
        answer=answer,
        ratio=Estimate(math.exp(found.point), low, high, LEVEL, found.n, "1", found.note),
        p=p,
        detectable=math.expm1(min(finds, 50.0)),
        noise=None if found.noise is None else _noise_floor(found.noise, found.freedom),
        more_runs=_more_runs(found, n_numbers) if answer == Answer.CANNOT_TELL else None,
    )


def _noise_floor(spread: float, freedom: float) -> float:
    """The relative difference that two runs of one system exceed once in twenty."""
    return math.expm1(float(sps.t.ppf((1 + LEVEL) / 2, freedom)) * spread * math.sqrt(2))


def _reach(freedom: NDArray[np.floating[Any]] | float, n_numbers: int) -> Floats:
    """How many standard errors make a difference that Holm's first step finds four times out of five."""
    alpha = (1 - LEVEL) / n_numbers
    return np.asarray(sps.t.ppf(1 - alpha / 2, freedom) + sps.t.ppf(POWER, freedom))


def _more_runs(found: Difference, n_numbers: int) -> int | None:
    """How many more runs of each would tell four times out of five, were the difference what it seems."""
    fewest = min(found.n_runs)
    if found.noise is None:
        return LEAST_RUNS - fewest
    runs = np.arange(max(fewest + 1, LEAST_RUNS), MOST_RUNS + 1)
    error, freedom = found.noise * np.sqrt(2 / runs), 2.0 * runs - 2
    different = abs(found.point) >= _reach(freedom, n_numbers) * error
    room = math.log1p(MARGIN) - abs(found.point)
    same = room >= (sps.t.ppf(LEVEL, freedom) + sps.t.ppf((1 + POWER) / 2, freedom)) * error
    enough = runs[different | same]
    return int(enough[0]) - fewest if len(enough) else None


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for there being several (Holm 1979), in their own order."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    raised = np.maximum.accumulate(np.asarray(p_values, dtype=float)[order] * factors)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(raised, 1.0)
    return [float(p) for p in adjusted]
