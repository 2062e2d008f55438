"""Queues on a virtual clock whose highest load within an SLO is known in closed form."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize, special

from burstline.measure.stats.limit_search import Ask, Evidence, Found, LatencyBound, search
from tests.truth.queue import departures


@dataclass(frozen=True)
class System:
    """`beyond(load)` is the share of requests above the bound; mean services take 1 s.

    `draw(load, n, seed)` makes arrivals, departures and values.
    """

    name: str
    bound: LatencyBound
    capacity: float
    beyond: Callable[[float], float]
    draw: Callable[[float, int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]

    @cached_property  # M/D/c solves for thousands of states
    def limit(self) -> float:
        def above(load: float) -> float:
            return self.beyond(load) - (1 - self.bound.p)

        return float(optimize.brentq(above, 1e-3 * self.capacity, self.capacity * (1 - 1e-9), xtol=1e-9))


def erlang_c(c: int, load: float) -> float:
    """How often a request waits at c servers with mean services of 1 s."""
    blocked = 1.0
    for k in range(1, c + 1):
        blocked = load * blocked / (k + load * blocked)
    return blocked / (1 - load / c * (1 - blocked))


def _streams(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    first, second = np.random.SeedSequence(seed).spawn(2)
    return np.random.default_rng(first), np.random.default_rng(second)


def mmc(c: int, p: float, most: float) -> System:
    """M/M/c, first come first served; the value is the wait."""

    def draw(load: float, n: int, seed: int):
        arrivals, services = _streams(seed)
        at_s = np.cumsum(arrivals.exponential(1 / load, n))
        services_s = services.exponential(1.0, n)
        left_s = departures(at_s, services_s, c)
        return at_s, left_s, np.maximum(left_s - services_s - at_s, 0.0)

    def beyond(load: float) -> float:
        return erlang_c(c, load) * math.exp(-(c - load) * most)

    return System(f"M/M/{c}", LatencyBound(f"ttft.p{100 * p:g}", p, most), float(c), beyond, draw)


def mdc(c: int, p: float, most: float) -> System:
    """M/D/c, first come first served; the value is the wait. Closed form: Franx, OR Letters 29 (2001)."""

    def draw(load: float, n: int, seed: int):
        at_s = np.cumsum(_streams(seed)[0].exponential(1 / load, n))
        left_s = np.empty(n)
        for k in range(min(c, n)):  # with equal services customer k follows customer k - c
            left_s[k::c] = departures(at_s[k::c], np.ones(len(at_s[k::c])))
        return at_s, left_s, np.maximum(left_s - 1.0 - at_s, 0.0)

    def beyond(load: float) -> float:
        n_states = c + math.ceil(60 / max(-math.log(load / c), 0.02)) + 20
        counts = np.exp(
            -load + np.arange(n_states) * math.log(load) - special.gammaln(np.arange(n_states) + 1)
        )
        there = np.zeros(n_states)
        there[0] = 1.0
        step = np.zeros((n_states, n_states))
        for k in range(n_states):
            left = max(0, k - c)
            step[left:, k] = counts[: n_states - left]
        there = np.linalg.solve(
            np.vstack([(step - np.eye(n_states))[:-1], np.ones(n_states)]),
            np.append(np.zeros(n_states - 1), 1),
        )
        upto = np.cumsum(there)
        k = math.floor(most) + 1
        j = np.arange(k * c)
        weights = np.exp(-load * (k - most) + j * math.log(load * (k - most)) - special.gammaln(j + 1))
        places = np.minimum(c + k * c - 1 - j, n_states - 1)
        return float(1 - (weights * upto[places]).sum())

    return System(f"M/D/{c}", LatencyBound(f"ttft.p{100 * p:g}", p, most), float(c), beyond, draw)


def shared(knee: int, p: float, most: int) -> System:
    """Processor sharing: all go at full speed up to `knee` at a time, and share the server beyond it.

    The value is how slow a request finds the server; how many it finds does not depend on the law of the
    sizes (Kelly), which are hyperexponential here, so that it is that of M/M/c.
    """

    def draw(load: float, n: int, seed: int):
        arrivals, services = _streams(seed)
        at_s = np.cumsum(arrivals.exponential(1 / load, n))
        is_long, unit = services.random((2, n))
        sizes = -np.log1p(-unit) * np.where(is_long < 0.2, 3.0, 0.5)
        left_s, found = np.full(n, np.inf), np.empty(n)
        open_now: list[tuple[float, int]] = []
        now_s = attained = 0.0
        for k, (arrival_s, size) in enumerate(zip(at_s.tolist(), sizes.tolist(), strict=True)):
            while open_now:
                speed = min(1.0, knee / len(open_now))
                end_s = now_s + (open_now[0][0] - attained) / speed
                if end_s > arrival_s:
                    attained += (arrival_s - now_s) * speed
                    break
                attained, which = heapq.heappop(open_now)
                now_s = left_s[which] = end_s
            now_s = arrival_s
            found[k] = len(open_now)
            heapq.heappush(open_now, (attained + size, k))
        return at_s, left_s, np.maximum((found + 1) / knee, 1.0)

    def beyond(load: float) -> float:
        # P(N >= j) of M/M/c for j >= c.
        return erlang_c(knee, load) * (load / knee) ** (knee * most - knee)

    return System(f"PS/{knee}", LatencyBound(f"tpot.p{100 * p:g}", p, float(most)), float(knee), beyond, draw)


def closed_loop(c: int, p: float, most: float) -> System:
    """Users who ask again at once at c servers with exponential services, first come first served.

    All servers are always busy, so requests depart as a Poisson process, and each waits for as many
    departures as there are users beyond c: so many neighbours share their wait.
    """

    def draw(load: float, n: int, seed: int):
        random, n_ahead = np.random.default_rng(seed), max(round(load) - c, 0)
        left_s = np.cumsum(random.exponential(1 / c, n + n_ahead))
        at_s = left_s[:n]
        return at_s, left_s[n_ahead:], left_s[n_ahead:] - at_s + random.uniform(0, 1e-3, n)

    def beyond(load: float) -> float:
        return float(special.gammaincc(load - c, c * most)) if load > c else 0.0

    return System(f"closed/{c}", LatencyBound(f"ttft.p{100 * p:g}", p, most), 100.0 * c, beyond, draw)


class Probing:
    """Answers what a search asks, and counts the requests."""

    def __init__(self, system: System, seed: int, *, users: bool) -> None:
        self.system, self.seed, self.users, self.n_requests = system, seed, users, 0
        self._number, self._drawn = 0, None
        self._n = 0

    def answer(self, ask: Ask) -> Evidence:
        if ask.number != self._number:
            self._number, self._drawn, self._n = ask.number, None, 0
        if self._drawn is None or len(self._drawn[0]) < ask.n:
            self._drawn = self.system.draw(ask.load, math.ceil(2.3 * ask.n), 1000 * self.seed + ask.number)
        self.n_requests += ask.n - self._n
        self._n = ask.n
        at_s, left_s, values = (column[: ask.n] for column in self._drawn)
        if self.users:
            return Evidence((values,), None)
        in_flight = np.arange(ask.n) - np.searchsorted(np.sort(left_s), at_s)
        return Evidence((values,), in_flight.astype(float))


def found_by(
    system: System, start: float, seed: int, error: float = 0.05, *, users: bool = False
) -> tuple[Found, int]:
    """What a search finds, and how many requests it took."""
    probing = Probing(system, seed, users=users)
    asking = search((system.bound,), start, users=users, error=error)
    evidence = None
    while True:
        try:
            ask = asking.send(evidence)
        except StopIteration as ended:
            return ended.value, probing.n_requests
        evidence = probing.answer(ask)


def bisected(system: System, start: float, n_requests: int, seed: int) -> tuple[float, float]:
    """The usual way: probes of equal length that go by the share as it is, `n_requests` in all."""

    def walk(holds: Callable[[float, int], bool]) -> tuple[float, float, int]:
        low, high, load, n_probes = 0.0, math.inf, start, 0
        while not low or high > low * 1.1:
            n_probes += 1
            low, high = (load, high) if holds(load, n_probes) else (low, load)
            load = load * 2 if high == math.inf else load / 2 if not low else math.sqrt(low * high)
        return low, high, n_probes

    *_, n_probes = walk(lambda load, _: load < system.limit)
    n = n_requests // n_probes

    def seems_to_hold(load: float, k: int) -> bool:
        values = system.draw(load, n, 1000 * seed + 500 + k)[2]
        return bool((values[n // 10 :] > system.bound.most).mean() <= 1 - system.bound.p)

    low, high, _ = walk(seems_to_hold)
    return low, high


def systems(k: int) -> System:
    """The k-th of an endless list of different systems, their limits between 55% and 95% of capacity."""
    random = np.random.default_rng(k)
    p = float(random.choice([0.9, 0.95]))
    kind, c = k % 3, int(random.choice([1, 2, 4, 8]))
    while True:
        if kind == 2:
            made = shared(4 * c, p, int(random.integers(2, 4)))
        else:
            made = (mmc, mdc)[kind](c, p, float(random.uniform(0.5, 6.0)) / c)
        if 0.5 < made.limit / made.capacity < 0.95:
            return made
