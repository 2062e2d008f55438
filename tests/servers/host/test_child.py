"""How a child process is talked to, and how it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from burstline.servers.host import child as module
from burstline.servers.host.child import Child, ChildLostError, how_it_ended
from burstline.servers.redact import learn

OBEDIENT = "tests.servers.host.obedient"
ROOT = Path(__file__).parents[3]


def child(task: str, orphan_grace_s: float = 5.0) -> Child:
    started = Child(OBEDIENT, "the child", orphan_grace_s=orphan_grace_s)
    started.send(task)
    return started


def test_messages_go_both_ways_and_the_child_is_reaped() -> None:
    with child("echo") as each:
        each.send({"n": [1, 2]})
        assert each.receive(30) == {"n": [1, 2]}
    assert each.exit_code == 0
    assert not psutil.pid_exists(each.pid)


@pytest.mark.usefixtures("fresh")
def test_a_child_knows_all_secrets_before_its_task_also_those_that_were_learned_while_it_began() -> None:
    learn("sk-early-0042")
    with Child(OBEDIENT, orphan_grace_s=5.0) as each:
        learn("987654321")
        each.send("tell")
        assert each.receive(30) == ("987654321", "sk-early-0042")


def test_what_the_child_raises_is_raised_here_with_its_trace() -> None:
    with child("raise") as each, pytest.raises(ValueError, match="no such thing") as caught:
        each.receive(30)
    trace, place = caught.value.__notes__
    assert "in main" in trace
    assert place.startswith("tests/servers/host/obedient.py:")


@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("print and end", "the child ended with exit code 3: the last words"),
        ("talk", "the child ended with exit code 3: the last words"),
        ("be killed", "the child was killed by signal 9 (often: out of memory)"),
    ],
)
def test_a_child_that_ends_says_how(task: str, how: str) -> None:
    with child(task) as each, pytest.raises(ChildLostError) as caught:
        each.receive(30)
    assert str(caught.value) == how
    assert len(each.last_words()) <= 2000


def test_a_wait_has_a_limit_and_a_deaf_child_is_killed() -> None:
    each = child("be deaf", orphan_grace_s=600.0)
    assert each.receive(30) == "deaf"
    with pytest.raises(ChildLostError, match=r"the child did not answer within 0\.1 s"):
        each.receive(0.1)
    assert each.end(0.1) == -signal.SIGKILL
    assert each.end() == -signal.SIGKILL


def test_a_child_that_hangs_up_and_lives_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    each = child("hang up", orphan_grace_s=600.0)
    with pytest.raises(ChildLostError, match="the child closed its connection"):
        each.receive(30)
    assert each.end(0.1) == -signal.SIGKILL


def test_a_message_that_stays_half_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GIVE_S", 0.1)
    monkeypatch.setattr(module, "END_S", 0.1)
    each = child("say half", orphan_grace_s=600.0)
    with pytest.raises(ChildLostError, match="closed its connection"):
        each.receive(30)
    each.end(0.1)


def test_a_child_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKE_S", 0.1)
    each = child("be deaf", orphan_grace_s=600.0)
    assert each.receive(30) == "deaf"
    each.send(bytes(10_000_000))
    each.end(0.1)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_child_that_was_stopped_goes_on_when_it_is_told_something_or_is_to_end(is_told: bool) -> None:
    each = child("echo", orphan_grace_s=600.0)
    each.send("first") if is_told else None
    os.kill(each.pid, signal.SIGSTOP)
    if is_told:
        each.send("second")
        assert each.receive(30) == "first"
    assert each.end(30) in (0, 1), "it was not killed"


def test_a_process_that_even_a_kill_does_not_end_is_left_within_5_s(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []

    def never(timeout: float) -> int:
        waits_s.append(timeout)
        raise subprocess.TimeoutExpired("x", timeout)

    with monkeypatch.context() as held, child("be deaf", orphan_grace_s=600.0) as each:
        assert each.receive(30) == "deaf"
        held.setattr(each._process, "poll", lambda: None)
        held.setattr(each._process, "wait", never)
    assert 0 < sum(waits_s) <= 5
    assert each._process.wait(30) == -signal.SIGKILL


def test_what_cannot_be_pickled_is_told_in_words() -> None:
    with child("raise what cannot be pickled") as each, pytest.raises(RuntimeError, match="no such lock"):
        each.receive(30)


def test_a_child_may_outlive_its_parents_connection_by_its_grace() -> None:
    each = child("be deaf", orphan_grace_s=3.0)
    assert each.receive(30) == "deaf"
    each.connection.close()
    with pytest.raises(subprocess.TimeoutExpired):
        each._process.wait(0.5)
    assert each._process.wait(30) == 1
    each.end()


def test_a_child_is_a_session_of_its_own_and_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "importlib").mkdir()
    (tmp_path / "importlib" / "__init__.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with child("echo") as each:
        each.send("here")
        assert each.receive(30) == "here"
        assert os.getsid(each.pid) == each.pid


def test_a_child_that_was_never_needed_ends_quietly() -> None:
    with Child(OBEDIENT, orphan_grace_s=5.0) as each:
        pass
    assert each.exit_code == 0


PARENT = """
import os, sys, time
from burstline.servers.host import child as module
from burstline.servers.host.child import Child
each = Child(sys.argv[1])
each.send("be deaf")
each.receive(30)
forked = os.fork() if sys.argv[2:] else 0  # it holds the child's connection open
if forked or not sys.argv[2:]:
    print(each.pid, forked, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("forks", [(), pytest.param(("forks",), marks=pytest.mark.slow)])
def test_a_child_whose_thread_is_busy_ends_when_its_parent_is_killed(forks: tuple[str, ...]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", PARENT, OBEDIENT, *forks]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid, forked = map(int, parent.stdout.readline().split())
        each = psutil.Process(pid)
        parent.kill()
    limit_s = time.monotonic() + 20
    while each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    if forked:
        os.kill(forked, signal.SIGKILL)


def test_signals_have_names() -> None:
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-signal.SIGTERM) == "was killed by signal 15 (SIGTERM)"
