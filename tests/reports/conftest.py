"""Runs that never happened, one of each kind, made once for all tests of the report."""

import pytest

from loadgen.rundir import Run
from tests.reports import synthetic


@pytest.fixture(scope="session")
def burst(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic.finished_run(tmp_path_factory.mktemp("burst"), synthetic.records(n=1000))


@pytest.fixture(scope="session")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A hundred and twenty requests, of which nine failed."""
    return synthetic.finished_run(tmp_path_factory.mktemp("lossy"), synthetic.records(n=120, n_failed=9))


@pytest.fixture(scope="session")
def hopeless(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic.finished_run(tmp_path_factory.mktemp("hopeless"), synthetic.records(n=20, n_failed=20))


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One request, nothing watched."""
    return synthetic.finished_run(tmp_path_factory.mktemp("one"), synthetic.records(n=1), watched=False)
