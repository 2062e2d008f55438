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
from contextlib import suppress
from typing import Final

import psutil

from burstline.machine.host_facts import CpuTime

EVERY_S: Final = 0.5


class Witness:
    """The CPU that others took, from its start to its end."""

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._foreign: list[float] = []
        self._began = cpu_time(os.getpid())
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
        return self._began.others_until(cpu_time(os.getpid()))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def cpu_time(pid: int) -> CpuTime:
    """The machine's CPU so far; this process takes part, and `pid` with its descendants."""
    process = psutil.Process(pid)
    family_s = 0.0
    for each in (process, *process.children(recursive=True)):
        if each.pid != os.getpid():
            with suppress(psutil.Error):
                family_s += sum(each.cpu_times()[:4])  # its own and those of children that it waited for
    return CpuTime.now(family_s)


def main(pid: int) -> None:
    os.nice(19)
    before = cpu_time(pid)
    while psutil.pid_exists(pid) and os.getppid() == pid:
        time.sleep(EVERY_S)
        after = cpu_time(pid)
        print(f"{time.monotonic():.3f} {before.others_until(after):.4f}", flush=True)
        before = after


if __name__ == "__main__":
    with suppress(psutil.NoSuchProcess, BrokenPipeError, KeyboardInterrupt):
        main(int(sys.argv[1]))
