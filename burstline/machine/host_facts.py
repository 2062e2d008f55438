"""The machine and the software that a run is made with; what is unknown is None.

What takes a while to find out is found out once.
"""

import os
import platform
import resource
import subprocess
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import psutil

from burstline.measure.record.manifest import HostFacts
from burstline.roofline.device.device import cpu_model
from burstline.servers.host.kernel import cpu_quotas, memory_limit, usable_cores
from burstline.servers.redact import words_of_server

_LIBRARIES = ("httpx", "numpy", "pandas", "pyarrow", "matplotlib", "huggingface_hub", "zstandard", "orjson")


@cache
def libraries() -> dict[str, str]:
    """The versions of the libraries that a run's numbers depend on."""
    return {name: version(name) for name in _LIBRARIES}


def host() -> HostFacts:
    return HostFacts(
        platform=system(),
        cpu=cpu_model(),
        cores=psutil.cpu_count(logical=True),
        cores_allowed=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg(),
        open_files_limit=resource.getrlimit(resource.RLIMIT_NOFILE),
        governor=_kernel_says("cpu/cpu0/cpufreq/scaling_governor"),
        smt={"0": False, "1": True}.get(_kernel_says("cpu/smt/active") or ""),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        cpu_quota=min(cpu_quotas().values(), default=None),
        memory_limit_bytes=memory_limit(),
    )


def _kernel_says(name: str) -> str | None:
    with suppress(OSError):
        return Path("/sys/devices/system", name).read_text().strip() or None
    return None


@cache
def commit() -> str | None:
    """The commit of Burstline's own sources where they are a checkout, with a + where they were changed.

    An image states its own.
    """
    here = Path(__file__).resolve().parents[2]
    with suppress(OSError, subprocess.SubprocessError):
        if (here / ".git").exists():  # no other project's, in whose folder an environment may lie
            command = ("git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*")
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=5, check=True)
            return done.stdout.strip() or None
    return os.environ.get("BURSTLINE_COMMIT") or None


def system() -> str:
    """`Linux-6.8.0-45-generic-x86_64-with-glibc2.39`: `platform.platform` would start a process for it."""
    kernel, libc = os.uname(), "".join(platform.libc_ver())
    return f"{kernel.sysname}-{kernel.release}-{kernel.machine}{libc and f'-with-{libc}'}"


MOST_OTHERS: Final = 0.05
"""The share of the machine that other processes may use while it is measured."""


def cpu_time() -> tuple[float, float]:
    """CPU seconds so far: the machine's, and those that neither this process nor its ended children used."""
    times = psutil.cpu_times()
    # Guests are in user time already.
    all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours_s = sum(each.ru_utime + each.ru_stime for each in used)
    return all_s, all_s - times.idle - getattr(times, "iowait", 0.0) - ours_s


NAMED: Final = 0.01
"""The share of the machine from which on a process is named."""


class Beside:
    """Who else computes on this machine, from when it is made; this process and its ended children not."""

    def __init__(self) -> None:
        (self._all_s, self._others_s), self._used = cpu_time(), _used_s()

    def others(self, ours: Collection[int] = ()) -> tuple[float, dict[str, float]]:
        """The share of the machine that others than `ours` took so far; and that of each, by name and pid."""
        (all_s, others_s), used = cpu_time(), _used_s()
        all_s = max(all_s - self._all_s, 1e-9)
        parts = {pid: (s - self._used.get(pid, ("", 0.0))[1]) / all_s for pid, (_, s) in used.items()}
        # What started a server watches it: the keeper of a `burstline serve`.
        above = (each.info["ppid"] for each in psutil.process_iter(["ppid"]) if each.pid in ours)
        part_of_ours = sum(parts.pop(pid, 0.0) for pid in {*ours, *above})
        # The kernel keeps 15 characters of a name; psutil takes more from the arguments, which may be secret.
        named = ((words_of_server(used[pid][0], 15), pid, s) for pid, s in parts.items() if s >= NAMED)
        share = max(0.0, (others_s - self._others_s) / all_s - part_of_ours)
        return share, {f"{name} (pid {pid})": part for name, pid, part in named}


def _used_s() -> dict[int, tuple[str, float]]:
    """Name and CPU seconds so far of each process but this one."""
    each = psutil.process_iter(["name", "cpu_times"])
    rows = [(process.pid, process.info["name"], process.info["cpu_times"]) for process in each]
    return {pid: (name, sum(used[:2])) for pid, name, used in rows if used and pid != os.getpid()}
