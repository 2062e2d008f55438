"""Several cores that compute parts of one thing: numpy lets other threads run inside its kernels."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_ARENA_MAX": "1"
}  # fmt: skip
"""Has glibc keep freed memory, as engines keep their buffers: taking large blocks back costs a page
fault for each 4 KiB, up to 80% of attention's time, or nothing, by what else was allocated."""
LEAST_ROWS = 16
"""Rows that a core is given at least: with fewer, it waits for the same weights, and for its start."""
PROMPT_ROWS = 256
"""Query rows of a prompt that one of several cores takes at once; each part gathers its keys anew."""
MOST_BYTES, LEAST_BYTES = 1 << 21, 1 << 18
"""Keys gathered at once in decode: fewer cost calls, more leave the cache between the copy and the matmul."""


def take_cores(n: int) -> None:
    """Compute on the last `n` cores we may use; call it before numpy is imported, which reads how BLAS does.

    BLAS itself gets one: its own threads spin between products.
    """
    for name in BLAS_THREADS:
        os.environ[name] = "1"
    with suppress(AttributeError, OSError):  # not everywhere, and a sandbox may refuse
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-n:])


def yield_to_others() -> None:
    """Let every other program go first on this thread's core, for good: what it computes can wait."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Cores:
    """`n` threads: the caller's own and n - 1 others."""

    def __init__(self, n: int = 1) -> None:
        self.n = n
        self._others = ThreadPoolExecutor(max(1, n - 1), "compute", yield_to_others)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """What each task returned; they begin in order, as cores become free."""
        results: dict[int, T] = {}
        left = iter(enumerate(tasks))

        def work() -> None:
            for k, task in left:
                results[k] = task()

        helpers = [self._others.submit(work) for _ in range(min(self.n, len(tasks)) - 1)]
        work()
        for helper in helpers:
            if not helper.cancel():  # one that has not begun has nothing left to do
                helper.result()
        return [results[k] for k in range(len(tasks))]

    def shares(self, n_rows: int) -> list[slice]:
        """The rows of one array, cut evenly for the cores that are worth it."""
        n = max(1, min(self.n, n_rows // LEAST_ROWS))
        edges = [n_rows * k // n for k in range(n + 1)]
        return [slice(low, high) for low, high in itertools.pairwise(edges)]

    def prompt_parts(self, n_rows: int) -> list[tuple[int, int]]:
        """The query rows of one prompt, as (first, end) of what a core takes at once."""
        size = PROMPT_ROWS if self.n > 1 else n_rows
        return [(low, min(low + size, n_rows)) for low in range(0, n_rows, size)]

    def gather_bytes(self, n_bytes: int) -> int:
        """Keys that a core gathers at once, where a step gathers `n_bytes` of them."""
        return min(MOST_BYTES, max(n_bytes // self.n, LEAST_BYTES)) if self.n > 1 else MOST_BYTES
