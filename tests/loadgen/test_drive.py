"""A driver from its job to its report: every request that was sent ends with exactly one capture."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Capture, read_captures
from burstline.loadgen.capture.drive_report import DriveReport
from burstline.loadgen.driver import drive
from burstline.loadgen.driver.job import Counters, Done, Go, Job, Ready, Stop
from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.os_limits import ensure_ports, ensure_sockets
from burstline.loadgen.wire.wire import Wire
from burstline.servers.host.child import Failed
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request, WorkloadError
from tests.loadgen.scripted import Asked, FakeEngine, Script, Scripted, reset, serving, stream

MS = 1_000_000


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "fake", FakeEngine())  # type: ignore[arg-type]


@contextmanager
def served(script: Script) -> Iterator[Scripted]:
    """A scripted server in a thread of its own."""
    ready: list[Scripted] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(script) as server:
            ready.append(server)
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    while not ready:
        time.sleep(0.001)
    yield ready[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def job_for(folder: Path, url: str, due_ms: list[float], **options: Any) -> Job:
    requests = tuple(Request(100 + i, None, f"prompt {i}", 2, 3) for i in range(len(due_ms)))
    Counters.create(folder / "counters", 1).close()
    due_ns = array("q", [int(d * MS) for d in due_ms])
    return Job(
        requests, due_ns, "fake", Target(url, "m"), folder / "captures", folder / "counters", **options
    )


def driven(job: Job, meanwhile: Callable[[Connection], None] = lambda conn: None) -> DriveReport:
    """Run a driver in a thread, as the orchestrator runs its process."""
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=drive.run, args=(job, theirs))
    thread.start()
    try:
        message = ours.recv()
        if isinstance(message, Ready):
            ours.send(Go(time.monotonic_ns() + 5 * MS))
            meanwhile(ours)
            message = ours.recv()
        if isinstance(message, Failed):
            raise message.error
        report: DriveReport = message.report
        return report
    finally:
        thread.join()
        ours.close()
        theirs.close()


def test_a_burst_ends_with_a_capture_each_and_an_honest_report(tmp_path: Path) -> None:
    with served(stream) as server:
        job = job_for(tmp_path, server.url, [0.0] * 60)
        report = driven(job)
    captures = list(read_captures(job.captures))
    assert sorted(c.index for c in captures) == list(range(100, 160))
    assert {a.line for a in server.asked} == {"POST /generate HTTP/1.1"}
    assert sorted(a.body for a in server.asked) == sorted(b"prompt %d" % i for i in range(60))
    assert b"gzip" not in server.asked[0].head
    assert (report.n_planned, report.n_sent, report.failures) == (60, 60, {})
    assert report.late is not None
    assert report.late.n == 60
    late_ns = [c.sent_ns - c.due_ns for c in captures if c.sent_ns is not None]
    assert report.late.max_ns == max(late_ns)
    assert report.n_reads == sum(len(c.reads) for c in captures)
    assert report.connect is not None
    assert report.connect.n == 60
    if sys.platform == "linux":
        assert report.read_lag is not None
        assert report.read_lag.n == report.n_reads
    with Counters(job.counters) as counters:
        totals = counters.totals()
    assert [totals[k] for k in ("prepared", "sent", "begun", "done", "failed")] == [60, 60, 60, 60, 0]
    assert totals["bytes"] == report.n_bytes == sum(len(r.data) for c in captures for r in c.reads)


def test_nothing_planned_is_a_run_of_nothing(tmp_path: Path) -> None:
    with served(stream) as server:
        report = driven(job_for(tmp_path, server.url, []))
    assert (report.n_planned, report.n_sent, report.late, report.failures) == (0, 0, None, {})


def test_requests_beyond_the_look_ahead_are_prepared_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "_LOOK_AHEAD", 16)
    with served(stream) as server:
        job = job_for(tmp_path, server.url, [float(i) for i in range(120)])
        report = driven(job)
    assert sorted(c.index for c in read_captures(job.captures)) == list(range(100, 220))
    assert report.failures == {}


def test_requests_of_a_closed_loop_are_handed_over_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-over for each wakes the wire's thread for each: a tenth of a short request's time."""
    sizes, park = [], Wire.park
    monkeypatch.setattr(Wire, "park", lambda wire, *some: sizes.append(len(some)) or park(wire, *some))
    with served(stream) as server:
        report = driven(job_for(tmp_path, server.url, [0.0] * 400, concurrency=20))
    assert report.n_sent == sum(sizes) == 400
    assert max(sizes[1:]) > 1


