"""Real engines side by side: embedded, vLLM on a CPU and `transformers serve`; one suite, one page."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from loadgen.record.rundir import open_run
from servers.host.process import require_free_port

ROOT = Path(__file__).parents[2]
NEEDED = ("BURSTLINE_VLLM_PYTHON", "BURSTLINE_TRANSFORMERS_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(name not in os.environ for name in NEEDED), reason=f"{' and '.join(NEEDED)} name no engines"
    ),
]

SUITE = """
name = "three"
[[engine]]
engine = "reference"
args = ["--max-num-seqs", "32", "--max-num-batched-tokens", "1024"]
[[engine]]
engine = "vllm"
args = ["--dtype", "float32", "--max-num-seqs", "32", "--max-num-batched-tokens", "1024",
        "--max-model-len", "1024", "--no-enable-prefix-caching", "--enforce-eager"]
[[engine]]
engine = "transformers"
args = ["--dtype", "float32"]
[[model]]
name = "tiny"
path = "{model}"
like = "tiny"
weights = true
[[workload]]
name = "burst"
requests = 16
prompt_tokens = 64
output_tokens = 8
"""


def test_three_real_engines_make_one_report_and_leave_nothing_running(tmp_path):
    suite = tmp_path / "three.toml"
    suite.write_text(SUITE.format(model=tmp_path / "tiny"))
    command = [sys.executable, "-m", "burstline", "run", str(suite), "--out", str(tmp_path), "--no-certify"]
    done = subprocess.run(command, timeout=900, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, 4), done.stdout + done.stderr  # 4: run, but not to be ranked
    (folder,) = tmp_path.glob("three-*")
    runs = [open_run(manifest.parent) for manifest in sorted(folder.glob("0*/*/manifest.json"))]
    assert sorted(run.manifest.engine for run in runs) == ["reference", "transformers", "vllm"]
    for run in runs:
        assert list(run.records["outcome"]) == ["ok"] * 16
        assert set(run.records["prompt_tok"]) == {64}
        assert set(run.records["output_tok"]) == {8}
    page = (folder / "report.html").read_text()
    assert all(name in page for name in ("vllm", "transformers", "reference"))
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in line]
    for run in runs:
        require_free_port("127.0.0.1", urlsplit(run.manifest.server.url).port)
