"""The load generators that `peers.py` runs: for each its command line and how to read what it reports.

All ask for the same: so many completions of so many tokens, streamed, all at once. Times are ms.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server at `url` that calls its model "truth"; the tool's files go to `out`."""

    url: str
    n_streams: int
    n_prompt_tok: int
    n_output_tok: int
    tokenizer: Path
    hub_name: str
    out: Path


@dataclass(frozen=True, slots=True)
class Reported:
    """What a tool said, in ms; None where it does not say."""

    n_ok: int
    ttft_p50: float | None
    itl_p50: float | None
    itl_p99: float | None
    e2e_p50: float | None
    e2e_p99: float | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """One load generator. `environment` is its folder under --envs, "" for our own interpreter.

    `command` follows the environment's bin folder; `itl_per_request`: what it calls ITL, or gives instead, is
    each request's mean. `parallel`: it spreads its work over cores where it may.
    """

    package: str
    environment: str
    command: Callable[[Load, Path], list[str]]
    read: Callable[[Path], Reported]
    says: str
    itl_per_request: bool = False
    parallel: bool = False

    def bin(self, envs: Path, ours: Path) -> Path:
        """Where its interpreter and commands lie, if it is installed."""
        named = os.environ.get("BURSTLINE_VLLM_PYTHON") if self.environment == "vllm" else None
        if named:
            return Path(named).parent
        return envs / self.environment / "bin" if self.environment else ours


def _burstline(load: Load, bin_: Path) -> list[str]:
    words = f"-m burstline run --engine vllm --url {load.url} --model truth -q"
    words += f" --requests {load.n_streams} --prompt-tokens {load.n_prompt_tok}"
    words += f" --output-tokens {load.n_output_tok}"
    return [f"{bin_}/python", *words.split(), "--tokenizer", str(load.tokenizer), "--out", str(load.out)]


def read_burstline(out: Path) -> Reported:
    summary = _json(next(out.glob("*/summary.json")))

    def ms(metric: str, percentile: str) -> float | None:
        point_s = summary["metrics"][metric][percentile]["point"]
        return None if point_s is None else point_s * 1e3

    return Reported(
        summary["counts"].get("ok", 0),
        ms("ttft_service", "p50"),
        ms("itl", "p50"),
        ms("itl", "p99"),
        ms("e2e_service", "p50"),
        ms("e2e_service", "p99"),
        f"its verdict on the run: {summary['verdict']['state']}; its headline TTFT, from when a request was "
        f"due: {ms('ttft', 'p50'):.2f} ms at p50",
    )


def _vllm(load: Load, bin_: Path) -> list[str]:
    words = f"bench serve --backend vllm --base-url {load.url} --model truth --dataset-name random"
    words += f" --num-prompts {load.n_streams} --random-input-len {load.n_prompt_tok} --ignore-eos"
    words += f" --random-output-len {load.n_output_tok} --request-rate inf --disable-tqdm --save-result"
    words += " --percentile-metrics ttft,itl,e2el --metric-percentiles 50,99 --result-filename result.json"
    files = ["--tokenizer", str(load.tokenizer), "--result-dir", str(load.out)]
    return [f"{bin_}/python", "-m", "vllm.entrypoints.cli.main", *words.split(), *files]


def read_vllm(out: Path) -> Reported:
    says = _json(out / "result.json")
    names = ("p50_ttft_ms", "p50_itl_ms", "p99_itl_ms", "p50_e2el_ms", "p99_e2el_ms")
    return Reported(says["completed"], *(says[name] for name in names))


def _sglang_python(load: Load, bin_: Path) -> list[str]:
    words = f"-m sglang.benchmark.serving --backend vllm --base-url {load.url} --model truth"
    words += f" --dataset-name random-ids --num-prompts {load.n_streams} --random-range-ratio 1"
    words += f" --random-input-len {load.n_prompt_tok} --random-output-len {load.n_output_tok} --disable-tqdm"
    files = ["--tokenizer", str(load.tokenizer), "--output-file", str(load.out / "result.json")]
    return [f"{bin_}/python", *words.split(), *files]


