"""How long drivers may take: those that do nothing are given up, and their requests are accounted for."""

from __future__ import annotations

import multiprocessing
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from burstline.bench import fire
from burstline.driver_processes import Driver
from burstline.loadgen.driver.job import Counters, Job, Ready
from burstline.loadgen.record.capture_store import read_captures
from burstline.servers.messages import Target
from burstline.workloads.request import Request


def job_in(folder: Path) -> Job:
    requests = tuple(Request(k, None, "x", 1, 1) for k in range(7))
    return Job(
        requests,
        array("q", [0] * 7),
        "vllm",
        Target("http://127.0.0.1:9", "m"),
        folder / "captures",
        folder / "counters",
    )


def a_driver(first: Callable[[Connection], None]) -> fire.Drivers:
    """One that does no more than `first`."""

    @contextmanager
    def started(jobs: Sequence[Job], counters: Counters) -> Iterator[Sequence[Driver]]:
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            first(theirs)
            yield [
                SimpleNamespace(name="driver 0", pid=None, connection=ours, send=ours.send, receive=ours.recv)
            ]

    return started


def test_drivers_that_prepare_nothing_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fire, "PREPARING_LIMIT_S", 0.1)
    silent = a_driver(lambda conn: None)
    with pytest.raises(fire.DriverDiedError, match=r"prepared no request for 0\.1 s; nothing was sent"):
        fire.fire(job_in(tmp_path), 1, lambda pids: None, lambda snapshot: None, silent)


def test_a_driver_that_does_not_stop_is_lost_and_its_requests_are_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fire, "STOPPING_LIMIT_S", 0.1)
    interrupts = iter([KeyboardInterrupt])

    def ctrl_c(snapshot: object) -> None:
        for interrupt in interrupts:
            raise interrupt

    deaf = a_driver(lambda conn: conn.send(Ready()))
    job = job_in(tmp_path)
    load = fire.fire(job, 1, lambda pids: None, ctrl_c, deaf)
    assert load.interrupted
    (lost,) = load.lost
    assert lost.why == "driver 0 did not stop within 0.1 s; 0 of its 7 requests had been sent"
    assert lost.share == 1
    assert [c.failure for c in read_captures(job.captures)] == ["driver_lost"] * 7
