"""Published runs of serving engines, as loads for the simulator, and the steps that they consist of.

Three files of `tests/data/serving`: closed loops (aiconfigurator's `silicon_sample.csv`, whose columns they
have), offline bursts at maximum throughput (TensorRT-LLM's performance overview), static batches (LMDeploy).
What a file leaves open is taken from its publisher's scripts: docs/roofline.md.

Which steps a load consists of depends little on how long they last. So each load is simulated once, and kept
as a `Trace`: the steps, and how much each weighs in a figure. Other constants then take milliseconds to try.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from burstline.errors import RooflineError
from burstline.roofline.device.calibration import Calibration, load_calibration, with_host
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.ops import Op, Step
from burstline.roofline.model.shapes import QUANTS, Parallel, Quant
from burstline.roofline.predict.capacity import room
from burstline.roofline.predict.predict import Deployment, host_seconds, predict_step
from burstline.roofline.predict.simulate import Asked, Limits, Simulation, simulate

Row = Mapping[str, str]

DEVICES = {
    "a100_sxm": "a100-sxm4-80g", "h100_sxm": "h100-sxm5-80g", "h200_sxm": "h200-sxm-141g",
    "b200_sxm": "b200-sxm", "gb200": "gb200", "gb300": "gb300", "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
}  # fmt: skip
MODELS = {
    "llama-?3[._]?1-8b": "llama-3.1-8b", "llama-?3[._]?[13]-70b": "llama-3.1-70b", "qwen3-32b": "qwen3-32b",
    "qwen3-30b-a3b": "qwen3-30b-a3b", "qwen3-235b-a22b": "qwen3-235b-a22b", "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
_WAVES = 10
"""Load tools send some ten requests for each stream, the first ones all at once."""
_SIMULATED = 3  # waves: all are alike but the first and the last
_TURNAROUND_S = 1e-3  # from a reply's end to the client's next request: any time within a step has one effect
_BUDGET = 8192  # new tokens a step: SGLang's and TensorRT-LLM's default on these devices
_SPARE_TOK = 1500  # what aiconfigurator lets a step have beside one prompt and all decodes
_SCRIPTED = "gap-analysis"
"""Where the points of aiconfigurator's own scripts come from, by the file's column of sources."""
_REPEATED = 100  # prompts that AIPerf draws from by default (`--num-dataset-entries`)
_SHORTEST = 0.8  # of the stated length, where lengths are drawn: InferenceX's `random_range_ratio`
_HOLD_STEPS = 20  # InferenceX's `batch_wait_timeout_iters`
_WARM_UP = 2  # waves before the measured ones, as in aiconfigurator's scripts
_MOST_SEQS = 2048  # TensorRT-LLM's default of requests at once
_CONTEXTS = 8  # lengths of context by which a trace tells steps of as many requests apart


@dataclass(frozen=True)
class Load:
    """A load on an engine, and its figures as measured: seconds, or tokens a second ("throughput").

    `streams`: of a closed loop; None: a burst. `stack`: whose host.
    """

    kind: str
    backend: str
    deployment: Deployment
    stack: str
    asked: Sequence[Asked]
    limits: Limits
    streams: int | None
    measured: Mapping[str, float]

    @property
    def device(self) -> str:
        return self.deployment.device.id

    @property
    def model(self) -> str:
        return self.deployment.model.name

    @property
    def is_dense(self) -> bool:
        return self.deployment.model.params() == self.deployment.model.active_params()

    def known(self, calibration: Calibration | None = None) -> Calibration:
        """The constants of its device and stack; only vLLM's attention mixes prompts and decodes."""
        known = calibration or with_host(load_calibration(self.deployment.device), self.stack)
        return known if self.backend == "vllm" else known.changed({"mixed": 1.0})

    def simulated(self) -> tuple[Simulation, list[Step]]:
        """The run with steps of roughly the right lengths, and each of its steps."""
        steps = list[Step]()

        def seconds(step: Step) -> float:
            steps.append(step)
            return 1e-2 + 1e-5 * step.n_tok

        turnaround_s = _TURNAROUND_S if self.streams else 0.0
        found = simulate(
            self.asked, self.limits, seconds, concurrency=self.streams, turnaround_s=turnaround_s
        )
        return found, steps


