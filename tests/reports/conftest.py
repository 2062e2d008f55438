"""Runs that never happened, one of each kind, made once for all tests of the report."""

from collections.abc import Iterator

import pytest

from burstline.bench.conclusion import write_report
from burstline.machine.hardware import note_hardware
from burstline.machine.hints import Hints
from burstline.measure.record.rundir import Run, open_run
from burstline.reports.figures import drawing
from tests.reports import synthetic


@pytest.fixture(autouse=True, scope="session")
def _figures_must_be_drawn() -> Iterator[None]:
    """A page shows a note where a figure cannot be drawn; a test of a page must fail."""

    def fails(why: str) -> str:
        raise AssertionError(why)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "escape", fails)
        yield


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


@pytest.fixture(scope="session")
def metal(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two hundred requests, held against an H100."""
    run = synthetic.finished_run(tmp_path_factory.mktemp("metal"), synthetic.records(n=200, output_tok=16))
    note_hardware(run, Hints("h100-sxm5-80g", "llama-2-7b"))
    run.save_manifest()
    write_report(run)
    return open_run(run.path)
