"""One truth server, measured by `vllm bench serve` and by us: equal figures, read by vLLM's own scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from burstline.cli import main
from burstline.loadgen.record.rundir import open_run
from burstline.reports.formats.vllm_bench import vllm_result
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
    theirs, ours = folder / "serving_theirs.json", folder / "serving_ours.json"
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
    ours.write_text(json.dumps(vllm_result(open_run(run))))
    return {"theirs": theirs, "ours": ours, "run": run}


@pytest.mark.measures
def test_both_report_the_servers_own_times(results: dict[str, Path]) -> None:
    """Few streams are open: vLLM reads on one thread of asyncio, which is late on a busy machine."""
    theirs, ours = (json.loads(results[whose].read_text()) for whose in ("theirs", "ours"))
    truth_ms = {"ttft": TTFT_S, "tpot": GAP_S, "itl": GAP_S, "e2el": TTFT_S + (N_TOK - 1) * GAP_S}
    for name, true_s in truth_ms.items():
        assert ours[f"median_{name}_ms"] == pytest.approx(true_s * 1e3, rel=0.1), name
        assert theirs[f"median_{name}_ms"] == pytest.approx(ours[f"median_{name}_ms"], rel=0.25), name
    for name in ("completed", "failed", "total_output_tokens", "max_concurrency", "num_prompts"):
        assert ours[name] == theirs[name]
    assert ours["output_throughput"] == pytest.approx(theirs["output_throughput"], rel=0.25)


def test_vllms_plots_read_our_file_as_its_own(results: dict[str, Path]) -> None:
    plot = vllms_plots()
    segments = {whose: timeline(plot, json.loads(results[whose].read_text())) for whose in ("theirs", "ours")}
    assert len(segments["ours"]) == len(segments["theirs"]) == N * N_TOK
    assert [row["type"] for row in segments["ours"]].count("TTFT") == N


@pytest.mark.measures
def test_its_result_is_shown_beside_our_run(
    results: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = foreign_results(results["theirs"])
    assert found.numbers["metrics", "tpot", "p50"] == pytest.approx(GAP_S, rel=0.25)
    assert main(["compare", str(results["run"]), str(results["theirs"])]) == 4
    assert "the measurement error of vllm bench serve is unknown" in capsys.readouterr().out


def vllms_plots() -> Any:
    """vllm/benchmarks/plot.py as installed, without the rest of vLLM, which needs its own interpreter."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    python = os.environ[PYTHON_VARIABLE]
    where = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    spec = importlib.util.spec_from_file_location("vllms_plots", Path(where, "benchmarks/plot.py"))
    assert spec is not None
    assert spec.loader is not None
    holders = types.ModuleType("vllm.utils.import_utils")
    holders.PlaceholderModule = lambda _: types.SimpleNamespace(placeholder_attr=lambda _: None)  # type: ignore
    sys.modules["vllm.utils.import_utils"] = holders
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules["vllm.utils.import_utils"]
    return module


def timeline(plot: Any, d: dict[str, Any]) -> list[dict[str, Any]]:
    """What `--plot-timeline` draws, of a file: one segment for each first token and each gap."""
    names = {"start_time": "start_times", "ttft": "ttfts", "itl": "itls", "latency": "latencies"}
    names |= {"prompt_len": "input_lens", "output_tokens": "output_lens"}
    lists = [d[name] for name in names.values()]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
    segments: list[dict[str, Any]] = plot.construct_timeline_data(
        rows, [0.025, 0.1], ["short", "middle", "long"]
    )
    return segments
