"""SIGTERM and SIGHUP mean the same as Ctrl-C: stop what runs, keep what there is."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_AGAIN_S = 0.05
_IMPORT = "<frozen importlib._bootstrap>"
_LOCKING = (threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__)

_n_holding = 0
_is_pending = False
_on_first: Callable[[], None] | None = None
_outermost: FrameType | None = None


@contextmanager
def terminable() -> Iterator[None]:
    """Within it these signals raise KeyboardInterrupt, SIGINT also where a shell had us ignore it.

    One that meets an import, or a condition's lock as it is taken or given back, is raised after it: a lock
    that is never released would stop every other thread that needs it. SIGHUP stays ignored where it was
    (`nohup`). In another thread than the main one it does nothing.
    """
    global _outermost
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGALRM)}
    hook = sys.unraisablehook
    outermost, _outermost = _outermost, sys._getframe(2)  # the frame of the `with` statement
    for number in before:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    sys.unraisablehook = lambda lost: _again(lost, hook)
    try:
        yield
    finally:
        _outermost = outermost
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _again(lost: "sys.UnraisableHookArgs", hook: Callable[["sys.UnraisableHookArgs"], object]) -> None:
    """An interrupt that met a destructor was swallowed there: it comes again in a moment."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        hook(lost)


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


@contextmanager
def finishing(tell: Callable[[], None]) -> Iterator[None]:
    """Within it the first signal calls `tell`, and interrupts at the end; a second one interrupts at once.

    `tell` runs in a signal handler: it may not use a buffered stream.
    """
    global _on_first
    was_told = False

    def first() -> None:
        nonlocal was_told
        was_told = True
        tell()

    _on_first = first
    try:
        yield
    finally:
        _on_first = None
    if was_told:
        raise KeyboardInterrupt


def _interrupt(_: int, frame: FrameType | None) -> None:
    global _is_pending, _on_first
    if _n_holding:
        _is_pending = True
    elif _on_first is not None:
        first, _on_first = _on_first, None
        first()
    elif _is_importing(frame) or (frame is not None and frame.f_code in _LOCKING):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame is not _outermost:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False
