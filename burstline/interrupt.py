"""SIGTERM and SIGHUP mean the same as Ctrl-C: stop what runs, keep what there is."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_n_holding = 0
_is_pending = False


@contextmanager
def terminable() -> Iterator[None]:
    """Within it these signals raise KeyboardInterrupt, SIGINT also where a shell had us ignore it.

    SIGHUP stays ignored where it was (`nohup`). To be entered in the main thread.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it a signal waits until the end: for what must not be left half done (a message half read)."""
    global _n_holding, _is_pending
    _n_holding += 1
    try:
        yield
    finally:
        _n_holding -= 1
        if _is_pending and not _n_holding:
            _is_pending = False
            raise KeyboardInterrupt


def _interrupt(*_: object) -> None:
    global _is_pending
    if _n_holding:
        _is_pending = True
    else:
        raise KeyboardInterrupt
