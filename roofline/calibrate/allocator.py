"""Memory that is freed stays with the process, as in engines that keep their buffers from step to step.

glibc returns large blocks to the system at once, and in threads often. Taking them back costs a page fault
for each 4 KiB: up to 80% of attention's time, or nothing, depending on what else was allocated.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_ONE_BLOCK_AT_MOST = 32 << 20  # glibc's own limit; what is larger is mapped each time


def keep_freed_memory() -> None:
    """Call it before threads start. Nothing happens where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_MMAP_THRESHOLD, _ONE_BLOCK_AT_MOST)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_ARENA_MAX, 1)  # a thread's own arena is returned in pieces of 64 MiB all the same
