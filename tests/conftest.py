"""For all tests: nothing is judged by how long it took, neighbours may be noisy; and how many run at once."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: many tests wait for a server or a timer."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run`, `report` and `verify` in this process write an empty page: to draw it is half of a short run."""
    monkeypatch.setattr("burstline.bench.report.render", lambda comparison: "")
