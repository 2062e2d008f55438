"""Real engines on a CPU: embedded, vLLM, SGLang, llama.cpp and `transformers serve`; one suite, one page."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from burstline.measure.record.rundir import Run, open_run
from burstline.servers.host.process import require_free_port
from tests import verdicts

ROOT = Path(__file__).parents[2]
NEEDED = (
    *("BURSTLINE_VLLM_PYTHON", "BURSTLINE_SGLANG_PYTHON", "BURSTLINE_LLAMA_SERVER"),
    "BURSTLINE_TRANSFORMERS_PYTHON",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        any(name not in os.environ for name in NEEDED), reason=f"{' and '.join(NEEDED)} name no engines"
    ),
]

# The embedded engine computes in float32 only, and so do all. `transformers serve` can be given no limits but
# that of a step.
SUITE = """
name = "five"
[settings]
dtype = "float32"
max_num_batched_tokens = 1024
[[engine]]
engine = "reference"
max_num_seqs = 32
max_model_len = 1024
prefix_cache = false
[[engine]]
engine = "vllm"
max_num_seqs = 32
max_model_len = 1024
prefix_cache = false
cuda_graphs = 0
[[engine]]
engine = "sglang"
max_num_seqs = 32
max_model_len = 1024
prefix_cache = false
[[engine]]
engine = "llamacpp"
max_num_seqs = 32
max_model_len = 1024
prefix_cache = false
kv_cache_dtype = "float32"
[[engine]]
engine = "transformers"
gpu_memory_utilization = 0.05   # of a CPU it is the memory of the machine
[[model]]
name = "tiny"
path = "{model}"
like = "tiny"
format = "both"
dtype = "float32"
[[workload]]
name = "burst"
requests = 16
prompt_tokens = 64
output_tokens = 8
"""
ENGINES = ["llamacpp", "reference", "sglang", "transformers", "vllm"]


def settings_table(runs: list[Run]) -> str:
    """What was asked of each engine, what it was sent for it, and what it says that it uses."""
    rows = [("engine", "setting", "asked", "sent", "used, says the engine")]
    for run in runs:
        rows += [
            (run.manifest.engine, row.name, row.asked or "-", row.sent or "-", row.actual or "does not say")
            for row in run.manifest.server.settings
        ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def test_five_real_engines_with_equal_settings_make_one_page_and_leave_nothing_running(tmp_path):
    suite = tmp_path / "five.toml"
    suite.write_text(SUITE.format(model=tmp_path / "tiny"))
    command = [sys.executable, "-m", "burstline", "run", str(suite), "--out", str(tmp_path)]
    done = subprocess.run(command, timeout=1100, check=False, capture_output=True, text=True, cwd=ROOT)
    assert verdicts.done(done.returncode, tmp_path), done.stdout + done.stderr
    (folder,) = tmp_path.glob("five-*")
    runs = [open_run(manifest.parent) for manifest in sorted(folder.glob("0*/*/manifest.json"))]
    assert sorted(run.manifest.engine for run in runs) == ENGINES
    for run in runs:
        assert list(run.record_table.to_pandas()["outcome"]) == ["ok"] * 16, run.manifest.engine
        assert set(run.record_table.to_pandas()["prompt_tok"]) == {64}
        assert set(run.record_table.to_pandas()["output_tok"]) == {8}
        # What only an engine has that Burstline started itself: its command, its log, its processes' memory.
        assert run.manifest.server.argv, run.manifest.engine
        assert run.manifest.server.ready_s > 0
        assert (run.path / "server.log").stat().st_size > 0
        assert run.summary.memory.server_peak_bytes.point > 1e8, run.manifest.engine
    print(table := settings_table(runs))
    assert table.count("\n") > 20
    for run in runs:
        assert not [row for row in run.manifest.server.settings if row.differs], run.manifest.engine
    gate = json.loads((folder / "comparison.json").read_text())
    print(done.stdout)
    (cell,) = gate["cells"]
    differing = {fact["name"]: fact["values"] for fact in cell["facts"] if fact["agrees"] is False}
    assert not differing
    page = (folder / "report.html").read_text()
    assert all(name in page for name in ENGINES)
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in line]
    for run in runs:
        require_free_port("127.0.0.1", urlsplit(run.manifest.server.url).port)