async def mixed(writer: asyncio.StreamWriter, asked: Asked) -> None:
    """By the number of the prompt: whole, reset, half, never."""
    kind = int(asked.body.split()[1]) % 4
    if kind == 0:
        await stream(writer, asked)
    elif kind == 1:
        reset(writer)
    elif kind == 2:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        writer.close()
    else:
        await asyncio.Event().wait()


@pytest.mark.parametrize("concurrency", [None, pytest.param(7, marks=pytest.mark.slow)])
def test_sum_of_captures_is_the_plan_whatever_the_server_does(
    tmp_path: Path, concurrency: int | None
) -> None:
    with served(mixed) as server:
        job = job_for(tmp_path, server.url, [0.0] * 40, deadline_s=2.0, concurrency=concurrency)
        report = driven(job)
    captures = list(read_captures(job.captures))
    assert sorted(c.index for c in captures) == list(range(100, 140))
    by_kind = {k: {c.failure for c in captures if c.index % 4 == k} for k in range(4)}
    # 100 is a multiple of 4, so that a prompt's number and its index have the same remainder.
    assert by_kind == {0: {None}, 1: {"reset"}, 2: {"truncated"}, 3: {"timeout"}}
    assert dict(report.failures) == {"reset": 10, "truncated": 10, "timeout": 10}


def test_nothing_of_a_request_outlives_its_capture_though_no_collector_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def n_exchanges() -> int:
        return sum(type(each) is Exchange for each in gc.get_objects())

    @contextmanager
    def counting() -> Iterator[None]:
        gc.collect()
        gc.disable()
        yield
        until_s = time.monotonic() + 20  # the spool, a thread of its own, may be behind on a busy machine
        while n_exchanges() > 5 and time.monotonic() < until_s:
            time.sleep(0.05)
        left.append(n_exchanges())
        gc.enable()

    monkeypatch.setattr(drive, "quiet", counting)
    with served(mixed) as server:
        due_ms = [10.0 * k for k in range(40)]  # or those that time out would end together
        driven(job_for(tmp_path, server.url, due_ms, deadline_s=0.2))
    # The last few may still be in the hands of the spool.
    assert left[0] <= 5


def test_stop_ends_the_run_at_once_with_every_request_accounted_for(tmp_path: Path) -> None:
    async def hangs(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await asyncio.sleep(5)

    def stop(conn: Connection) -> None:
        while len(server.asked) < 5:
            time.sleep(0.01)
        conn.send(Stop())

    with served(hangs) as server:
        job = job_for(tmp_path, server.url, [0.0] * 5 + [60_000.0] * 20)
        report = driven(job, stop)
    assert dict(report.failures) == {"cancelled": 5, "not_sent": 20}
    assert len(list(read_captures(job.captures))) == 25


def test_what_was_never_prepared_is_counted_and_takes_no_capture(tmp_path: Path) -> None:
    """Captures of a hundred thousand requests that were not sent would take longer than anyone waits."""

    n_drawn = 0

    class Drawn(tuple[Request, ...]):
        def __iter__(self) -> Iterator[Request]:
            nonlocal n_drawn
            for n_drawn, request in enumerate(super().__iter__(), 1):  # noqa: B007
                yield request

    async def hangs(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await asyncio.sleep(5)

    def stop(conn: Connection) -> None:
        while not server.asked:
            time.sleep(0.01)
        conn.send(Stop())

    with served(hangs) as server:
        job = job_for(tmp_path, server.url, [0.0] * 20_000, concurrency=1)
        report = driven(replace(job, requests=Drawn(job.requests)), stop)
    assert dict(report.failures) == {"cancelled": 1, "not_sent": 19_999}
    assert n_drawn < 1000
    assert len(list(read_captures(job.captures))) < 1000


def test_stop_before_the_start_sends_nothing(tmp_path: Path) -> None:
    with served(stream) as server:
        job = job_for(tmp_path, server.url, [0.0] * 5)
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=drive.run, args=(job, theirs))
        thread.start()
        assert ours.recv() == Ready()
        ours.send(Stop())
        message = ours.recv()
        thread.join()
    assert isinstance(message, Done)
    report = message.report
    assert report.t0_ns is None
    assert dict(report.failures) == {"not_sent": 5}
    assert server.asked == []


def test_stop_while_requests_are_prepared_ends_with_all_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_built, preparing, stopped = 0, threading.Event(), threading.Event()
    encode = ENGINES["fake"].encode

    def slow(request: Request, target: Target) -> Any:
        nonlocal n_built
        n_built += 1
        preparing.set()
        assert stopped.wait(10)
        time.sleep(0.005)  # the thread that hears of the stop gets its turn
        return encode(request, target)

    monkeypatch.setattr(ENGINES["fake"], "encode", slow, raising=False)
    with served(stream) as server:
        job = job_for(tmp_path, server.url, [0.0] * 200)
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=drive.run, args=(job, theirs))
        thread.start()
        assert preparing.wait(10)
        ours.send(Stop())
        stopped.set()
        while isinstance(message := ours.recv(), Ready):
            pass
        thread.join()
    assert isinstance(message, Done)
    assert dict(message.report.failures) == {"not_sent": 200}
    assert sorted(c.index for c in read_captures(job.captures)) == list(range(100, 300))
    assert server.asked == []
    assert n_built < 100  # what comes after the stop is not even built


