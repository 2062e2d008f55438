"""The highest load at which all SLOs hold: which loads to probe, for how long, and what may be claimed.

Cheap probes find the limit roughly: doubling, then bisection where the shares of late requests say it is.
Only fresh probes of the two ends count: the lower must hold the SLOs, the upper, at most a tenth higher (or
two users), must not. At a pair of loads only one of these claims can be false, so attempt j may err with its
whole share of the stated error, and the shares of all attempts add up to it.

A probe whose run may not decide (`lost`) is repeated, until MOST_LOST in a row may not.

Within a probe the share of requests beyond each bound is looked at again and again, always at GROWTH times as
many requests, until it is decided. All looks together keep the probe's error (Pocock's constant boundary,
Biometrika 64 (1977), simulated for this spacing). Requests that share a queue depend on each other: they
count as their effective number (`serial_correlation`). A warm-up is left out, a load whose latency still
rises does not pass, and a queue that grows by more than a critical one would is a failure, however early the
requests still were.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from scipy import special

from burstline.measure.stats.estimates import Floats
from burstline.measure.stats.figure import Result
from burstline.measure.stats.quantiles import Samples, quantile_of
from burstline.measure.stats.serial_correlation import (
    MOST_COSINES,
    N_BATCHES,
    OrderedSamples,
    mann_kendall,
    outgrown,
    size_at,
    warm_up_end,
)

STEP: Final = 1.1
"""How far the load that fails may lie above the load that holds."""
GROWTH: Final = 1.5
SCOUT_ERROR, SCOUT_LOOKS, CLAIM_LOOKS = 0.1, 7, 20
NEAR: Final = 1.25
"""Within this ratio the shares say better than a bisection where the limit is."""
HOPELESS: Final = STEP**0.45
"""A claim about a load that is nearer to the limit than this takes too long."""
TYPICAL, PRIOR = 10.0, 1 / 36
"""The slope of a share's log odds in log load before anything is known, and the inverse of its variance."""
ATTEMPTS: Final = 8
DRIFT: Final = 0.05
"""A rise of the latency that chance brings less often lets no load pass that may still come to miss."""
MOST_STEPS: Final = 20
MOST_LOST: Final = 3
"""So many probes in a row that may not decide end a search: the next would not either."""
LONELY: Final = 0.2
"""With so few requests in flight on average, a lower rate is no easier."""


class Purpose(StrEnum):
    SCOUT = "find the limit roughly"
    HOLDS = "confirm that it holds"
    MISSES = "confirm that it does not hold"


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """At most 1 - `p` of all requests may have a latency above `most`; `text` is the SLO."""

    text: str
    p: float
    most: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Bring probe `number` at `load` to `n` requests; a number that is new begins a fresh probe.

    It may come to want `n_most` requests. With a `look` the probe ends: the evidence then says whether its
    run may decide this.
    """

    number: int
    load: float
    n: int
    n_most: int
    look: ProbeLook | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The requests of a probe that have ended, up to the first that has not, in the order they were due.

    `latencies` are those of each bound: +inf for a failure, NaN where a request has none. `in_flight` is how
    many requests each one found in an open loop; None in a closed loop. `over`: no more will come. `lost` is
    the verdict for which the run may not decide what was asked.
    """

    latencies: tuple[Floats, ...]
    in_flight: Floats | None
    over: bool = False
    lost: str = ""


@dataclass(frozen=True, slots=True)
class LateShare:
    """Of a bound: the share of `n` requests (0: unknown) beyond it, with the information of `n_effective`."""

    beyond: float
    n_effective: float
    n: int = 0


@dataclass(frozen=True, slots=True)
class ProbeLook:
    """What a look at `n` requests says: each bound's share, and whether the queue outgrew the server.

    `change` is by how much the latency of one bound rose or fell over the probe; 0 if that may be chance.
    """

    judged: Result
    n: int = 0
    shares: tuple[LateShare, ...] = ()
    overloaded: bool = False
    in_flight: float = 0.0
    change: float = 0.0


