"""Convert the kernel's receive timestamps (CLOCK_REALTIME) to the run's clock (CLOCK_MONOTONIC)."""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from burstline.loadgen.capture.capture import NO_STAMP

_STEP_NS = 50_000
_SOFTIRQ_SLACK_NS = 20_000


def realtime_offset_ns(n_tries: int = 3) -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC now, from the tightest of `n_tries` pairs of readings."""
    monotonic, realtime = time.monotonic_ns, time.CLOCK_REALTIME
    tries = []
    for _ in range(n_tries):
        before, wall, after = monotonic(), time.clock_gettime_ns(realtime), monotonic()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


@dataclass(slots=True)
class Offsets:
    """The offset as it was over a run: slewing moves both clocks alike, only a step (`date -s`) moves it."""

    since_ns: list[int] = field(default_factory=list)
    offset_ns: list[int] = field(default_factory=list)
    latest_ns: int = 0
    _steps: list[tuple[int, int]] = field(default_factory=list)
    _observed_ns: int = 0

    def observe(self, now_ns: int) -> None:
        self.latest_ns = realtime_offset_ns()
        if not self.offset_ns or abs(self.latest_ns - self.offset_ns[-1]) > _STEP_NS:
            if self.offset_ns:
                self._steps.append((self._observed_ns, now_ns))
            # A concurrent reader looks up by `since_ns`: its offset must be there before.
            self.offset_ns.append(self.latest_ns)
            self.since_ns.append(now_ns)
        self._observed_ns = now_ns

    @property
    def drift_ns(self) -> int:
        """How far the offset moved from the first observation to the latest."""
        return self.latest_ns - self.offset_ns[0] if self.offset_ns else 0

    def monotonic(self, stamps: bytes | bytearray, at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Kernel stamps (`struct timespec`, zeros where absent) as monotonic ns, NO_STAMP where absent.

        `at_ns` is when our code had each read. A stamp later than that, or a minute older, crossed a step of
        the wall clock between two observations and is dropped.
        """
        pairs = np.frombuffer(stamps, dtype=np.int64).reshape(-1, 2)
        real_ns = pairs[:, 0] * 1_000_000_000 + pairs[:, 1]
        step = np.searchsorted(self.since_ns, at_ns, side="right") - 1
        kernel_ns = real_ns - np.array(self.offset_ns, dtype=np.int64)[np.maximum(step, 0)]
        lag_ns = at_ns - kernel_ns
        sound = (real_ns != 0) & (lag_ns > -_SOFTIRQ_SLACK_NS) & (lag_ns < 60_000_000_000)
        for from_ns, to_ns in self._steps:  # when between the two observations it stepped, the clock keeps
            sound &= (at_ns <= from_ns) | (at_ns > to_ns)
        return np.where(sound, np.minimum(kernel_ns, at_ns), NO_STAMP)

    def moment(self, stamp: tuple[int, int] | None) -> int | None:
        """One stamp (wall-clock ns, and when it was read) as monotonic ns; None where a step voids it."""
        if stamp is None:
            return None
        real_ns, at_ns = stamp
        timespec = np.array(divmod(real_ns, 1_000_000_000), dtype=np.int64).tobytes()
        (moment_ns,) = self.monotonic(timespec, np.array([at_ns], dtype=np.int64))
        return None if moment_ns == NO_STAMP else int(moment_ns)
