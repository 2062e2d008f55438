"""Every wait of a cluster has a limit: workers, nodes and Ray that say nothing, seen without a cluster."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import socket
import threading
import time
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, answer_challenge
from types import SimpleNamespace

import pytest

from burstline.cluster import agent, placement, workers
from burstline.cluster.placement import RayOptions
from burstline.loadgen.capture.capture import Capture
from burstline.loadgen.capture.drive_report import ClockError
from burstline.loadgen.driver import job
from burstline.loadgen.driver.job import Done, Job, Stop
from burstline.servers import redact
from burstline.servers.host.child import END_S, ChildLostError, Failed
from burstline.servers.messages import EngineError
from tests.sockets import full_queue

CALM = SimpleNamespace(connection=SimpleNamespace(poll=lambda _: False))
"""A child that has nothing to say."""


def test_placed_workers_that_do_not_come_home_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(workers, "HOME_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        pytest.raises(EngineError, match=r"3 workers .* 0\.1 s"),
    ):
        workers._next_home(door, b"key", CALM, 3)


def test_who_comes_without_the_key_or_says_nothing_is_passed_over(monkeypatch):
    """Then one comes that knows the key, and takes nothing of what it is sent."""
    monkeypatch.setattr(workers, "SILENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as door:
        mute = socket.create_connection(door.getsockname())
        peers = [socket.create_connection(door.getsockname()) for _ in range(2)]
        wrong, right = (Connection(peer.detach()) for peer in peers)

        def come() -> None:
            for each, key in ((wrong, b"another"), (right, b"key")):
                with contextlib.suppress(Exception):
                    answer_challenge(each, key)

        coming = threading.Thread(target=come, daemon=True)
        coming.start()
        home, host = workers._next_home(door, b"key", CALM, 1)
        coming.join(20)
        with mute, wrong, right, home:
            assert host == "127.0.0.1"
            home.send("work")
            assert right.recv() == "work"
            with pytest.raises(OSError, match="temporarily unavailable"):
                home.send(bytes(50_000_000))


def test_a_worker_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(workers, "ANSWER_S", 0.05)
    ours, theirs = Pipe()
    with ours, theirs, pytest.raises(EngineError, match=r"worker 1 did not answer within 0\.05 s"):
        workers._answer(ours, "worker 1")


def test_a_worker_whose_clock_falls_silent_is_lost(monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", 0.05)

    def offset(n: int) -> None:
        raise ClockError("silent")

    ours, theirs = socket.socketpair()
    with theirs, Connection(ours.detach()) as home:
        driver = workers.RemoteDriver("worker 1", "node", home, SimpleNamespace(offset=offset), None)
        driver.ended = SimpleNamespace(wait=lambda _: time.sleep(0.01))
        driver._watch()
        with pytest.raises(ChildLostError, match=r"worker 1 did not answer for 0\.05 s: the node, or the"):
            driver.receive()


def test_what_came_home_is_written_a_part_at_a_time(tmp_path, monkeypatch):
    put, most = [0], [0]

    class Spool:
        def __init__(self, *_: object) -> None: ...

        def put(self, _: object) -> None:
            put[0] += 1
            most[0] = max(most[0], put[0])

        def drain(self) -> None:
            put[0] = 0

        def close(self) -> None: ...

    monkeypatch.setattr(workers, "CaptureWriter", Spool)
    captures = [SimpleNamespace(in_clock=print)] * 1000
    monkeypatch.setattr(workers, "read_captures", lambda _: captures)
    job = SimpleNamespace(captures=tmp_path / "captures", worker=0)
    (tmp_path / "arriving" / "0").mkdir(parents=True)
    driver = workers.RemoteDriver("worker 0", "node", None, None, None, _job=job, _arriving=io.BytesIO())
    driver.keep()
    assert most[0] <= workers.PER_DRAIN


@pytest.mark.parametrize("lost", ["it did not answer", None])
def test_what_a_lost_node_stopped_itself_is_not_kept_as_stopped_by_the_user(tmp_path, monkeypatch, lost):
    """`fire` then counts it as lost with the driver, and says why."""
    kept = []
    spool = SimpleNamespace(put=lambda made: kept.append(made.func.__self__), drain=list, close=list)
    monkeypatch.setattr(workers, "CaptureWriter", lambda *_: spool)
    failures = (None, "cancelled", "reset", "not_sent")
    captures = [Capture(k, 0, None, None, None, None, (), why) for k, why in enumerate(failures)]
    monkeypatch.setattr(workers, "read_captures", lambda _: captures)
    job = SimpleNamespace(captures=tmp_path / "captures", worker=0)
    (tmp_path / "arriving" / "0").mkdir(parents=True)
    driver = workers.RemoteDriver("worker 0", "node", None, None, None, _job=job, _arriving=io.BytesIO())
    driver.lost = lost
    driver.keep()
    assert [capture.index for capture in kept] == ([0, 2] if lost else [0, 1, 2, 3])


def test_what_ray_printed_is_kept_without_secrets(tmp_path, monkeypatch):
    @contextmanager
    def placed(*_: object):
        yield SimpleNamespace(last_words=lambda: "ray: no"), 0

    monkeypatch.setattr(workers, "placed", placed)
    monkeypatch.setattr(workers, "redacted", lambda words: f"{words}, masked")
    with workers.fleet_of(RayOptions(), 1, tmp_path / "log"):
        pass
    assert (tmp_path / "log").read_text() == "ray: no, masked"


@pytest.mark.parametrize(("n_answers", "limit_s"), [(0, placement.IMPORT_S), (1, placement.CONNECT_S)])
def test_ray_that_hangs_is_given_up_and_killed(monkeypatch, n_answers, limit_s):
    answers, killed = iter([None] * n_answers), []

    def receive(timeout_s: float) -> None:
        for answer in answers:
            return answer
        raise ChildLostError(f"Ray did not answer within {timeout_s:g} s")

    @contextmanager
    def child(*_: object):
        yield SimpleNamespace(send=lambda _: None, receive=receive, kill=lambda: killed.append(True))

    monkeypatch.setattr(placement, "Child", child)
    hung = pytest.raises(
        EngineError, match=f"no Ray cluster at auto: Ray did not answer within {limit_s:g} s; start"
    )
    with hung, placement.placed(RayOptions(), 1, 1, b"key"):
        pass
    assert limit_s <= 60
    assert killed, "Ray blocks in native code: its child may not hear that it is to end"


def test_a_long_error_of_ray_is_cut():
    assert len(placement.first_line(RuntimeError("x" * 5000))) <= 300


def test_a_cluster_that_accepts_and_says_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(placement, "KNOCK_S", 0.1)
    refused = pytest.raises(EngineError, match=r"no answer within 0\.1 s")
    with socket.create_server(("127.0.0.1", 0)) as mute, refused:
        placement.knock(f"127.0.0.1:{mute.getsockname()[1]}")


def test_a_node_that_cannot_connect_gives_up(monkeypatch):
    monkeypatch.setattr(agent, "REACH_S", 0.1)
    with full_queue() as (host, port):
        assert agent._refusal(f"http://{host}:{port}") == "timed out"
        with pytest.raises(TimeoutError):
            agent._dialled(host, port, b"key", agent.WorkerFacts("node", b"token"))


@pytest.mark.usefixtures("fresh")
def test_a_worker_gets_the_secrets_before_its_job_and_knows_them(tmp_path):
    redact.learn("sk-of-ours-0042")
    ours, theirs = Pipe()
    with ours, theirs:
        clock = SimpleNamespace(offset=lambda n: None)
        driver = workers.RemoteDriver("worker 0", "node", ours, clock, None)
        driver.start(SimpleNamespace(captures=tmp_path / "captures", worker=0), memoryview(bytearray(8)))
        driver.ended.set()
        secrets, job = theirs.recv()
        assert job.worker == 0
    driver._arriving.close()
    redact._learned.clear()
    relay = object.__new__(agent._Agent)
    relay._start = lambda job: None
    relay._obey((secrets, object.__new__(Job)))
    assert redact.known_secrets() == ("sk-of-ours-0042",)


def refusing() -> None:
    raise ConnectionRefusedError


def test_an_agent_whose_home_is_silent_stops_its_driver_and_ends(monkeypatch, tmp_path):
    for name in ("SILENCE_S", "STOP_S"):
        monkeypatch.setattr(agent, name, 0.1)
    monkeypatch.setattr(agent, "TAIL_S", 0.01)
    monkeypatch.setattr(agent.os, "_exit", lambda code: told.append(code))
    told: list[object] = []
    each = object.__new__(agent._Agent)
    each._clock, each._spool_path = SimpleNamespace(silent_s=lambda: 99.0), tmp_path / "never"
    each._leaving, each._dial = threading.Lock(), refusing
    each._mind_home(SimpleNamespace(send=told.append))
    assert told == [Stop(), 1]
    each._listen(SimpleNamespace(receive=lambda: Done(None)))  # home may be heard again by then
    assert isinstance(each._last, Failed)
    assert "it stopped itself" in str(each._last.error)


def test_a_node_that_comes_back_hands_over_what_home_lacks(tmp_path):
    """Home has the first four bytes of its captures."""
    spool, told = tmp_path / "node" / "driver-0.zst", []
    spool.parent.mkdir()
    spool.write_bytes(b"0123456789")
    ours, theirs = Pipe()
    each = object.__new__(agent._Agent)
    each._leaving, each._dial, each._cells = threading.Lock(), lambda: theirs, (1, 2)
    each._spool_path, each._folder = spool, spool.parent
    leaving = threading.Thread(target=each._leave, args=(SimpleNamespace(send=told.append),), daemon=True)
    row, arriving = memoryview(bytearray(16)).cast("q"), io.BytesIO()
    arriving.write(b"0123")
    driver = workers.RemoteDriver("worker 0", "node", None, None, None, _row=row, _arriving=arriving)
    leaving.start()
    driver.take_back(ours)
    leaving.join(20)
    assert arriving.getvalue() == b"0123456789"
    assert (list(row), told) == ([1, 2], [Stop()])
    assert not spool.parent.exists()


def test_a_long_spool_goes_home_in_pieces(monkeypatch):
    monkeypatch.setattr(agent, "PIECE_BYTES", 10)
    sent: list[agent.Tail] = []
    each = object.__new__(agent._Agent)
    each._spool, each._cells, each._home = io.BytesIO(b"x" * 25), (1, 2), SimpleNamespace(send=sent.append)
    while each._tail():
        pass
    assert [len(tail.captures) for tail in sent] == [10, 10, 5, 0]


def test_folders_of_killed_agents_are_removed_those_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(agent.tempfile, "tempdir", str(tmp_path))
    killed, young, living = (tmp_path / f"mine-{name}" for name in ("killed", "young", "living"))
    for each in (killed, young, living):
        each.mkdir()
    for each in (killed, living):
        os.utime(each, (0, 0))
    lock = os.open(living, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own = agent.own_folder("mine-")
    finally:
        os.close(lock)
    assert sorted(tmp_path.iterdir()) == sorted([young, living, own])


def test_drivers_are_ended_together_within_one_grace(monkeypatch):
    graces_s: list[float] = []
    orphans_s: list[float] = []

    def child(*_: object, orphan_grace_s: float) -> SimpleNamespace:
        orphans_s.append(orphan_grace_s)
        return SimpleNamespace(send=lambda _: None, ask_to_end=lambda: None, end=graces_s.append)

    monkeypatch.setattr(job, "Child", child)
    jobs = [SimpleNamespace(worker=k) for k in range(3)]
    with job.local_drivers(jobs, None):
        pass
    assert len(graces_s) == 3
    assert max(graces_s) <= END_S
    assert max(orphans_s) <= 10
