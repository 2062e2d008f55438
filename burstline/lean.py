"""Libraries without what a command never uses of them: their imports are most of its time."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from servers.host.child import BLAS_THREADS

T = TypeVar("T")

# Modules of matplotlib import each other in circles: one of two threads can see half of them.
_one_at_a_time = threading.RLock()


def import_lean() -> None:
    """Have pyarrow convert without pandas: for a command's own process, in a notebook it is wanted."""
    from loadgen.record.tables import keep_pandas_out

    with _one_at_a_time:
        keep_pandas_out()


def import_numpy() -> None:
    """Have numpy start no threads of its own, unless the variable is set; engines do not inherit it."""
    asked = os.environ.get(BLAS_THREADS)
    os.environ.setdefault(BLAS_THREADS, "1")
    try:
        importlib.import_module("numpy")
    finally:
        if asked is None:
            del os.environ[BLAS_THREADS]


def import_tables() -> None:
    """What writing a plan needs."""
    from loadgen.record.tables import keep_pandas_out

    keep_pandas_out()
    for name in ("pyarrow.parquet", "workloads.plan_table"):
        importlib.import_module(name)


def import_report() -> None:
    """What summary and page need; a second thread that asks for it waits until it is there."""
    with _one_at_a_time:
        import_lean()
        for name in (
            "burstline.machine.efficiency",
            "burstline.machine.roofline_input",
            "roofline.reconcile.reconcile",
            "loadgen.summarize",
            "matplotlib.backends.backend_svg",
            "pyarrow.compute",
            "reports.page.digest",
            "reports.formats.text",
        ):
            importlib.import_module(name)
        importlib.import_module("reports.page.page").templates()


def meanwhile(work: Callable[[], T], *, daemon: bool = False) -> Future[T]:
    """Do it in a thread. Asking for the result waits for it, and raises what it raised.

    `daemon`: the process may end while it works.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="meanwhile", daemon=daemon).start()
    return done
