"""What other processes took of the CPU while tests judged times, sampled from a process of low priority.

`python -m tests.witness PID` writes a line to stdout each half second: the monotonic clock, s, and the share
of the machine's CPU that neither PID nor its descendants took (the hypervisor's steal counts).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

from burstline.machine.host_facts import cpu_time

EVERY_S: Final = 0.5


class Witness:
    """The CPU that others took, from its start to its end."""

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._foreign: list[float] = []
        argv = [sys.executable, "-m", __name__, str(os.getpid())]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at_s, foreign = map(float, line.split())
            self._foreign.append(foreign)
            self._at_s.append(at_s)

    def most(self, since_s: float, until_s: float) -> float:
        """The largest share that others took in a sample between two moments of the monotonic clock.

        The second may be now: the sample that holds it is waited for.
        """
        while self._process.poll() is None and (not self._at_s or self._at_s[-1] < until_s):
            time.sleep(EVERY_S / 10)
        low, high = bisect_right(self._at_s, since_s), bisect_left(self._at_s, until_s)
        return max(self._foreign[low : high + 1], default=0.0)

    def mean(self) -> float:
        """The share that others took since the start."""
        return sum(self._foreign) / max(len(self._foreign), 1)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Used(NamedTuple):
    """A process: its parent, the CPU seconds it used, and those of ended children that it waited for."""

    parent: int
    own_s: float
    children_s: float


Family = Mapping[int, Used]
"""A process and all its descendants, by pid."""


def family(pid: int) -> Family:
    found = {}
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        if each.pid != os.getpid():
            with suppress(psutil.Error):
                times = each.cpu_times()
                found[each.pid] = Used(each.ppid(), sum(times[:2]), sum(times[2:4]))
    return found


def used_between(before: Family, after: Family) -> float:
    """CPU seconds that a family used between two looks at it.

    A process that ended stands in the children's times of its parent, but for a parent that does not wait for
    its children (Ray's): there its times are gone, and must not be counted as lost.
    """
    known_s: Counter[int] = Counter()
    for pid in before.keys() - after.keys():
        heir = before[pid].parent
        while heir in before and heir not in after:
            heir = before[heir].parent
        known_s[heir] += before[pid].own_s + before[pid].children_s
    none = Used(0, 0.0, 0.0)
    used_s = 0.0
    for pid, now in after.items():
        then = before.get(pid, none)
        used_s += now.own_s - then.own_s + max(now.children_s - then.children_s - known_s[pid], 0.0)
    return used_s


def main(pid: int) -> None:
    os.nice(19)
    members = family(pid)
    all_s, others_s = cpu_time()
    while psutil.pid_exists(pid) and os.getppid() == pid:
        time.sleep(EVERY_S)
        now = family(pid)
        since_s = all_s, others_s + used_between(members, now)
        all_s, others_s = cpu_time()
        foreign = max(0.0, others_s - since_s[1]) / max(all_s - since_s[0], 1e-9)
        print(f"{time.monotonic():.3f} {foreign:.4f}", flush=True)
        members = now


if __name__ == "__main__":
    with suppress(psutil.NoSuchProcess, BrokenPipeError, KeyboardInterrupt):
        main(int(sys.argv[1]))
