"""SIGTERM means the same as Ctrl-C: stop what runs, keep what there is."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM and SIGINT raise KeyboardInterrupt, also where a shell had us ignore the latter."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