def test_connections_that_never_open_delay_the_start_no_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "_OPENING_S", 0.1)
    monkeypatch.setattr("burstline.loadgen.driver.drive.Wire.when_open", lambda self, call: None)
    with served(stream) as server:
        report = driven(job_for(tmp_path, server.url, [0.0] * 5))
    assert (report.n_sent, report.failures) == (5, {})


def test_a_lost_orchestrator_ends_the_load_and_keeps_the_captures(tmp_path: Path) -> None:
    async def hangs(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await asyncio.sleep(5)

    with served(hangs) as server:
        job = job_for(tmp_path, server.url, [0.0] * 5)
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=drive.run, args=(job, theirs))
        thread.start()
        assert ours.recv() == Ready()
        ours.send(Go(time.monotonic_ns()))
        while len(server.asked) < 5:
            time.sleep(0.01)
        ours.close()
        thread.join()
    assert [c.failure for c in read_captures(job.captures)] == ["cancelled"] * 5


def test_an_unreachable_server_is_captures_not_an_exception(tmp_path: Path) -> None:
    with served(stream) as server:
        url = server.url
    job = job_for(tmp_path, url, [0.0] * 5)
    assert dict(driven(job).failures) == {"connect": 5}


def test_an_error_in_preparing_is_told_to_the_orchestrator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise WorkloadError("this engine takes no text; give token ids")

    monkeypatch.setattr(ENGINES["fake"], "encode", refuses, raising=False)
    with served(stream) as server, pytest.raises(WorkloadError, match="takes no text"):
        driven(job_for(tmp_path, server.url, [0.0] * 5))


def test_a_full_disk_is_told_to_the_orchestrator(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with served(stream) as server:
        job = job_for(tmp_path, server.url, [float(200 * i) for i in range(50)])
        job.captures.mkdir()
        (job.captures / "driver-0.zst.partial").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            driven(job)
    assert len(server.asked) < 50


def test_a_job_is_split_without_losing_a_request(tmp_path: Path) -> None:
    job = job_for(tmp_path, "http://x", [float(i) for i in range(11)], concurrency=5)
    parts = job.split(3)
    assert sorted(r.index for p in parts for r in p.requests) == list(range(100, 111))
    assert [p.concurrency for p in parts] == [2, 2, 1]
    assert [p.worker for p in parts] == [0, 1, 2]
    for part in parts:
        assert list(part.due_ns) == [(r.index - 100) * MS for r in part.requests]


def test_each_slot_of_a_closed_loop_gets_as_many_requests_as_any_other(tmp_path: Path) -> None:
    job = job_for(tmp_path, "http://x", [0.0] * 400, concurrency=10)
    parts = job.split(4)
    assert [(p.concurrency, len(p.requests)) for p in parts] == [(3, 120), (3, 120), (2, 80), (2, 80)]


def test_too_few_file_descriptors_are_refused_with_the_fix() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))\n"
        "from burstline.loadgen.wire.os_limits import ensure_sockets\n"
        "ensure_sockets(150); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "ensure_sockets(1000)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "256\n"
    assert "1,000 requests at once need 1,064 open files, this process may have 256" in ended.stderr
    assert "ulimit -Hn 1064" in ended.stderr
    assert "send fewer at once, at most 192 (" in ended.stderr


