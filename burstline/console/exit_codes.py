"""Exit codes of the command; scripts and CI rely on them."""

import errno
from collections.abc import Iterable

from burstline.errors import RooflineError
from burstline.servers.messages import EngineError
from burstline.workloads.request import WorkloadError

DONE = 0
OUR_BUG = 1
USAGE = 2
TARGET_MISSED = 3
INCONCLUSIVE = 4
ENGINE_FAILED = 5
INTERRUPTED = 130


def of_error(error: Exception) -> int:
    """The code of an exception: OUR_BUG where it is neither the server's nor the user's."""
    if isinstance(error, EngineError):
        return ENGINE_FAILED
    no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    full = isinstance(error, OSError) and error.errno in no_room
    return USAGE if full or isinstance(error, MemoryError | WorkloadError | RooflineError) else OUR_BUG


def of_results(results: Iterable[str]) -> int:
    found = set(results)
    if "fail" in found:
        return TARGET_MISSED
    return INCONCLUSIVE if "inconclusive" in found else DONE


def worst(codes: Iterable[int]) -> int:
    """The code that stands for several runs; DONE where there are none."""
    return max(codes, key=_SEVERITY.index, default=DONE)


def best(codes: Iterable[int]) -> int:
    return min(codes, key=_SEVERITY.index)


_SEVERITY = (DONE, INCONCLUSIVE, TARGET_MISSED, USAGE, OUR_BUG, ENGINE_FAILED, INTERRUPTED)
