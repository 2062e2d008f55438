"""What the kernel grants this process, and optional requests to it.

A kernel or a sandbox may refuse the requests: the run goes on without. The control group says how much CPU
time and memory we may use, in versions 1 and 2: https://docs.kernel.org/admin-guide/cgroup-v2.html, and
cgroup-v1/ and scheduler/sched-bwc.html there.
"""

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

SO_TIMESTAMPNS = 35  # include/uapi/asm-generic/socket.h; the socket module has no name for it
CGROUPS: Final = Path("/sys/fs/cgroup")
GROUPS_OF_SELF: Final = Path("/proc/self/cgroup")
CPUINFO: Final = Path("/proc/cpuinfo")
UNLIMITED_BYTES: Final = 1 << 60
"""Version 1 writes the largest multiple of a page where there is no limit."""


def send_at_once(sock: socket.socket) -> None:
    """Switch Nagle's algorithm off."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def stamp_reads(sock: socket.socket) -> None:
    """Have the kernel stamp what comes; without, only our own reads say when that was."""
    if sys.maxsize > 2**32:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def allowed_cores() -> list[int]:
    """The cores that this process may use, in order; all of them where the kernel does not say."""
    with suppress(AttributeError, OSError):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def keep_to(pid: int, cores: Sequence[int]) -> None:
    """Run a process, 0 for this one, on these cores only; on none that are named, leave it."""
    with suppress(AttributeError, OSError, ValueError):
        os.sched_setaffinity(pid, cores)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(allowed_cores())


def threads_for_server() -> int | None:
    """How many threads leave the client a core on a machine of 2 to 4; None on any other machine.

    An engine that takes every core spins on all of them between its steps, and its front end competes with
    the client for the rest: the client then reads late.
    """
    n = usable_cores()
    return n - 1 if 2 <= n <= 4 else None


def has_bf16() -> bool:
    """Whether the CPU has instructions for bf16: avx512_bf16 or amx_bf16, bf16 on Arm; True where unknown."""
    with suppress(OSError):
        return "bf16" in CPUINFO.read_text()
    return True


def prctl(option: int, value: int) -> None:
    """Set an option of this process; of this thread, where the kernel keeps it for each."""
    import ctypes  # here: most processes of a run need none of it

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def folders(controller: str) -> Iterator[Path]:
    """The folders of our group and of those above it, the innermost first; in a container it is the root."""
    for line in GROUPS_OF_SELF.read_text().splitlines() if GROUPS_OF_SELF.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = (CGROUPS / controllers, CGROUPS / controller) if controllers else (CGROUPS,)
        root = next(filter(Path.is_dir, roots), CGROUPS)
        group = root / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def cpu_quotas() -> dict[Path, float]:
    """How many CPUs' time our group may use, by the folder of each group that has a quota."""
    quotas = {}
    for folder in folders("cpu"):
        with suppress(OSError, ValueError):  # "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            quotas[folder] = quota / period
        with suppress(OSError, ValueError):
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            quotas[folder] = quota / period
    return {folder: quota for folder, quota in quotas.items() if quota > 0}  # version 1: -1 for none


def memory_limit() -> int | None:
    """How much memory our group may hold, in bytes; None without a limit."""
    limits = []
    for folder in folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max"
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < UNLIMITED_BYTES), default=None)
