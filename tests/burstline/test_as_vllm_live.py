"""One real vLLM, the same burst by `vllm bench serve` and by us: do both blocks say the same?"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from burstline.cli import main
from loadgen.metrics.other_tools import vllm_block
from loadgen.record.columns import columns_of
from loadgen.record.rundir import open_run
from servers.engine import LaunchOptions, Target
from servers.engines.vllm import PYTHON_VARIABLE, Vllm
from servers.host import process
from servers.host.ready import wait_ready
from tests.burstline.test_as_vllm import numbers_in
from tests.servers.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM"),
]
N, PROMPT_TOK, OUTPUT_TOK, REPEATS = 100, 512, 32, 3
FLOORS = {"TTFT": 0.4, "TPOT": 0.2, "ITL": 0.2, "E2EL": 0.2}
"""Three runs cannot show less noise on two cores, where each client takes its share of the server's: nine had
TTFTs of 831 to 1,233 ms. What is the same by definition is compared on one run, in `test_as_vllm.py`."""


def by_vllm(url: str, model: Path, seed: int) -> str:
    """The block that `vllm bench serve` prints; each run has a seed, and so prompts, of its own."""
    argv = [os.environ[PYTHON_VARIABLE], "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    argv += ["--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions", "--model", "tiny"]
    argv += ["--tokenizer", str(model), "--dataset-name", "random", "--request-rate", "inf", "--ignore-eos"]
    argv += ["--random-input-len", str(PROMPT_TOK), "--random-output-len", str(OUTPUT_TOK)]
    argv += ["--num-prompts", str(N), "--seed", str(seed), "--temperature", "0"]
    argv += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    said = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=240, check=True).stdout
    lines = said.splitlines()
    first = next(k for k, line in enumerate(lines) if "Serving Benchmark Result" in line)
    last = next(k for k, line in enumerate(lines) if k > first and set(line) == {"="})
    return "\n".join(lines[first : last + 1])


def by_us(url: str, model: Path, out: Path) -> str:
    before = set(out.iterdir()) if out.exists() else set()
    load = ["--requests", str(N), "--prompt-tokens", str(PROMPT_TOK), "--output-tokens", str(OUTPUT_TOK)]
    where = ["--engine", "vllm", "--url", url, "--tokenizer", str(model), "--out", str(out)]
    main(["run", "-q", "--no-certify", *where, *load])
    (path,) = set(out.iterdir()) - before
    block = vllm_block(columns_of(open_run(path).record_table))
    assert isinstance(block, str)
    return block


def test_vllms_own_benchmark_and_ours_agree_within_the_noise_between_runs(tmp_path):
    engine, port = Vllm(), process.free_port()
    model, url = make_tiny_model(tmp_path / "model"), f"http://127.0.0.1:{port}"
    extra = ("--enforce-eager", "--no-enable-prefix-caching")
    options = LaunchOptions(str(model), "127.0.0.1", port, "tiny", tmp_path, None, extra)
    theirs, ours = [], []
    with process.start(engine.launch(options), tmp_path / "server.log") as server:
        wait_ready(engine, server, Target(url, "tiny"), timeout_s=300)
        by_us(url, model, tmp_path / "warm-up")
        for k in range(REPEATS):
            theirs.append(by_vllm(url, model, seed=100 + k))
            ours.append(by_us(url, model, tmp_path / "runs"))
    print("\nvllm bench serve:", theirs[-1], "\nBurstline:", ours[-1], sep="\n")

    first, second = ([numbers_in(block) for block in blocks] for blocks in (theirs, ours))
    assert list(first[0]) == list(second[0]), "the same lines in the same order"
    for name in ("Successful requests", "Failed requests", "Total generated tokens"):
        assert {row[name] for row in first} == {row[name] for row in second}, name
    told = {}
    for name, floor in FLOORS.items():
        a, b = ([row[f"Median {name} (ms)"] for row in rows] for rows in (first, second))
        noise = max(np.ptp(a), np.ptp(b), floor * float(np.median(a)))
        gap = abs(float(np.median(a) - np.median(b)))
        told[name] = gap <= noise
        print(f"{name} medians, ms: vLLM {a}, Burstline {b}; apart {gap:.1f}, noise between runs {noise:.1f}")
    assert all(told.values()), told