def read_loops(path: Path) -> list[Load]:
    """Closed loops whose model, device and layout are known and whose weights fit; others are left out."""
    with path.open(newline="") as file:
        return [load for row in csv.DictReader(file) if (load := _loop(row)) is not None]


def _loop(row: Row) -> Load | None:
    name = row["model_path"].lower()
    model = next((ours for pattern, ours in MODELS.items() if re.search(pattern, name)), None)
    if model is None or row["system"] not in DEVICES or row.get("mode", "agg") != "agg":
        return None
    tp, pp, dp, moe_tp, ep = (
        max(1, _int(row.get(f"{kind}_size") or "1"))
        for kind in ("tp", "pp", "attention_dp", "moe_tp", "moe_ep")
    )
    if pp > 1 or dp > 1 or tp > 8 or moe_tp * ep not in (1, tp):
        return None  # several pools of streams, or more GPUs than such a server has
    shape, stored = load_model(model)
    quant, device = QUANTS[_quant(row, name, stored)], load_device(DEVICES[row["system"]])
    backend, streams = row["backend"], _int(row["batch_size"])
    version = tuple(map(int, re.findall(r"\d+", row.get("backend_version") or "")[:3]))
    scripted = _SCRIPTED in row.get("silicon_data_source", "")
    prompt_tok, output_tok = _int(row["isl"]), _int(row["osl"])
    deployment = Deployment(shape, quant, Parallel(tp=tp, ep=ep), device)
    budget = streams + prompt_tok + _SPARE_TOK
    if backend == "sglang" or not scripted:
        budget = max(_BUDGET, prompt_tok if backend == "sglang" else budget)
    # InferenceX starts vLLM with `async-scheduling: true`, `max-num-batched-tokens: 8192` and
    # `no-enable-prefix-caching: true` (benchmarks/70b_fp8_h100_slurm.sh @2a205bb, 70b_fp8_h200_slurm.sh
    # @409e9a4, 70b_fp8_b200_docker.sh and 70b_fp4_b200_docker.sh @bb4c7f9; gptoss_fp4_h100_slurm.sh and
    # gptoss_fp4_b200_docker.sh @2e46dba).
    budget = _BUDGET if backend == "vllm" and not scripted else budget
    # One of TensorRT-LLM's slots was missing in the loops of Llama-3.1-8B (docs/roofline.md).
    lost = int(scripted and backend == "trtllm" and model == "llama-3.1-8b")
    # InferenceX's scripts of Llama-70B, for 1,024 tokens in and out on fewer GPUs than 8
    of_kind = not scripted and backend == "trtllm" and model == "llama-3.1-70b"
    held = of_kind and tp < 8 and prompt_tok == output_tok == 1024
    # vLLM schedules a step ahead by default since 0.14, and InferenceX's older ones are asked to.
    recent = backend != "vllm" or version >= (0, 14)
    try:
        limits = Limits(
            max(1, streams - lost),
            budget,
            room(deployment).kv_tok,
            chunked_prefill=backend != "trtllm",
            # SGLang's since the scripts ask for it (January 2026)
            mixed_steps=backend != "sglang" or (scripted and version >= (0, 5, 6)),
            ahead=recent or not scripted,
            hold_steps=_HOLD_STEPS if held else 0,
        )
    except RooflineError:
        return None
    measured = {"TTFT": float(row["silicon_ttft_ms"]) / 1e3, "TPOT": float(row["silicon_tpot_ms"]) / 1e3}
    asked = _asked(backend, scripted, streams, prompt_tok, output_tok)
    mean_tok = float(np.mean([request.output_tok for request in asked]))  # of the lengths really drawn
    measured["E2E"] = measured["TTFT"] + measured["TPOT"] * (mean_tok - 1)
    stack = "default" if recent else "synchronous"
    return Load("loop", backend, deployment, stack, asked, limits, streams, measured)


