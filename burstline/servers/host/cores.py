"""Which cores a process may use, and how many a server gets: `keeper.py`, `_start`, pins it to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress


def allowed_cores() -> list[int]:
    """The cores that this process may use, in order; all of them where the kernel does not say."""
    with suppress(AttributeError, OSError):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def keep_to(pid: int, cores: Sequence[int]) -> None:
    """Run a process, 0 for this one, on these cores only; on none that are named, leave it."""
    with suppress(AttributeError, OSError, ValueError):
        os.sched_setaffinity(pid, cores)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(allowed_cores())


def threads_for_server() -> int | None:
    """How many threads leave the client a core on a machine of 2 to 4; None on any other machine.

    An engine that takes every core spins on all of them between its steps, and its front end competes with
    the client for the rest: the client then reads late.
    """
    n = usable_cores()
    return n - 1 if 2 <= n <= 4 else None