def _sglang_rust(load: Load, bin_: Path) -> list[str]:
    return [w.replace("benchmark.serving", "benchmark.rust_client") for w in _sglang_python(load, bin_)]


def read_sglang(out: Path) -> Reported:
    says = _json(out / "result.json")
    names = ("median_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_e2e_latency_ms", "p99_e2e_latency_ms")
    return Reported(says["completed"], *(says[name] for name in names))


def _guidellm(load: Load, bin_: Path) -> list[str]:
    data = f"kind=synthetic_text,prompt_tokens={load.n_prompt_tok},output_tokens={load.n_output_tok}"
    return [
        *(f"{bin_}/guidellm", "run", "--disable-console-interactive", "--data", data),
        *("--backend", f"kind=openai_http,target={load.url},model=truth,request_format=/v1/completions"),
        *("--profile", f"kind=throughput,max_concurrency={load.n_streams}"),
        *("--constraint", f"kind=max_requests,count={load.n_streams}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"),
        *("--output", f"kind=json,path={load.out}/result.json"),
    ]


def read_guidellm(out: Path) -> Reported:
    metrics = _json(out / "result.json")["benchmarks"][0]["metrics"]
    ttft, itl, e2e_s = (
        metrics[name]["successful"]["percentiles"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    )
    n_ok = metrics["request_totals"]["successful"]
    return Reported(n_ok, ttft["p50"], itl["p50"], itl["p99"], e2e_s["p50"] * 1e3, e2e_s["p99"] * 1e3)


def _aiperf(load: Load, bin_: Path) -> list[str]:
    words = f"profile -m truth --endpoint-type completions --streaming --url {load.url} --ui none"
    words += f" --concurrency {load.n_streams} --request-count {load.n_streams} --isl {load.n_prompt_tok}"
    words += f" --osl {load.n_output_tok} --extra-inputs ignore_eos:true --use-server-token-count"
    files = ["--tokenizer", load.hub_name, "--output-artifact-dir", str(load.out)]
    return [f"{bin_}/aiperf", *words.split(), *files]


def read_aiperf(out: Path) -> Reported:
    says = _json(out / "profile_export_aiperf.json")
    ttft, gap, e2e = (says[n] for n in ("time_to_first_token", "inter_chunk_latency", "request_latency"))
    n_ok = int(says["request_count"]["avg"])
    return Reported(n_ok, ttft["p50"], gap["p50"], gap["p99"], e2e["p50"], e2e["p99"])


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


TOOLS: dict[str, Tool] = {
    "burstline": Tool(
        *("burstline", "", _burstline, read_burstline),
        "its service view, from the request's last byte written; ITL: of tokens, pooled; kernel stamps",
        parallel=True,
    ),
    "vllm bench serve": Tool(
        *("vllm", "vllm", _vllm, read_vllm),
        "from before it connects; ITL: gaps between events, pooled; asyncio and aiohttp",
    ),
    "sglang serving": Tool(
        *("sglang", "sglang", _sglang_python, read_sglang),
        "from before it connects; ITL: gaps between events, pooled; asyncio and aiohttp",
    ),
    "sglang rust_client": Tool(
        *("sglang", "sglang", _sglang_rust, read_sglang),
        "the same in Rust, Tokio threads, out of the same wheel",
        parallel=True,
    ),
    "guidellm": Tool(
        *("guidellm", "guidellm", _guidellm, read_guidellm),
        "from before it connects, on the wall clock; ITL: each request's mean, and so is its truth here; "
        "asyncio and httpx, several processes",
        itl_per_request=True,
        parallel=True,
    ),
    "aiperf": Tool(
        *("aiperf", "aiperf", _aiperf, read_aiperf),
        "from before it connects; its inter-chunk latency stands as ITL (its ITL is each request's mean); "
        "asyncio and aiohttp, several processes",
        parallel=True,
    ),
}
