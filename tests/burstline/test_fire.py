"""How long drivers may take: those that do nothing are given up, and their requests are accounted for."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from burstline.bench import fire
from burstline.loadgen.capture.capture import Capture, CaptureWriter, read_captures
from burstline.loadgen.driver.job import NAMES, Counters, Driver, Job, Ready
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


def a_driver(first: Callable[[Connection], None], pid: int | None = None) -> fire.Drivers:
    """One that does no more than `first`."""

    @contextmanager
    def started(jobs: Sequence[Job], counters: Counters) -> Iterator[Sequence[Driver]]:
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            first(theirs)
            yield [
                SimpleNamespace(name="driver 0", pid=pid, connection=ours, send=ours.send, receive=ours.recv)
            ]

    return started


def test_drivers_that_prepare_nothing_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fire, "STARTING_LIMIT_S", 0.1)
    silent = a_driver(lambda conn: None)
    with pytest.raises(fire.ChildLostError, match=r"made no progress for 0\.1 s; nothing was sent"):
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
    assert lost.why == "driver 0 did not stop; 0 of its 7 requests had been sent"
    assert lost.share == 1
    assert [c.failure for c in read_captures(job.captures)] == ["driver_lost"] * 7


def beating(job: Job, n: int, then_s: float) -> Callable[[Connection], None]:
    """A driver that is ready, and shows `n` signs of life, one each `then_s`."""

    def begin(conn: Connection) -> None:
        conn.send(Ready())

        def beat() -> None:
            with Counters(job.counters) as counters:
                cells = counters.row(0)
                for _ in range(n):
                    cells[NAMES.index("beats")] += 1
                    time.sleep(then_s)
                cells.release()

        threading.Thread(target=beat, daemon=True).start()

    return begin


def test_a_driver_that_stands_still_in_the_load_is_lost_and_what_it_captured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fire, "STILL_LIMIT_S", 1.5)
    job, told = job_in(tmp_path), []
    spool = CaptureWriter(job.captures)
    spool.put(lambda: Capture(3, 0, None, None, None, None, (), "reset", "before"))
    spool.close()
    drivers = a_driver(beating(job, 6, 0.2))
    fire.fire(job, 1, lambda pids: None, lambda snapshot: None, drivers, told.append)
    assert told == ["driver 0 made no progress for 1.5 s; 0 of its 7 requests had been sent"]
    failures = {capture.index: capture.failure for capture in read_captures(job.captures)}
    assert failures == {k: "reset" if k == 3 else "driver_lost" for k in range(7)}


@contextmanager
def control_in(folder: Path) -> Iterator[fire._DriverControl]:
    """Of one driver, which ends at once."""
    job = job_in(folder)
    with (
        Counters.create(job.counters, 1) as counters,
        a_driver(lambda conn: None)([job], counters) as drivers,
    ):
        yield fire._DriverControl(drivers, counters, [job], lambda now: None, 0.0, print, lambda now: False)


def test_a_driver_that_was_still_before_a_stop_has_the_whole_limit_after_it(tmp_path: Path) -> None:
    with control_in(tmp_path) as control:
        control._beats = {0: (0, time.monotonic() - 9.0)}
        control._stop()
        control._check_limits()
        assert control._pending
        control._stopped_s = time.monotonic() - fire.STOPPING_LIMIT_S - 1.0
        control._check_limits()
        assert not control._pending


def test_a_driver_is_lost_when_it_was_last_heard_not_when_that_is_noticed(tmp_path: Path) -> None:
    with control_in(tmp_path) as control:
        control._t0_ns = 10_000_000_000
        control._beats = {0: (5, 16.5)}
        control._lose(0, "gone")
    assert [each.at_s for each in control._lost] == [6.5]


def test_a_driver_that_still_stores_after_a_stop_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has replies to store for longer than anything may be silent."""
    monkeypatch.setattr(fire, "STOPPING_LIMIT_S", 1.5)
    interrupts = iter([KeyboardInterrupt])

    def ctrl_c(snapshot: object) -> None:
        for interrupt in interrupts:
            raise interrupt

    job = job_in(tmp_path)
    load = fire.fire(job, 1, lambda pids: None, ctrl_c, a_driver(beating(job, 8, 0.25)))
    assert load.lost[0].why.startswith("driver 0 did not stop")


def test_a_second_interrupt_is_raised(tmp_path: Path) -> None:
    def ctrl_c(snapshot: object) -> None:
        raise KeyboardInterrupt

    job = job_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fire.fire(job, 1, lambda pids: None, ctrl_c, a_driver(lambda conn: conn.send(Ready())))


def test_a_driver_that_is_given_up_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fire, "STARTING_LIMIT_S", 0.1)
    with subprocess.Popen(["sleep", "600"]) as process:
        silent = a_driver(lambda conn: None, process.pid)
        with pytest.raises(fire.ChildLostError):
            fire.fire(job_in(tmp_path), 1, lambda pids: None, lambda snapshot: None, silent)
        assert process.wait(20) == -signal.SIGKILL
