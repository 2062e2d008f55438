"""A server whose speed changes over time, the same for all requests that it serves at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """By how much work, in seconds at speed 1, has been done every `step_s` from the load's start on.

    The load has started once `from_running` requests are in flight; before, the speed is 1. Behind the last
    step a server stands still: `work_s` must reach further than the load.
    """

    work_s: NDArray[np.float64]
    step_s: float
    from_running: int

    def pace(self, arrival_ns: int, from_ns: int | None) -> Callable[[Sequence[int]], list[int]] | None:
        """From the offsets of a reply's events at speed 1 to those at the server's; None before the load."""
        if from_ns is None:
            return None
        at_s = np.arange(len(self.work_s)) * self.step_s
        since_s = (arrival_ns - from_ns) / 1e9
        done_s = float(np.interp(since_s, at_s, self.work_s))

        def paced(own_ns: Sequence[int]) -> list[int]:
            ends_s = np.interp(done_s + np.asarray(own_ns) / 1e9, self.work_s, at_s)
            return [round(end_ns) for end_ns in ((ends_s - since_s) * 1e9).tolist()]

        return paced
