"""Work that two processes share."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import IO

Job = Callable[[], str]


def share(jobs: Sequence[Job]) -> list[str]:
    """What each of at most 256 jobs returns, in their order; a forked process does some of them.

    A job may only compute. What the other process could not do is done here, and raises here.
    """
    results: dict[int, str] = {}
    if can_fork() and len(os.sched_getaffinity(0)) > 1:
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
        helper = Forked(lambda pipe: pickle.dump(_take(jobs, places), pipe), keep=(places,))
    except OSError:  # no memory for it, or too many processes
        return {}
    try:
        results = _take(jobs, places)
        with suppress(EOFError, pickle.UnpicklingError):
            results |= pickle.load(helper.stdout)  # noqa: S301 from our own process
        return results
    finally:
        helper.kill()
        helper.stdout.close()
        helper.wait()


def _take(jobs: Sequence[Job], places: int) -> dict[int, str]:
    return {place: jobs[place]() for (place,) in iter(lambda: os.read(places, 1), b"")}


def can_fork() -> bool:
    """Whether a copy of this process can work: no other thread holds a lock that the copy would wait for."""
    return sys.platform == "linux" and threading.active_count() == 1


class Forked:
    """A copy of this process that writes to a pipe, which is read from `stdout`, and ends; see `can_fork`.

    It imports nothing anew. Of open files it has standard ones and those to `keep`: others wait for the end
    of the rest. Ctrl-C in a terminal does not reach it.
    """

    def __init__(self, work: Callable[[IO[bytes]], None], keep: Sequence[int] = ()) -> None:
        receive, send = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads. Those that are left belong to OpenBLAS and Arrow, are idle, and
            # are replaced after a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self.pid = os.fork()
            except OSError:
                os.close(receive)
                os.close(send)
                raise
        if self.pid == 0:
            try:
                os.setsid()
                gc.freeze()  # what is not collected stays shared, and closes no file
                for low, high in pairwise([2, *sorted((send, *keep)), os.sysconf("SC_OPEN_MAX")]):
                    os.closerange(low + 1, high)
                with os.fdopen(send, "wb") as pipe:
                    work(pipe)
            finally:
                os._exit(0)
        os.close(send)
        self.stdout: IO[bytes] = os.fdopen(receive, "rb")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
