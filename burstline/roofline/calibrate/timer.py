"""Measured durations of a device's kernels, repeated within a shared time budget."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

Kernel = Callable[[], object]
SETTLING_S, MOST_ROUNDS = 0.1, 30
"""A further round of a kernel whose two fastest disagree, and how many there may be."""


class Probe(Protocol):
    """A device's kernels, made ready to run; `roofline/calibrate/probe_numpy.py`, `probe_torch.py`.

    `passes` names the elementwise kernels that are as engines have them, by what ends our ops' names.
    """

    dtype: str
    element_bytes: int
    n_units: int
    passes: tuple[str, ...]

    @property
    def name(self) -> str: ...
    @property
    def memory_bytes(self) -> float: ...
    def product(self, m: int, n: int, k: int, copies: int) -> Kernel: ...
    def read(self, n_bytes: int) -> Kernel: ...
    def decode(
        self, batch: int, context: int, heads: int, kv_heads: int, dim: int, copies: int = 1
    ) -> Kernel: ...
    def prefill(self, tok: int, heads: int, kv_heads: int, dim: int) -> Kernel: ...
    def norm(self, rows: int, width: int) -> Kernel: ...
    def activation(self, rows: int, width: int) -> Kernel: ...
    def rope(self, rows: int, heads: int, dim: int) -> Kernel: ...
    def kv_write(self, rows: int, kv_heads: int, dim: int) -> Kernel: ...
    def once(self, kernel: Kernel, clock: Callable[[], float]) -> float: ...


@dataclass(slots=True, eq=False)
class Timed:
    """One kernel: its repeats' lower quartile, the better of both `rounds`, and how far four of five differ.

    A repeat longer than a few ms is interrupted wherever another process wants the core: not the quartile.
    """

    make: Callable[[], Kernel]
    seconds: float = math.inf
    spread: float = 0.0
    rounds: list[float] = field(default_factory=list)

    def apart(self) -> float:
        """By how much the second fastest round is slower than the fastest."""
        fastest, second = sorted(self.rounds)[:2]
        return second / fastest - 1


class Timer:
    """Hands out an equal share of the time that is left to each of the measurements that are left.

    Everything is measured twice, some seconds apart: what else runs on the machine only ever slows it down.
    """

    def __init__(
        self, probe: Probe, budget_s: float, n_measurements: int, clock: Callable[[], float]
    ) -> None:
        self._probe, self._clock = probe, clock
        self._end_s, self._left = clock() + budget_s, 2 * n_measurements
        self._all: list[Timed] = []

    def share_s(self) -> float:
        return max(0.0, self._end_s - self._clock()) / max(1, self._left)

    def time(self, make: Callable[[], Kernel]) -> Timed:
        """The kernel's first round."""
        self._all.append(Timed(make))
        self._round(self._all[-1])
        return self._all[-1]

    def settle(self, timed: Timed, most: float) -> float:
        """Rounds of one kernel until its two fastest differ by `most` or less; how far apart they end.

        A ceiling is what the machine reaches twice. Others, and a hypervisor's, only ever lower a round, so
        slow ones say nothing, and one fast round alone may be a stamp that came late.
        """
        for _ in range(MOST_ROUNDS):
            if timed.apart() <= most:
                break
            self._round(timed, SETTLING_S)
        return timed.apart()

    def again(self) -> float:
        """The second round of every kernel; the median of their spreads."""
        self._left = len(self._all)
        for timed in self._all:
            self._round(timed)
        return float(np.median([timed.spread for timed in self._all]))

    def _round(self, timed: Timed, share_s: float | None = None) -> None:
        share_s, kernel = self.share_s() if share_s is None else share_s, timed.make()
        seconds: list[float] = []
        self._left -= 1
        self._probe.once(kernel, self._clock)  # the first run touches its memory for the first time
        began_s = self._clock()
        while len(seconds) < 5 or (self._clock() - began_s < 0.8 * share_s and len(seconds) < 1000):
            seconds.append(self._probe.once(kernel, self._clock))
            if len(seconds) >= 3 and self._clock() - began_s > 2 * share_s:
                break
        low, quarter, high = np.quantile(seconds, [0.1, 0.25, 0.9])
        timed.rounds.append(float(quarter))
        if quarter < timed.seconds:
            timed.seconds, timed.spread = float(quarter), float((high - low) / quarter)
