"""What this process is given of memory and disk, read before anything large is imported and before a load."""

import os
import resource
import tempfile
from pathlib import Path
from typing import Final

from burstline.servers.host.child import BLAS_THREADS
from burstline.servers.host.kernel import memory_limit

ADDRESS_SPACE: Final = 900 << 20
"""What libraries and a small run take of addresses, with one thread for numpy; measured were 780 MB."""
PER_THREAD: Final = 128 << 20
"""What each further one takes: numpy's and scipy's OpenBLAS reserve their buffers at once."""
MEMORY: Final = 192 << 20
"""What a small run takes of a control group, with all its processes; measured were 137 MB."""


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
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return "no folder for temporary files can be written; in a container: docker run --tmpfs /tmp"
    most = memory_limit()
    if most is not None and most < MEMORY:
        return (
            f"the control group is limited to {most >> 20:,} MiB of memory, but {MEMORY >> 20:,} MiB are "
            "needed: raise its memory.max, or the --memory of the container"
        )
    return None


def lost_with_container(place: Path) -> str | None:
    """Why a file there would be gone with a container of our image: no mount holds it; None for any other."""
    if "BURSTLINE_IN_IMAGE" not in os.environ:
        return None
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()} - {"/"}
    if not mounts.isdisjoint(map(str, ((place := place.resolve()), *place.parents))):
        return None
    run = 'docker run -v "$PWD/runs:/runs" --user "$(id -u):$(id -g)"'
    return f"{place} is inside this container and is gone with it; expected a mounted folder: {run}"