def _quant(row: Row, name: str, stored: Quant) -> str:
    """What the file states, unless experts alone are `stored` in 4 bits (gpt-oss).

    NVIDIA's checkpoints in 8 and 4 bits have static scales and an fp8 cache, Qwen's scales by block.
    """
    mode = (row.get("gemm_quant_mode") or row.get("precision") or "").lower()
    if stored.experts_only:
        return "mxfp4"
    if "fp4" in mode or "fp4" in name:
        return "nvfp4-kv8"
    if "block" in mode or ("fp8" in mode and re.search("qwen/qwen3.*-fp8", name)):
        return "fp8-block"
    if "fp8" in mode or "fp8" in name:
        return "fp8" if "dynamic" in name else "fp8-static-kv8"
    return "bf16"


def _int(text: str) -> int:
    return int(float(text))


def _asked(backend: str, scripted: bool, streams: int, prompt_tok: int, output_tok: int) -> list[Asked]:
    """The requests of the measured waves: all ten where they differ.

    vLLM caches prefixes by default, and the load tool repeats its prompts, where lengths are whole thousands:
    what is left to compute is a prompt's last block, but for prompts that the warm-up did not reach. The
    other engines were started without their cache. InferenceX, whose points the file has too, draws lengths.
    """
    new, some = Asked(0.0, prompt_tok, output_tok), _SIMULATED * streams
    if not scripted:
        shares = np.random.default_rng(0).uniform(_SHORTEST, 1, (some, 2))
        lengths = np.ceil(shares * (prompt_tok, output_tok)).astype(int).tolist()
        return [Asked(0.0, *each) for each in lengths]
    if backend != "vllm" or prompt_tok % 1000:
        return [new] * some
    repeated = replace(new, cached_tok=(prompt_tok - 1) // 16 * 16)
    n_new = max(0, _REPEATED - _WARM_UP * streams)
    return ([new] * n_new + [repeated] * _WAVES * streams)[: _WAVES * streams if n_new else some]


def read_bursts(path: Path) -> list[Load]:
    """Offline bursts: output tokens a second of all GPUs, by TensorRT-LLM's rules."""
    with path.open(newline="") as file:
        return [_burst(row) for row in csv.DictReader(file)]


def _burst(row: Row) -> Load:
    device, model, quant = load_device(row["device"]), load_model(row["model"])[0], QUANTS[row["quant"]]
    deployment = Deployment(model, quant, Parallel(tp=int(row["tp"])), device)
    prompt_tok, output_tok = int(row["prompt_tok"]), int(row["output_tok"])
    kv_tok = room(deployment, utilisation=0.95).kv_tok
    at_once = min(_MOST_SEQS, kv_tok // (prompt_tok + output_tok))
    n = min(int(row["n_requests"]), 2 * at_once)
    budget = max(_BUDGET, prompt_tok + at_once)  # a prompt must find room beside all decodes
    limits = Limits(_MOST_SEQS, budget, kv_tok, chunked_prefill=False, reserve_output=True, ahead=True)
    measured = {"throughput": float(row["output_tok_per_s"])}
    asked = [Asked(0.0, prompt_tok, output_tok)] * n
    return Load("burst", "trtllm", deployment, "default", asked, limits, None, measured)


def read_static(path: Path) -> list[Load]:
    """LMDeploy's own benchmark: `batch` streams at once, with the cache that the engine took."""
    activations_bytes = 2e9
    device, model = load_device("a100-sxm4-80g"), load_model("llama-2-7b")[0]
    deployment = Deployment(model, QUANTS["fp16"], Parallel(), device)
    loads = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            used = float(row["mem_gb"]) * 2**30  # by weights, activations and all the cache
            batch, per_tok = int(row["batch"]), 2 * 2 * model.n_layers * model.d
            limits = Limits(batch, _BUDGET, int((used - 2 * model.params() - activations_bytes) / per_tok))
            asked = [Asked(0.0, int(row["prompt_tokens"]), int(row["output_tokens"]))] * batch
            measured = {"throughput": float(row["out_tok_s"])}
            loads.append(Load("static", "turbomind", deployment, "default", asked, limits, None, measured))
    return loads


@dataclass(frozen=True)
class Trace:
    """A load's steps, those that are alike as one, each with its weights in the figures, and what of a
    figure no step's length changes (seconds). A throughput is kept as the seconds of a token."""

    load: Load
    steps: Sequence[Step]
    weights: Mapping[str, Sequence[float]]
    rest_s: Mapping[str, float]

    @cached_property
    def ops(self) -> list[list[Op]]:
        return [self.load.deployment.ops(step) for step in self.steps]

    def ratios(self, calibration: Calibration | None = None) -> dict[str, float]:
        """Predicted over measured of each figure; `calibration` None: the shipped one."""
        device, known = self.load.deployment.device, self.load.known(calibration)
        seconds = []
        for step, found in zip(self.steps, self.ops, strict=True):
            predictions = predict_step(found, device, known)
            seconds.append(sum(p.seconds for p in predictions) + host_seconds(step, predictions, known))
        figures = {name: self.rest_s[name] + float(np.dot(w, seconds)) for name, w in self.weights.items()}
        if "throughput" in figures:
            figures["throughput"] = 1 / figures["throughput"]
        return {name: figures[name] / measured for name, measured in self.load.measured.items()}


def trace(load: Load) -> Trace:
    """The load, simulated once."""
    result, steps = load.simulated()
    table, n = result.steps, len(result.due_s)
    figures = {"throughput": (np.zeros(1), np.array([result.makespan_s]), np.array([1.0]))}
    if load.streams:
        waves = n // load.streams
        by_wave = [1.0, *[(_WAVES - 2) / (waves - 2)] * (waves - 2), 1.0]
        share = np.repeat(by_wave, load.streams) / (_WAVES * load.streams)
        outputs = np.array([request.output_tok for request in load.asked])
        first, last = result.due_s + result.ttft_s, result.due_s + result.e2e_s
        figures = {
            "TTFT": (result.due_s, first, share),
            "TPOT": (first, last, share / np.maximum(outputs - 1, 1)),
            "E2E": (result.due_s, last, share),
        }
    group = _alike(steps)
    shown = np.array([np.flatnonzero(group == g)[np.sum(group == g) // 2] for g in range(group.max() + 1)])
    weights, rest_s = {}, {}
    for name, (begin, end, share) in figures.items():
        scale = 1.0 if load.streams else 1 / sum(request.output_tok for request in load.asked)
        each = scale * _within(table.start_s, table.seconds, begin, end, share)
        weights[name] = np.bincount(group, each * table.seconds) / table.seconds[shown]
        rest_s[name] = scale * float(share @ (end - begin)) - float(each @ table.seconds)
    return Trace(load, [steps[i] for i in shown], weights, rest_s)


def _alike(steps: Sequence[Step]) -> np.ndarray:
    """A number for each step, equal where about as many decode, and prompts and contexts are alike."""
    sums = []
    for step in steps:
        decodes = (step.new_tok == 1) & (step.logits == 1)
        of_decodes = int(decodes.sum()), int(step.context_tok[decodes].sum())
        sums.append((*of_decodes, step.n_requests, int(step.context_tok.sum()), step.n_tok))
    n, context_tok, n_requests, all_context_tok, n_tok = np.array(sums).T
    mean_tok = context_tok / np.maximum(n, 1)
    rest_mean_tok = (all_context_tok - context_tok) / np.maximum(n_requests - n, 1)
    # Counts within 6% and contexts within 15% are alike.
    keys = (
        np.round(12 * np.log(np.maximum(n, 1))) + (n > 0),
        np.round(_CONTEXTS * np.log(1 + mean_tok / 64)),
        np.round(8 * np.log(1 + (n_tok - n) / 64)),
        np.round(4 * np.log(1 + rest_mean_tok / 256)),
    )
    return np.asarray(np.unique(np.array(keys), axis=1, return_inverse=True)[1].reshape(-1))


def _within(
    start: np.ndarray, seconds: np.ndarray, begin: np.ndarray, end: np.ndarray, share: np.ndarray
) -> np.ndarray:
    """Of each step, the summed shares of the intervals that it lies in, in part where it does so in part."""

    def since(at: np.ndarray) -> np.ndarray:  # (step, weight) of all that begins at these instants
        i = np.clip(np.searchsorted(start, at, side="right") - 1, 0, len(start) - 1)
        part = np.clip(1 - (at - start[i]) / seconds[i], 0, 1)
        found = np.bincount(i, share * part, len(start))
        whole = np.bincount(i, share, len(start))
        return np.asarray(found + np.concatenate([[0.0], np.cumsum(whole)[:-1]]))

    return np.asarray(since(begin) - since(end))
