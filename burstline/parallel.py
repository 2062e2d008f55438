"""Work that two processes share."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress

from servers.host import child

Job = Callable[[], str]


def share(jobs: Sequence[Job]) -> list[str]:
    """What each of at most 256 jobs returns, in their order; a forked process does some of them.

    A job may only compute. What the other process could not do is done here, and raises here.
    """
    results: dict[int, str] = {}
    if child.can_fork() and len(os.sched_getaffinity(0)) > 1:
        places, give = os.pipe()
        os.write(give, bytes(range(len(jobs))))  # who reads a job's place does the job
        os.close(give)
        try:
            results = _shared(jobs, places)
        finally:
            os.close(places)
    return [results[k] if k in results else job() for k, job in enumerate(jobs)]


def _shared(jobs: Sequence[Job], places: int) -> dict[int, str]:
    try:
        helper = child.Forked(lambda pipe: pickle.dump(_take(jobs, places), pipe), keep=(places,))
    except OSError:  # no memory for it, or too many processes
        return {}
    try:
        results = _take(jobs, places)
        with suppress(EOFError, pickle.UnpicklingError):
            results |= pickle.load(helper.stdout)  # noqa: S301 from our own process
        return results
    finally:
        helper.kill()
        child.end(helper, 0.0)


def _take(jobs: Sequence[Job], places: int) -> dict[int, str]:
    return {place: jobs[place]() for (place,) in iter(lambda: os.read(places, 1), b"")}
