"""Work that two processes share."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

Job = Callable[[], str]


def share(jobs: Sequence[Job]) -> list[str]:
    """What each of at most 256 jobs returns, in their order; a forked process does some of them.

    A job may only compute. What the other process could not do is done here, and raises here.
    """
    if not _can_fork():
        return [job() for job in jobs]
    places, give = os.pipe()
    os.write(give, bytes(range(len(jobs))))  # who reads a job's place does the job
    os.close(give)
    receive, send = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. Those that are left belong to OpenBLAS and Arrow, are idle, and are
        # replaced after a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _help(jobs, places, send)
    os.close(send)
    try:
        with os.fdopen(receive, "rb") as pipe:
            results = _take(jobs, places)
            with suppress(EOFError, pickle.UnpicklingError):
                results |= pickle.load(pipe)  # noqa: S301 from our own process
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(places)
    return [results[k] if k in results else job() for k, job in enumerate(jobs)]


def _can_fork() -> bool:
    """Only with a second core, and without another thread that may hold a lock."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and threading.active_count() == 1


def _take(jobs: Sequence[Job], places: int) -> dict[int, str]:
    return {place: jobs[place]() for (place,) in iter(lambda: os.read(places, 1), b"")}


def _help(jobs: Sequence[Job], places: int, send: int) -> NoReturn:
    """The forked process: it ends here, whatever happens, and leaves its parent's files and hooks alone."""
    try:
        with os.fdopen(send, "wb") as pipe:
            pickle.dump(_take(jobs, places), pipe)
    finally:
        os._exit(0)
