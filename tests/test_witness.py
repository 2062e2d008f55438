"""What a family of processes used, when some of them end."""

import subprocess
import sys
import time

import pytest

from tests.witness import Used, Witness, used_between

BEFORE = {1: Used(0, 10.0, 2.0), 2: Used(1, 5.0, 0.0), 3: Used(2, 3.0, 1.0)}


@pytest.mark.parametrize(
    ("after", "used_s"),
    [
        ({1: Used(0, 10.5, 2.0), 2: Used(1, 5.1, 0.0), 3: Used(2, 3.2, 1.0)}, 0.8),
        ({1: Used(0, 10.5, 2.3), 2: Used(1, 5.0, 0.0), 3: Used(2, 3.0, 1.0)}, 0.8),  # one came and went
        ({1: Used(0, 10.5, 2.0), 2: Used(1, 5.0, 4.2), 3: Used(1, 3.0, 1.0)}, 4.7),
        ({1: Used(0, 10.5, 2.0), 2: Used(1, 5.0, 4.2)}, 0.7),  # 3 ended, and 2 had waited for it
        ({1: Used(0, 10.5, 2.0), 2: Used(1, 5.0, 0.0)}, 0.5),  # 3 ended, and 2 does not wait
        ({1: Used(0, 10.5, 11.2)}, 0.7),  # 3, then 2
        ({1: Used(0, 10.5, 2.0)}, 0.5),
        ({**BEFORE, 4: Used(1, 0.3, 0.0)}, 0.3),
    ],
)
def test_the_times_of_a_process_that_ends_are_counted_once(after, used_s):
    assert used_between(BEFORE, after) == pytest.approx(used_s)


@pytest.mark.slow
def test_children_that_nobody_waits_for_are_no_others():
    code = (
        "import os, signal, time; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "if not os.fork():\n"
        "    end = time.monotonic() + 3\n"
        "    while time.monotonic() < end: pass\n"
        "    os._exit(0)\n"
        "time.sleep(5)"
    )
    witness = Witness()
    began_s = time.monotonic()
    try:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
        own = witness.most(began_s + 2.5, time.monotonic())  # when it ended
    finally:
        witness.end()
    assert own < 1.0, "3 s of a child in one sample would be more than the machine has"
