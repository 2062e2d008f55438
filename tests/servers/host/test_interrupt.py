"""When an interrupt is raised: at once, after an import, after what must be whole, or at a second one."""

import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from burstline.servers.host.interrupt import finishing, terminable, uninterrupted


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    sum(range(1000))  # Python looks for signals between its instructions


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_of_the_signals_interrupts_and_all_is_as_before(number: int) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: None)
    before, hook = [signal.getsignal(each) for each in signal.Signals], sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), terminable():  # noqa: PT012
        send(number)
        time.sleep(5)
    assert [signal.getsignal(each) for each in signal.Signals] == before
    assert sys.unraisablehook is hook


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable():
        send(signal.SIGHUP)


def test_in_another_thread_it_does_nothing() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with terminable():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


def test_an_interrupt_that_meets_an_import_is_raised_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised within, it may leave a module's lock held: another thread's imports would wait for ever."""
    (tmp_path / "interrupted_half_way.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nsum(range(1000))\nis_whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    is_whole = False

    def imports() -> None:
        nonlocal is_whole
        with terminable():
            is_whole = importlib.import_module("interrupted_half_way").is_whole
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        imports()
    assert is_whole


def test_an_interrupt_that_meets_a_lock_is_raised_behind_it() -> None:
    """Raised before the `with` statement has it, it is never given back: a pool's threads wait for ever.

    The stand-in of a lock sends the signal as it is taken, in no frame of its own.
    """
    held: list[str] = []
    take = partial(os.kill, os.getpid(), signal.SIGTERM)
    lock = SimpleNamespace(
        acquire=take, release=take, __enter__=take, __exit__=lambda *_: held.append("given")
    )
    with pytest.raises(KeyboardInterrupt), terminable(), threading.Condition(cast("threading.Lock", lock)):  # noqa: PT012
        held.append("taken")
        time.sleep(5)
    assert held == ["taken", "given"]


def test_an_import_around_it_delays_no_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m burstline` itself runs in one, and so does a test's own module."""
    (tmp_path / "runs_while_it_is_imported.py").write_text(
        "import os, signal, time\nfrom burstline.servers.host.interrupt import terminable\n"
        "def work():\n    with terminable():\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        sum(range(1000))\n        global went_on\n        went_on = True\n        time.sleep(5)\n"
        "went_on = False\n"
        "try:\n    work()\nexcept KeyboardInterrupt:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert not importlib.import_module("runs_while_it_is_imported").went_on


def test_an_interrupt_that_meets_a_destructor_comes_again() -> None:
    class Destroyed:
        def __del__(self) -> None:
            send()

    with pytest.raises(KeyboardInterrupt), terminable():  # noqa: PT012
        destroyed = Destroyed()
        del destroyed
        gc.collect()
        time.sleep(5)


def test_another_error_of_a_destructor_goes_where_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: lost.append(each.exc_type))

    class Destroyed:
        def __del__(self) -> None:
            raise ValueError

    with terminable():
        destroyed = Destroyed()
        del destroyed
        gc.collect()
    assert lost == [ValueError]


def test_what_must_be_whole_is_whole_before_the_interrupt() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), terminable():  # noqa: PT012
        with uninterrupted():
            with uninterrupted():
                send()
                steps.append("inner")
            steps.append("outer")
        steps.append("behind")
    assert steps == ["inner", "outer"]
    with uninterrupted():
        steps.append("a second time")


def twice(told: Callable[[], None], steps: list[str]) -> None:
    with terminable(), finishing(told):
        send()
        steps.append("goes on")
        if len(steps) == 1:
            send()
            steps.append("never")


def test_while_a_report_is_made_the_first_interrupt_is_told_and_the_second_ends() -> None:
    told: list[int] = []
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        twice(lambda: told.append(1), steps)
    assert (told, steps) == ([1], ["goes on"])


def test_an_interrupt_that_was_told_interrupts_at_the_end() -> None:
    steps = ["one"]
    with pytest.raises(KeyboardInterrupt):
        twice(lambda: None, steps)
    assert steps == ["one", "goes on"]
