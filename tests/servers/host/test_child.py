"""How a child process is talked to, and how it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from burstline.servers.host.child import Child, ChildLostError, how_it_ended

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


def test_what_the_child_raises_is_raised_here_with_its_trace() -> None:
    with child("raise") as each, pytest.raises(ValueError, match="no such thing") as caught:
        each.receive(30)
    assert "in main" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("print and end", "the child ended with exit code 3: the last words"),
        ("be killed", "the child was killed by signal 9 (often: out of memory)"),
    ],
)
def test_a_child_that_ends_says_how(task: str, how: str) -> None:
    with child(task) as each, pytest.raises(ChildLostError) as caught:
        each.receive(30)
    assert str(caught.value) == how


def test_a_wait_has_a_limit_and_a_deaf_child_is_killed() -> None:
    each = child("be deaf", orphan_grace_s=600.0)
    assert each.receive(30) == "deaf"
    with pytest.raises(ChildLostError, match=r"the child did not answer within 0\.1 s"):
        each.receive(0.1)
    assert each.end(0.1) == -signal.SIGKILL
    assert each.end() == -signal.SIGKILL


def test_a_child_that_was_never_needed_ends_quietly() -> None:
    with Child(OBEDIENT, orphan_grace_s=5.0) as each:
        pass
    assert each.exit_code == 0


PARENT = """
import os, sys, time
from burstline.servers.host.child import Child
each = Child(sys.argv[1])
each.send("be deaf")
each.receive(30)
print(each.pid, flush=True)
time.sleep(600)
"""


def test_a_child_whose_thread_is_busy_ends_when_its_parent_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", PARENT, OBEDIENT]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        each = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    limit_s = time.monotonic() + 20
    while each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit_s
        time.sleep(0.02)


def test_signals_have_names() -> None:
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-signal.SIGTERM) == "was killed by signal 15 (SIGTERM)"
