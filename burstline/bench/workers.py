"""How many load drivers share a load."""

from __future__ import annotations

import os
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Workers = int | Literal["auto"]

PER_DRIVER: Final = 2_000
"""Requests in flight for one driver: at 50 tokens a second each they make 100,000 events a second, about what
one follows on a core (`tests/bench/wire.py`)."""
OPEN_S: Final = 10.0
"""Assumed time in flight of a request in an open loop: before the run it is unknown."""


def n_drivers(wanted: Workers, due_s: NDArray[np.float64], concurrency: int | None) -> int:
    """As many as wanted; with "auto" one for every 2,000 requests in flight, on at most half of the cores.

    The other half is the server's, or the watcher's. In flight are `concurrency` requests, in an open loop as
    many as fall due (at `due_s`, ascending) within any ten seconds.
    """
    if wanted != "auto":
        return wanted
    n_at_once = len(due_s) if concurrency is None else min(concurrency, len(due_s))
    if concurrency is None and n_at_once:
        within = np.searchsorted(due_s, due_s + OPEN_S, side="right") - np.arange(len(due_s))
        n_at_once = int(within.max())
    return max(1, min(-(-n_at_once // PER_DRIVER), _n_cores() // 2))


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
