"""Limits of memory, read before anything large is imported: there a library would fail in the middle."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

from burstline.servers.host.child import BLAS_THREADS

ADDRESS_SPACE: Final = 900 << 20
"""What libraries and a small run take of addresses, with one thread for numpy; measured were 780 MB."""
PER_THREAD: Final = 128 << 20
"""What each further one takes: numpy's and scipy's OpenBLAS reserve their buffers at once."""
MEMORY: Final = 192 << 20
"""What a small run takes of a control group, with all its processes; measured were 137 MB."""
CGROUPS: Final = Path("/sys/fs/cgroup")
GROUPS_OF_SELF: Final = Path("/proc/self/cgroup")


def refusal() -> str | None:
    """Which limit is too low for any verb, and how to raise it; None where none is.

    Where the address space has no room for a thread per core, numpy is told to start one.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        if limit < ADDRESS_SPACE:
            return (
                f"the address space is limited to {limit >> 20:,} MiB (ulimit -v {limit >> 10}), but "
                f"{ADDRESS_SPACE >> 20:,} MiB are needed: `ulimit -v {ADDRESS_SPACE >> 10}` or more"
            )
        if limit < ADDRESS_SPACE + PER_THREAD * (os.cpu_count() or 1):
            os.environ.setdefault(BLAS_THREADS, "1")
    most = _most_of_group()
    if most is not None and most < MEMORY:
        return (
            f"the control group is limited to {most >> 20:,} MiB of memory, but {MEMORY >> 20:,} MiB are "
            "needed: raise its memory.max, or the --memory of the container"
        )
    return None


def _most_of_group() -> int | None:
    """The lowest limit of our control group and those above it, in bytes; None without one."""
    limits = []
    with suppress(OSError):
        for line in GROUPS_OF_SELF.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, name = CGROUPS / controllers, "memory.limit_in_bytes" if controllers else "memory.max"
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # "max"
                    limits.append(int((folder / name).read_text()))
    return min(limits, default=None)
