"""Memory and CPU time of process trees, counted from when they are first seen."""

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil


class ProcessTree:
    """Some processes and, if asked for, all that descend from them.

    CPU time counts from the making of the tree for processes older than it, and keeps the ended ones' share:
    it never falls, but what a process used between the last sample and its end is lost.
    """

    def __init__(self) -> None:
        self._since = psutil.Process().create_time()
        self._living: dict[psutil.Process, float] = {}
        self._last: dict[psutil.Process, float] = {}
        self._ended_cpu_s = 0.0
        self.cpu_s = 0.0

    def adopt(self, pids: Iterable[int]) -> None:
        """Counts these processes from now on."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._add(psutil.Process(pid))

    def adopt_descendants(self, pid: int) -> None:
        """Counts all that descend from a process, and not itself."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(pid).children(recursive=True):
                self._add(process)

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._living}

    def _add(self, process: psutil.Process) -> None:
        if process in self._living:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            is_older = process.create_time() < self._since
            self._living[process] = _cpu_s(process) if is_older else 0.0

    def read(self) -> dict[str, float]:
        """Sums over the living processes; `cpu_s` over the ended ones too.

        `rss_bytes` counts a page that n processes share n times, `anon_bytes` leaves shared pages out, and
        `hwm_bytes`, the sum of each process's own peak, is what the tree can have held at most.
        """
        sums = dict.fromkeys(("rss_bytes", "anon_bytes", "hwm_bytes"), 0.0)
        cpu_s = 0.0
        n_threads = 0
        for process, base_s in list(self._living.items()):
            try:
                memory, used_s = process.memory_info(), _cpu_s(process) - base_s
                n_threads += process.num_threads()
            except psutil.NoSuchProcess:
                del self._living[process]
                self._ended_cpu_s += self._last.pop(process, 0.0)
                continue
            self._last[process] = used_s
            cpu_s += used_s
            sums["rss_bytes"] += memory.rss
            sums["anon_bytes"] += memory.rss - getattr(memory, "shared", 0)
            sums["hwm_bytes"] += _peak_bytes(process.pid) or memory.rss
        self.cpu_s = cpu_s + self._ended_cpu_s
        return sums | {"n_processes": len(self._living), "n_threads": n_threads, "cpu_s": self.cpu_s}

    def pss_bytes(self) -> float | None:
        """Memory with each shared page divided among its sharers; None where the system does not tell.

        Dear: the kernel walks all page tables while the process cannot change them. Not for a running load.
        """
        try:
            return float(sum(process.memory_full_info().pss for process in self._living))
        except (psutil.Error, AttributeError):
            return None


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _peak_bytes(pid: int) -> int | None:
    """The most memory a process has held at any moment, between samples too (VmHWM in proc(5))."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
