"""How many of this machine's cores a server gets; `keeper.py`, `_start`, pins it to them."""

from __future__ import annotations

from burstline.servers.host.kernel import usable_cores


def threads_for_server() -> int | None:
    """How many threads leave the client a core on a machine of 2 to 4; None on any other machine.

    An engine that takes every core spins on all of them between its steps, and its front end competes with
    the client for the rest: the client then reads late.
    """
    n = usable_cores()
    return n - 1 if 2 <= n <= 4 else None