def leaning(look: ProbeLook, bounds: Sequence[LatencyBound]) -> Result:
    """What was judged; else what the shares look like, as far as there are any."""
    if look.judged != Result.INCONCLUSIVE or not look.shares:
        return look.judged
    late = any(s.beyond > 1 - b.p for s, b in zip(look.shares, bounds, strict=True))
    return Result.FAIL if late else Result.PASS


@dataclass(slots=True)
class LoadProbe:
    """A load that was probed; `last` is the latest look at it. If it is `lost`, for the verdict that this
    names, it decides nothing.
    """

    number: int
    load: float
    purpose: Purpose
    last: ProbeLook = field(default_factory=lambda: ProbeLook(Result.INCONCLUSIVE))
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The limit lies between `low`, which holds all SLOs, and `high`, which does not; None where not claimed.

    `high` is claimed last, or alone where not even the least load holds the SLOs. `more_requests` is about
    how many more would settle it by the probe `nearest` to the limit, None where it is settled or too many
    probes were lost. `best` is where the limit seems to be.
    """

    low: float | None
    high: float | None
    error: float
    probes: tuple[LoadProbe, ...]
    bounds: tuple[LatencyBound, ...]
    best: float | None = None
    more_requests: int | None = None
    nearest: int | None = None

    @property
    def is_lost(self) -> bool:
        return self.high is None and _are_lost(self.probes)

    @property
    def none_holds(self) -> bool:
        return self.low is None and self.high is not None

    @property
    def none_seems(self) -> bool:
        """Whether every load that was probed seems to miss an SLO, the lowest one among them."""
        looks = [probe.last for probe in self.probes if probe.last.shares]
        return bool(looks) and all(leaning(look, self.bounds) == Result.FAIL for look in looks)

    @property
    def worst(self) -> LatencyBound:
        """The SLO that the least load probed misses most: its share beyond against what is allowed."""
        shares = min((probe for probe in self.probes if probe.last.shares), key=lambda p: p.load).last.shares
        pairs = zip(self.bounds, shares, strict=True)
        return max(pairs, key=lambda pair: pair[1].beyond / (1 - pair[0].p))[0]


def _are_lost(probes: Sequence[LoadProbe]) -> bool:
    return len(probes) >= MOST_LOST and all(probe.lost for probe in probes[-MOST_LOST:])


@cache
def critical_tail(error: float, n_looks: int) -> float:
    """The one-sided level of each look at which all of them together err so often."""
    draw = np.random.default_rng(20_261_126).standard_normal((100_000, n_looks))
    size = GROWTH ** np.arange(n_looks)
    walk = np.cumsum(draw * np.sqrt(np.diff(size, prepend=0.0)), axis=1) / np.sqrt(size)
    return float(special.ndtr(-np.quantile(walk.max(axis=1), 1 - error)))


def judge(
    evidence: Evidence, bounds: Sequence[LatencyBound], tail: float, concurrency: int | None = None
) -> ProbeLook:
    """What the requests so far decide at the one-sided level `tail`, in `concurrency` slots if given.

    A load passes if every bound does, and fails if one does, or its queue outgrows the server.
    """
    n = len(evidence.latencies[0])
    in_flight = float(concurrency or 0)
    if evidence.in_flight is not None and n:
        in_flight = float(evidence.in_flight.mean())
    if n < 2 * N_BATCHES:
        return ProbeLook(Result.INCONCLUSIVE, n, in_flight=in_flight)
    fail_tail = tail / (len(bounds) + (evidence.in_flight is not None))
    overloaded = evidence.in_flight is not None and outgrown(evidence.in_flight, fail_tail)
    skip = min(max(n // 10, math.ceil(2 * in_flight)), n // 2)
    shares, passes, fails, rising, change = [], [], [overloaded], False, 0.0
    for bound, latencies in zip(bounds, evidence.latencies, strict=True):
        logs = np.log(np.clip(latencies[~np.isnan(latencies)], 1e-6, 1e6))
        cut = warm_up_end(logs)
        kept = latencies[max(skip, n // 2 if cut is None else cut) :]
        n_cosines = None if concurrency is None else min(MOST_COSINES, max(2, len(kept) // concurrency))
        share = _share(kept, bound, n_cosines)
        batches = np.array([part.mean() for part in np.array_split(logs[-len(kept) :], N_BATCHES)])
        trend = mann_kendall(batches)
        rises = trend is not None and trend[0] > 0 and trend[1] < DRIFT
        whole = np.array([part.mean() for part in np.array_split(logs[min(skip, n // 10) :], N_BATCHES)])
        drift = mann_kendall(whole)
        drifts = drift is not None and drift[1] < DRIFT
        change = max(change, math.expm1(_rise(whole)) if drifts else 0.0, key=abs)
        rising |= cut is None or (rises and (concurrency is None or _would_miss(kept, bound, batches)))
        shares.append(share)
        late, size = share.beyond * share.n_effective, share.n_effective
        passes.append(_at_most(late, size, 1 - bound.p) < tail)
        fails.append(_at_least(late, size, 1 - bound.p) < fail_tail)
    judged = Result.FAIL if any(fails) else Result.PASS if all(passes) and not rising else Result.INCONCLUSIVE
    return ProbeLook(judged, n, tuple(shares), overloaded, in_flight, change)


def _rise(log_batches: Floats) -> float:
    """How far the logarithm of the latency rises over the batches, by least squares."""
    place = np.arange(N_BATCHES) - (N_BATCHES - 1) / 2
    return float((place * log_batches).sum() / (place**2).sum()) * N_BATCHES


def _would_miss(latencies: Floats, bound: LatencyBound, log_batches: Floats) -> bool:
    """Whether one more such rise of the latency would take it past the bound.

    In a closed loop, where no queue can grow for ever, a smaller one is the drift of a machine.
    """
    last = quantile_of(latencies[-max(1, len(latencies) // 4) :], bound.p)
    return bool(last * math.exp(_rise(log_batches)) > bound.most)


def _share(latencies: Floats, bound: LatencyBound, n_cosines: int | None) -> LateShare:
    samples = Samples.per_request(latencies)
    if not len(samples.value):
        return LateShare(0.0, 0.0)
    ordered = OrderedSamples.of(samples, np.arange(len(latencies), dtype=np.float64), n_cosines)
    beyond = float((samples.value > bound.most).mean())
    # Those beyond the bound depend on each other. Where they are few or nearly all, less rare ones stand for
    # them: a crowd or two says little about how often crowds come.
    rarest = min(max(1 - beyond, 0.5), bound.p, 0.9)
    return LateShare(beyond, size_at(ordered, rarest), len(samples.value))


def _at_most(k: float, n: float, share: float) -> float:
    """How often at most k of n are late where `share` of all are; k and n need not be whole."""
    return float(special.betainc(n - k, k + 1, 1 - share)) if k < n else 1.0


def _at_least(k: float, n: float, share: float) -> float:
    return float(special.betainc(k, n - k + 1, share)) if k > 0 else 1.0


class _SpentError(Exception):
    """The budget is spent."""


def search(
    bounds: Sequence[LatencyBound], start: float, *, users: bool = False, error: float = 0.05
) -> Generator[Ask, Evidence | None, Found]:
    """Ask for requests at loads until the limit is known; send None where there is no time for more.

    Loads are rates, or whole numbers of `users` at a time. `error` is the chance that a claim of the result
    is false.
    """
    state = _Search(tuple(bounds), users, error)
    try:
        yield from state.scout(start)
        yield from state.confirm()
    except _SpentError:
        pass
    return state.found()


class _Crossing(NamedTuple):
    """Where the limit seems to be, by bound `k`: the standard error of its logarithm, and how fast the log
    odds of the share beyond grow with the load's logarithm there."""

    limit: float
    error: float
    slope: float
    k: int