LOCAL, AWAY = "0100007F", "0200A8C0"
PORTS: dict[str, tuple[str, str, list[tuple[str, int, str]], int, str]] = {
    "enough": ("40000 40499", "2", [], 484, ""),
    "too few": ("40000 40499", "2", [], 485, "485 connections .* 484 are free"),
    "the whole range": ("1024 65535", "0", [], 30_000, ""),
    "in use": (
        "40000 40099",
        "1",
        [(AWAY, 8000, "01")] * 4,
        81,
        "80 are free",
    ),
    "to another port": ("40000 40099", "0", [(AWAY, 443, "01")] * 4, 84, ""),
    "a listener in the range": ("40000 40099", "0", [(LOCAL, 0, "0A")], 84, "83 are free"),
    "a listener elsewhere": ("50000 50099", "0", [(LOCAL, 0, "0A")], 84, ""),
    "TIME_WAIT": ("40000 40099", "0", [(LOCAL, 8000, "06")] * 4, 81, "80 are free"),
    "TIME_WAIT of the loopback, reused": ("40000 40099", "2", [(LOCAL, 8000, "06")] * 4, 84, ""),
    "TIME_WAIT elsewhere": ("40000 40099", "2", [(AWAY, 8000, "06")] * 4, 81, "80 are free"),
    "TIME_WAIT elsewhere, reused": ("40000 40099", "1", [(AWAY, 8000, "06")] * 4, 84, ""),
    "no Linux": ("", "", [], 99_999, ""),
}


@pytest.mark.parametrize(("ports", "reuse", "rows", "n", "refused"), PORTS.values(), ids=PORTS)
def test_local_ports_are_counted_before_the_load(
    ports: str, reuse: str, rows: list[tuple[str, int, str]], n: int, refused: str, tmp_path: Path
) -> None:
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "net").mkdir()
    if ports:
        (tmp_path / "sys/net/ipv4/ip_local_port_range").write_text(ports.replace(" ", "\t"))
        (tmp_path / "sys/net/ipv4/tcp_tw_reuse").write_text(f"{reuse}\n")
    lines = [
        f"{k}: 0100007F:9C40 {host}:{port:04X} {state} 0 0\n" for k, (host, port, state) in enumerate(rows)
    ]
    (tmp_path / "net/tcp").write_text("".join(["  sl  local_address rem_address   st tx_queue\n", *lines]))
    with pytest.raises(WorkloadError, match=refused) if refused else nullcontext():
        ensure_ports(n, 8000, tmp_path)


def test_enough_file_descriptors_are_no_matter() -> None:
    ensure_sockets(1)


def test_a_driver_imports_nothing_heavy() -> None:
    code = "import sys, burstline.loadgen.driver.drive; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "numpy" in loaded
    heavy = {"asyncio", "httpx", "huggingface_hub", "pandas", "pyarrow", "matplotlib", "scipy", "tokenizers"}
    assert not {name for name in loaded if name in heavy}


DRIVER = """
import sys
from multiprocessing.connection import Client
from tests.loadgen.scripted import FakeEngine
from burstline.servers.registry import ENGINES
from burstline.loadgen.driver import drive
ENGINES["fake"] = FakeEngine()
conn = Client(sys.argv[1])
drive.run(conn.recv(), conn)
"""


def test_captures_so_far_outlive_a_killed_driver(tmp_path: Path) -> None:
    with served(stream) as server, Listener(str(tmp_path / "socket")) as listener:
        job = job_for(tmp_path, server.url, [float(5 * i) for i in range(2000)])
        process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "socket")])
        conn = listener.accept()
        conn.send(job)
        assert conn.recv() == Ready()
        conn.send(Go(time.monotonic_ns()))
        while len(server.asked) < 200:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        conn.close()
    assert [p.name for p in job.captures.iterdir()] == ["driver-0.zst.partial"]
    captures = list(read_captures(job.captures))
    assert len(captures) >= 20
    assert all(_is_whole(c) for c in captures)


def _is_whole(capture: Capture) -> bool:
    parsed = http1.parse(capture.reads)
    return parsed is not None and parsed[0].complete
