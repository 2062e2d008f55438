"""For all tests: nothing is judged by how long it took, neighbours may be noisy; and how many run at once."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.scale import IN_CI

settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=50 if IN_CI else 25,
)
settings.load_profile("untimed")


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: many tests wait for a server or a timer."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A neighbour spoils a measurement once; a wrong one fails each time."""
    for item in items:
        if item.get_closest_marker("measures"):
            item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=2, only_rerun="AssertionError"))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


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
        is_drawn = any(item.get_closest_marker(name) for name in ("drawn", "slow", "browser", "bench"))
        figures.Figure.savefig = _rendering[0] if is_drawn else _laid_out


def _laid_out(figure: Any, file: Any, **_: Any) -> None:
    empty = '<svg><metadata></metadata><g id="figure"></g></svg>'
    file.write(empty) if hasattr(file, "write") else Path(file).write_text(empty)


@pytest.fixture
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run`, `report` and `verify` in this process write an empty page: to draw it is half of a short run."""
    monkeypatch.setattr("burstline.bench.report.render", lambda comparison: "")
