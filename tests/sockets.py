"""Servers that behave badly below HTTP."""

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_queue() -> Iterator[tuple[str, int]]:
    """The address of a server that accepts no more connections: they stay half open."""
    with socket.socket() as door, contextlib.ExitStack() as kept:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        for _ in range(2):
            waiting = kept.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(door.getsockname())
        yield door.getsockname()
