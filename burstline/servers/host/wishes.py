"""Calls that only make things better: a kernel or a sandbox may refuse them, and the run goes on without."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

SO_TIMESTAMPNS = 35  # include/uapi/asm-generic/socket.h; the socket module has no name for it


def send_at_once(sock: socket.socket) -> None:
    """Switch Nagle's algorithm off."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def stamp_reads(sock: socket.socket) -> None:
    """Have the kernel stamp what comes; without, only our own reads say when that was."""
    if sys.platform == "linux" and sys.maxsize > 2**32:
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


def prctl(option: int, value: int) -> None:
    """Set an option of this process (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