class _Search:
    def __init__(self, bounds: tuple[LatencyBound, ...], users: bool, error: float) -> None:
        self._bounds, self._users, self._error = bounds, users, error
        self._probes: list[LoadProbe] = []
        self._low: float | None = None
        self._high: float | None = None

    def _probe(
        self, load: float, purpose: Purpose, error: float
    ) -> Generator[Ask, Evidence | None, LoadProbe]:
        """The probe; again and again while its run may not decide."""
        while (probe := (yield from self._once(load, purpose, error))).lost:
            if _are_lost(self._probes):
                raise _SpentError
        return probe

    def _once(
        self, load: float, purpose: Purpose, error: float
    ) -> Generator[Ask, Evidence | None, LoadProbe]:
        probe = LoadProbe(len(self._probes) + 1, load, purpose)
        n_looks, n_late = (SCOUT_LOOKS, 5) if purpose == Purpose.SCOUT else (CLAIM_LOOKS, 20)
        concurrency = round(load) if self._users else None
        n = max(64.0, 12.0 * (concurrency or 0), *(n_late / (1 - bound.p) for bound in self._bounds))
        tail = critical_tail(error, n_looks)
        n_most = math.ceil(n * GROWTH ** (n_looks - 1))
        for k in range(n_looks):
            evidence = yield Ask(probe.number, load, math.ceil(n), n_most)
            if evidence is None:
                raise _SpentError
            if not probe.last.n:
                self._probes.append(probe)
            probe.last = judge(evidence, self._bounds, tail, concurrency)
            is_decided = probe.last.judged != Result.INCONCLUSIVE
            if is_decided or evidence.over or (k >= 3 and self._is_hopeless(probe)):
                break
            n *= GROWTH
        evidence = yield Ask(probe.number, load, probe.last.n, n_most, probe.last)
        if evidence is None:
            raise _SpentError
        if evidence.lost:
            probe.lost, probe.last = evidence.lost, replace(probe.last, judged=Result.INCONCLUSIVE, shares=())
        return probe

    def _is_hopeless(self, probe: LoadProbe) -> bool:
        """Whether a claim's load seems to be too near to the limit, or beyond it."""
        seems = self._crossing()
        ahead = math.log(seems.limit / probe.load) * (1 if probe.purpose == Purpose.HOLDS else -1)
        return probe.purpose != Purpose.SCOUT and ahead + seems.error < math.log(HOPELESS)

    def scout(self, load: float) -> Generator[Ask, Evidence | None, None]:
        """Double or halve the load until one seems to hold and one does not; then close in down to NEAR."""
        for _ in range(MOST_STEPS):
            probe = yield from self._probe(load, Purpose.SCOUT, SCOUT_ERROR)
            low, high = self._bracket()
            if high is None:
                load *= 2
            elif low is None:
                if load <= 1 if self._users else 0 < probe.last.in_flight < LONELY:
                    if not self._claims:  # else part of the error is spent
                        probe = yield from self._probe(load, Purpose.MISSES, self._error)
                        self._high = load if probe.last.judged == Result.FAIL else None
                    return
                load = self._whole(load / 2)
            else:
                if high / low <= NEAR or (self._users and high - low <= 1):
                    return
                inside = (high / low) ** 0.25
                load = self._whole(min(max(self._crossing().limit, low * inside), high / inside))
                load = low + 1 if load in (low, high) else load

    def confirm(self) -> Generator[Ask, Evidence | None, None]:
        """Claim both ends of an interval around the limit by fresh probes."""
        for attempt in range(1, ATTEMPTS + 1):
            if attempt > 1 and None in self._bracket():  # a claim says that scouts erred
                yield from self.scout(self._crossing().limit)
            if None in self._bracket():
                return
            error = math.ldexp(self._error, -attempt)
            low, high = self._ends()
            if self._low != low:
                probe = yield from self._probe(low, Purpose.HOLDS, error)
                if probe.last.judged != Result.PASS:
                    continue
                self._low = low
            probe = yield from self._probe(high, Purpose.MISSES, error)
            if probe.last.judged == Result.FAIL:
                self._high = high
                return

    def _ends(self) -> tuple[float, float]:
        """The two loads to claim next; one that was claimed stays, unless the limit is far above it."""
        limit = self._crossing().limit
        low, high = limit / math.sqrt(STEP), limit * math.sqrt(STEP)
        if self._low is not None and self._low * STEP > limit * HOPELESS:
            low, high = self._low, self._low * STEP
        return (max(1.0, low // 1), high // 1 + 1) if self._users else (low, high)

    def _whole(self, load: float) -> float:
        return max(1.0, round(load, 0)) if self._users else load

    @property
    def _claims(self) -> list[LoadProbe]:
        return [probe for probe in self._probes if probe.purpose != Purpose.SCOUT]

    def _bracket(self) -> tuple[float | None, float | None]:
        """The highest load that seems to hold below the lowest that does not, and that one."""
        sure = max((probe.load for probe in self._claims if probe.last.judged == Result.PASS), default=0.0)
        fails = [probe.load for probe in self._probes if leaning(probe.last, self._bounds) == Result.FAIL]
        high = min((load for load in fails if load > sure), default=None)
        holds = [probe.load for probe in self._probes if leaning(probe.last, self._bounds) == Result.PASS]
        low = max((load for load in holds if high is None or load < high), default=None)
        return low, high

    def _crossing(self) -> _Crossing:
        """Where the limit seems to be: the lowest load at which a bound's share is as allowed."""
        low, high = self._bracket()
        if low is None or high is None:  # a claim that is not hopeless
            return _Crossing(low or high or 1.0, math.inf, TYPICAL, 0)
        seen = [probe.last.shares for probe in self._probes if probe.last.shares]
        known = [k for k in range(len(self._bounds)) if any(shares[k].n_effective for shares in seen)]
        return min(self._crossing_of(k, low, high) for k in known)

    def _crossing_of(self, k: int, low: float, high: float) -> _Crossing:
        """Where bound k's share crosses what is allowed, by all probes near there."""
        centre, allowed = math.log(low * high) / 2, special.logit(1 - self._bounds[k].p)
        known = [(probe, probe.last.shares[k]) for probe in self._probes if probe.last.shares]
        x = np.log([probe.load for probe, _ in known])
        size = np.array([share.n_effective for _, share in known])
        late = size * [1.0 if probe.last.overloaded else share.beyond for probe, share in known]
        odds = np.log((late + 0.5) / (size - late + 0.5)) - allowed
        share = (late + 0.5) / (size + 1)
        reach = max(math.log(high / low), 0.1)
        weight = size * share * (1 - share) * np.exp(-(((x - centre) / reach) ** 2))
        middle, level = np.average(x, weights=weight), np.average(odds, weights=weight)
        power = float((weight * (x - middle) ** 2).sum()) + PRIOR
        both = float((weight * (x - middle) * (odds - level)).sum()) + PRIOR * TYPICAL
        slope = max(both / power, TYPICAL / 4)
        # Beyond the bracket only as far as chance may have closed it on the wrong side.
        room = math.log(STEP) / 2
        at = float(np.clip(middle - level / slope, math.log(low) - room, math.log(high) + room))
        error = math.sqrt(1 / float(weight.sum()) + (at - middle) ** 2 / power) / slope
        return _Crossing(math.exp(at), error, slope, k)

    def found(self) -> Found:
        best = None if None in self._bracket() else self._crossing().limit
        is_open = self._high is None and not _are_lost(self._probes)
        more, nearest = self._missing() if is_open else (None, None)
        probes = tuple(self._probes)
        return Found(self._low, self._high, self._error, probes, self._bounds, best, more, nearest)

    def _missing(self) -> tuple[int, int | None]:
        """About how many requests both claims, as far as they are open, still take, and by which probe."""
        known = [probe for probe in self._probes if probe.last.shares]
        if not known or None in self._bracket():
            return 4 * max(sum(probe.last.n for probe in self._probes), 1000), None
        seems = self._crossing()
        near = min(known, key=lambda probe: abs(math.log(probe.load / seems.limit)))
        each = max(near.last.shares[seems.k].n_effective, 1.0) / near.last.n
        z = 0.84 - special.ndtri(critical_tail(self._error / 2, CLAIM_LOOKS))  # found in four of five
        odds = seems.slope * math.log(STEP) / 2
        p = self._bounds[seems.k].p
        n_open = 2 if self._low is None else 1
        return math.ceil(n_open * (z / odds) ** 2 / (p * (1 - p)) / each), near.number
