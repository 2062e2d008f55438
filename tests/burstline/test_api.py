"""`burstline.load`, as a notebook uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import burstline
from burstline.loadgen.record.rundir import open_run
from burstline.workloads.request import WorkloadError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/runs/4"


def test_the_name_itself_imports_nothing_heavy() -> None:
    program = "import burstline, sys; print(len([m for m in sys.modules if m.startswith('burstline')]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_run_is_tables_and_typed_values() -> None:
    run = burstline.load(GOLDEN)
    summary = open_run(GOLDEN).summary
    assert summary is not None
    assert run.summary == summary
    assert run.verdict == summary.verdict
    requests = run.requests
    assert len(requests) == summary.counts["planned"]
    assert requests.ttft_s.notna().sum() == summary.counts["ok"]
    ok = requests.dropna(subset="ttft_s")
    assert (ok.e2e_s >= ok.ttft_s).all()
    assert {"at_ns", "source", "name", "value"} <= set(run.telemetry.columns)
    assert len(run.telemetry) > 0


def test_a_file_of_the_run_names_it_and_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    assert burstline.load(str(GOLDEN / "records.parquet")).path == GOLDEN
    with pytest.raises(WorkloadError, match="not a run"):
        burstline.load(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        burstline.lode  # noqa: B018


@pytest.mark.slow
def test_a_figure_is_the_reports_own() -> None:
    run = burstline.load(GOLDEN)
    figure = run.figure("ecdf-ttft")
    assert figure.svg.startswith("<svg")
    assert figure.png.startswith(b"\x89PNG")
    with pytest.raises(WorkloadError, match=r"has no figure 'ttft'; it has .*ecdf-ttft"):
        run.figure("ttft")


@pytest.mark.slow
def test_the_how_to_runs_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs/howto/python.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", program, GOLDEN, GOLDEN], cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "ttft.png").stat().st_size > 5000
