"""Sources of the watcher: process trees, and the machine's CPU time, energy, pressure and throttling."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from burstline.servers.host.kernel import cpu_quotas

PROC = Path("/proc")
POWERCAP = Path("/sys/class/powercap")
RANGE = "max_energy_range_uj"


class MissingSourceError(RuntimeError):
    """This machine does not have the source; the words say why."""


class Source(Protocol):
    """Something that can be sampled: values by name, each name with its unit."""

    name: str

    def read(self) -> Mapping[str, float]: ...


class HostCpu:
    """CPU time of the whole machine, from when it is made.

    `others_cpu_s` is what neither the server, nor the clients, nor the watcher used, `steal_s` what a
    hypervisor gave to its other guests. All CPUs together: two busy CPUs use 2 s a second.
    """

    name = "host"

    def __init__(self, ours_cpu_s: Callable[[], float]) -> None:
        self._ours_cpu_s = ours_cpu_s
        self._busy_base_s, self._steal_base_s = _busy_and_steal_s()
        self._ours_base_s = ours_cpu_s()
        self._others_s = 0.0

    def read(self) -> Mapping[str, float]:
        busy_s, steal_s = _busy_and_steal_s()
        busy_s -= self._busy_base_s
        # The kernel counts in ticks of 10 ms, so the difference may step back by one.
        self._others_s = max(self._others_s, busy_s - (self._ours_cpu_s() - self._ours_base_s))
        return {
            "busy_s": busy_s,
            "others_cpu_s": self._others_s,
            "steal_s": steal_s - self._steal_base_s,
            "n_cpus": float(psutil.cpu_count() or 1),
        }


class CpuPressure:
    """How long some task of the machine was runnable and had no CPU.

    Linux PSI, "some": https://docs.kernel.org/accounting/psi.html
    """

    name = "pressure"

    def __init__(self) -> None:
        self._base_s = 0.0
        self._base_s = self.read()["cpu_waiting_s"]

    def read(self) -> Mapping[str, float]:
        try:
            some = (PROC / "pressure" / "cpu").read_text().splitlines()[0]
        except OSError as error:
            raise MissingSourceError(f"no pressure stall information: {error}") from error
        return {"cpu_waiting_s": int(some.rpartition("total=")[2]) / 1e6 - self._base_s}


class Throttling:
    """How often and how long CPU quotas stopped our control group, or one above it, summed over CPUs.

    Whatever shares a quota, the client was stopped with it.
    """

    name = "cgroup"

    def __init__(self) -> None:
        self._files = [folder / "cpu.stat" for folder in cpu_quotas()]
        if not self._files:
            raise MissingSourceError("the control group has no CPU quota")
        self._base: Mapping[str, float] = {}
        self._base = self.read()

    def read(self) -> Mapping[str, float]:
        sums = {"n_throttled": 0.0, "throttled_s": 0.0}
        for file in self._files:
            stat = dict(line.split() for line in file.read_text().splitlines())
            sums["n_throttled"] += float(stat["nr_throttled"])
            # Version 2 counts microseconds, version 1 nanoseconds.
            sums["throttled_s"] += int(stat.get("throttled_usec", 0)) / 1e6
            sums["throttled_s"] += int(stat.get("throttled_time", 0)) / 1e9
        return {name: value - self._base.get(name, 0.0) for name, value in sums.items()}


class Rapl:
    """Energy of all CPU packages, from when it is made.

    Linux: https://docs.kernel.org/power/powercap/powercap.html. Counters wrap; since 2020 only root may read
    them on most systems (CVE-2020-8694).
    """

    name = "cpu"

    def __init__(self) -> None:
        self._packages = sorted(path for path in POWERCAP.glob("intel-rapl:*") if path.name.count(":") == 1)
        if not self._packages:
            raise MissingSourceError(f"no RAPL: no CPU package in {POWERCAP}")
        self._last_uj = [self._count(path, "energy_uj") for path in self._packages]
        self._energy_j = 0.0

    def read(self) -> Mapping[str, float]:
        for k, path in enumerate(self._packages):
            now_uj = self._count(path, "energy_uj")
            grown_uj = now_uj - self._last_uj[k]
            self._energy_j += (grown_uj if grown_uj >= 0 else grown_uj + self._count(path, RANGE)) / 1e6
            self._last_uj[k] = now_uj
        return {"energy_j": self._energy_j}

    @staticmethod
    def _count(package: Path, name: str) -> int:
        try:
            return int((package / name).read_text())
        except OSError as error:
            raise MissingSourceError(f"no RAPL: {package / name}: {error.strerror}") from error


def _busy_and_steal_s() -> tuple[float, float]:
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq")
    return sum(getattr(times, name, 0.0) for name in names), getattr(times, "steal", 0.0)


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
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if (process := psutil.Process(pid)) not in self._living:
                    is_older = process.create_time() < self._since
                    self._living[process] = _cpu_s(process) if is_older else 0.0

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._living}

    def read(self) -> dict[str, float]:
        """Sums over the living processes; `cpu_s` over the ended ones too.

        `rss_bytes` counts a page that n processes share n times, `anon_bytes` leaves shared pages out.
        """
        sums = dict.fromkeys(("rss_bytes", "anon_bytes"), 0.0)
        cpu_s = 0.0
        for process, base_s in list(self._living.items()):
            try:
                memory, used_s = process.memory_info(), _cpu_s(process) - base_s
            except psutil.NoSuchProcess:
                del self._living[process]
                self._ended_cpu_s += self._last.pop(process, 0.0)
                continue
            self._last[process] = used_s
            cpu_s += used_s
            sums["rss_bytes"] += memory.rss
            sums["anon_bytes"] += memory.rss - getattr(memory, "shared", 0)
        self.cpu_s = cpu_s + self._ended_cpu_s
        return sums | {"n_processes": len(self._living), "cpu_s": self.cpu_s}

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
