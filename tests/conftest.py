"""For all tests: how many run at once, and what becomes of one that judges times on a busy machine.

Tests marked `measures` judge times. They run one at a time with nothing beside them (`make timing`). One
that fails while the machine was busy is undecided: it is repeated, five times at most, and then counted
as such, not as failed. The machine was busy if a run of the test says so itself (CLIENT-BOUND, DISTURBED,
COLD), or if other processes took a tenth of its CPU for half a second. One that fails on a quiet machine is
repeated, too: three failures count. Repeats for a busy machine have five minutes in all: where its neighbours
stay, they only cost time. If a fifth of these tests is undecided on a machine that was quiet as a whole, the
tests are at fault, and the session fails.
"""

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from tests.secrets_learned import fresh  # noqa: F401
from tests.seeds import SEED
from tests.servers.lives import engine_in, lives  # noqa: F401
from tests.verdicts import Undecided, unsure
from tests.witness import Witness

settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=50 if "CI" in os.environ else 25,
)
settings.load_profile("untimed")

# Without Python's caches each worker and each process that a test starts compiles every module again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Runs here are many and short, and what measures the CPU says so (tests/burstline/test_calibration.py).
os.environ["BURSTLINE_NO_CALIBRATE"] = "1"
# Most of what is imported and collected stays: to look through it while it grows finds little.
gc.disable()

AT_MOST: Final = 5
"""Attempts at a test that judges times."""
FAILS: Final = 3
"""So often such a test must fail for it to count: neighbours of a virtual machine, which nothing on it sees,
take a third of a core's speed for seconds at a time (decision 0028)."""
REPEATS_S: Final = 300.0
"""So long may attempts take, all tests together, that a busy machine leaves undecided."""
BUSY: Final = 0.1
"""The share of the CPU in other hands from which on a machine is too busy to judge times."""
_witness: list[Witness] = []
_undecided: set[str] = set()
_busy_s: list[float] = []
_failed: Counter[str] = Counter()


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: many tests wait for a server or a timer."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker per file; one for all tests of an engine that lives once; one per page in the browser.

    Not xdist's `loadgroup`: with pytest 9.2 it groups nothing (pytest-dev/pytest-xdist#1386).
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByWhatIsShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, values = nodeid.partition("[")
            page = values.rpartition("-")[2] if file.startswith("tests/browser/") else ""
            return page or engine_in(nodeid) or str(super()._split_scope(nodeid))

    return ByWhatIsShared(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("measures"):
            item.add_marker(pytest.mark.flaky(reruns=AT_MOST - 1, reruns_delay=2, only_rerun="Undecided"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that judges times is undecided where it fails on a busy machine, or not three times."""
    measures = pyfuncitem.get_closest_marker("measures")
    if measures is None:
        return (yield)
    _witness[:] = _witness or [Witness()]
    began_s = time.monotonic()
    try:
        return (yield)
    except Undecided:
        raise
    except (Exception, pytest.fail.Exception) as error:
        reason = unsure(pyfuncitem.funcargs.get("tmp_path"), but=measures.args)
        foreign = _witness[0].most(began_s, time.monotonic())
        if reason is None and foreign >= BUSY:
            reason = f"other processes took {foreign:.0%} of the CPU"
        if reason is not None:
            _busy_s.append(time.monotonic() - began_s)
        else:
            _failed[pyfuncitem.nodeid] += 1
            if _failed[pyfuncitem.nodeid] == FAILS:
                raise
            reason = f"failed {_failed[pyfuncitem.nodeid]} of {FAILS} times"
        raise Undecided(f"{reason}: {error}") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_last = getattr(item, "execution_count", AT_MOST) >= AT_MOST
    is_last = is_last or (sum(_busy_s) > REPEATS_S and item.nodeid not in _failed)
    if is_last and call.excinfo is not None and call.excinfo.errisinstance(Undecided):
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, f"undecided: {call.excinfo.value}")
        _undecided.add(item.nodeid)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"TEST_SEED={SEED}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _witness:
        return
    foreign = _witness[0].mean()
    _witness.pop().end()
    n = sum(item.get_closest_marker("measures") is not None for item in session.items)
    print(f"\n{len(_undecided)} of {n} tests of times undecided; others took {foreign:.0%} of the CPU")
    if len(_undecided) > n / 5 and foreign < BUSY:
        print("Too many for a quiet machine: the tests are at fault.")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


ALL_DRAWN: Final = ("drawn", "slow", "measures", "thorough", "browser", "bench")
"""Marks of tests for which matplotlib renders."""
_rendering: list[Any] = []
"""matplotlib's own, once it is imported."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Quick tests that are not marked `drawn` lay figures out and render none: half the time of a page.

    What a module's fixture draws goes by the first test that uses it.
    """
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None:
        _rendering[:] = _rendering or [figures.Figure.savefig]
        is_drawn = any(item.get_closest_marker(name) for name in ALL_DRAWN)
        figures.Figure.savefig = _rendering[0] if is_drawn else _laid_out


def _laid_out(figure: Any, file: Any, **_: Any) -> None:
    empty = '<svg><metadata></metadata><g id="figure"></g></svg>'
    file.write(empty) if hasattr(file, "write") else Path(file).write_text(empty)


@pytest.fixture(autouse=True, scope="session")
def _pages_say_what_is_so(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each sentence of cause, limit and advice on the page of a run that any test made holds of that run."""
    yield
    folders = [summary.parent for summary in tmp_path_factory.getbasetemp().rglob("summary.json")]
    if folders:
        from tests.reports.said import false_in  # most sessions of few tests make no run

        false = {str(folder): wrong for folder in folders if (wrong := false_in(folder))}
        assert not false, "\n".join(f"{folder}: {'; '.join(wrong)}" for folder, wrong in false.items())


@pytest.fixture
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run`, `report` and `verify` in this process write an empty page: to draw it is half of a short run."""
    monkeypatch.setattr("burstline.reports.page.page.render", lambda comparison: "")
