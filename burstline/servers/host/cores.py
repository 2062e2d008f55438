"""How many of this machine's cores a server gets (`keeper.py`, `_start`, pins it), and what they can."""

from contextlib import suppress
from pathlib import Path
from typing import Final

from burstline.servers.host.kernel import usable_cores


def threads_for_server() -> int | None:
    """How many threads leave the client a core on a machine of 2 to 4; None on any other machine.

    An engine that takes every core spins on all of them between its steps, and its front end competes with
    the client for the rest: the client then reads late.
    """
    n = usable_cores()
    return n - 1 if 2 <= n <= 4 else None


CPUINFO: Final = Path("/proc/cpuinfo")


def has_bf16() -> bool:
    """Whether the CPU has instructions for bf16: avx512_bf16 or amx_bf16, bf16 on Arm; True where unknown."""
    with suppress(OSError):
        return "bf16" in CPUINFO.read_text()
    return True
