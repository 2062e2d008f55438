"""Measured durations of a device's kernels, repeated within a shared time budget."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Kernel = Callable[[], object]
LEAST_S, MOST_S, REACHED = 2.0, 4.0, 3
"""How long a ceiling is looked for, at least and at most, and how often it must be reached."""


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
    """One kernel: its repeats' lower quartile, the better of both rounds, and how far four of five differ.

    A repeat longer than a few ms is interrupted wherever another process wants the core: not the quartile.
    """

    make: Callable[[], Kernel]
    seconds: float = math.inf
    spread: float = 0.0


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

    def ceiling(
        self, kernels: Sequence[tuple[Callable[[], Kernel], float]], most: float
    ) -> tuple[float, float]:
        """The most a second of what each kernel does so much of; how far the fastest repeats of it differ.

        Others, and a hypervisor's, only ever lower a repeat, for seconds at a time: slow ones say nothing,
        also where they agree. A ceiling is what the machine reaches again and again. Ends once that holds to
        `most`.
        """
        made = [(amount, make(), list[float]()) for make, amount in kernels]
        for _, kernel, _ in made:
            self._probe.once(kernel, self._clock)
        began_s, best, apart = self._clock(), 0.0, math.inf
        while (spent_s := self._clock() - began_s) < LEAST_S or (apart > most and spent_s < MOST_S):
            for amount, kernel, fastest in made:
                fastest[:] = sorted([*fastest, self._probe.once(kernel, self._clock)])[:REACHED]
                if len(fastest) == REACHED and amount / fastest[-1] >= best:
                    best, apart = amount / fastest[-1], fastest[-1] / fastest[0] - 1
        return best, apart

    def again(self) -> float:
        """The second round of every kernel; the median of their spreads."""
        self._left = len(self._all)
        for timed in self._all:
            self._round(timed)
        return float(np.median([timed.spread for timed in self._all]))

    def _round(self, timed: Timed) -> None:
        share_s, kernel = self.share_s(), timed.make()
        seconds: list[float] = []
        self._left -= 1
        self._probe.once(kernel, self._clock)  # the first run touches its memory for the first time
        began_s = self._clock()
        while len(seconds) < 5 or (self._clock() - began_s < 0.8 * share_s and len(seconds) < 1000):
            seconds.append(self._probe.once(kernel, self._clock))
            if len(seconds) >= 3 and self._clock() - began_s > 2 * share_s:
                break
        low, quarter, high = np.quantile(seconds, [0.1, 0.25, 0.9])
        if quarter < timed.seconds:
            timed.seconds, timed.spread = float(quarter), float((high - low) / quarter)
