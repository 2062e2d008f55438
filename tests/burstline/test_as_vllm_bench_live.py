"""One truth server, measured by `vllm bench serve` and by us: equal figures."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from burstline.cli import main
from burstline.measure.record.rundir import open_run
from burstline.measure.stats.figure import Estimate
from burstline.reports.model.foreign import foreign_results
from burstline.servers.engines.vllm import PYTHON_VARIABLE
from tests.servers.tiny_model import make_tiny_model
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.verdicts import done

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM"),
]
TTFT_S, GAP_S, N, N_TOK, AT_ONCE = 0.3, 0.05, 24, 12, 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The result file of each tool."""
    folder = tmp_path_factory.mktemp("results")
    model = make_tiny_model(tmp_path_factory.mktemp("model"))
    theirs = folder / "serving_theirs.json"
    python = os.environ[PYTHON_VARIABLE]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    offline.pop("PYTHONPATH", None)
    with truth_server(Script(ttft_s=TTFT_S, gaps_s=(GAP_S,))) as truth:
        words = f"bench serve --backend vllm --base-url {truth.url} --model truth --tokenizer {model}"
        words += f" --dataset-name random --num-prompts {N} --random-input-len 32"
        words += f" --random-output-len {N_TOK}"
        words += f" --ignore-eos --max-concurrency {AT_ONCE} --disable-tqdm --save-result --save-detailed"
        words += (
            f" --percentile-metrics ttft,tpot,itl,e2el --result-dir {folder} --result-filename {theirs.name}"
        )
        argv = [python, "-m", "vllm.entrypoints.cli.main", *words.split()]
        subprocess.run(argv, env=offline, check=True, capture_output=True, timeout=600)
        load = f"--requests {N} --prompt-tokens 32 --output-tokens {N_TOK} --concurrency {AT_ONCE}"
        where = ["--engine", "vllm", "--url", truth.url, "--model", "truth", "--tokenizer", str(model)]
        assert done(main(["run", "-q", *where, *load.split(), "--out", str(folder / "runs")]), folder)
    (run,) = (folder / "runs").iterdir()
    return {"theirs": theirs, "run": run}


@pytest.mark.measures
def test_both_report_the_servers_own_times(results: dict[str, Path]) -> None:
    """Few streams are open: vLLM reads on one thread of asyncio, which is late on a busy machine."""
    theirs, ours = json.loads(results["theirs"].read_text()), open_run(results["run"]).summary
    assert ours is not None
    truth_ms = {"ttft": TTFT_S, "tpot": GAP_S, "itl": GAP_S, "e2el": TTFT_S + (N_TOK - 1) * GAP_S}
    for name, true_s in truth_ms.items():
        figure = ours.figure("metrics", "e2e" if name == "e2el" else name, "p50")
        assert isinstance(figure, Estimate)
        assert figure.point == pytest.approx(true_s, rel=0.1), name
        assert theirs[f"median_{name}_ms"] == pytest.approx(figure.point * 1e3, rel=0.25), name
    assert (theirs["completed"], theirs["failed"]) == (ours.counts["ok"], 0) == (N, 0)


@pytest.mark.measures
def test_its_result_is_shown_beside_our_run(
    results: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = foreign_results(results["theirs"])
    assert found.numbers["metrics.tpot.p50"] == pytest.approx(GAP_S, rel=0.25)
    assert main(["compare", str(results["run"]), str(results["theirs"])]) == 4
    assert "the measurement error of vllm bench serve is unknown" in capsys.readouterr().out
