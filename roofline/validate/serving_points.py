"""Published operating points of serving engines, predicted: a closed loop of streams, simulated step by step.

The file's columns are those of aiconfigurator's `silicon_sample.csv`; other models, devices and engines than
the shipped ones are predicted too. Constants of the serving stack are set here, on one half of the devices.
"""

import csv
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from roofline.device.calibration import Calibration, HostFit, generic, load_calibration, stack_host
from roofline.device.device import load_device
from roofline.errors import RooflineError
from roofline.model.catalog import load_model
from roofline.model.parallel import Parallel
from roofline.model.shapes import QUANTS
from roofline.predict.capacity import room
from roofline.predict.kernels import Amounts
from roofline.predict.predict import Clock, Deployment
from roofline.predict.simulate import Asked, Limits, simulate

Row = Mapping[str, str]

DEVICES = {
    "a100_sxm": "a100-sxm4-80g", "h100_sxm": "h100-sxm5-80g", "h200_sxm": "h200-sxm-141g",
    "b200_sxm": "b200-sxm", "gb200": "gb200", "gb200_sxm": "gb200", "gb300": "gb300", "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
MODELS = {
    "llama-?3[._]?1-8b": "llama-3.1-8b", "llama-?3[._]?[13]-70b": "llama-3.1-70b", "qwen3-32b": "qwen3-32b",
    "qwen3-8b": "qwen3-8b", "qwen3-30b-a3b": "qwen3-30b-a3b", "llama-2-7b": "llama-2-7b",
    "llama-2-13b": "llama-2-13b", "llama-2-70b": "llama-2-70b", "mixtral-8x7b": "mixtral-8x7b",
    "deepseek-v3": "deepseek-v3", "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
WAVES = 10
"""Load tools send some ten requests for each stream, the first ones all at once."""
_SIMULATED = 4  # waves: all are alike but the first and the last
_TURNAROUND_S = 1e-3  # from a reply's end to the client's next request: any time within a step has one effect
_BUDGET = 8192  # new tokens a step: the default of SGLang and vLLM on these devices
LOST_SLOTS = 1
"""Slots that TensorRT-LLM's loops go without: concluded from the points (docs/roofline-accuracy.md)."""
_SPARE_TOK = 1500  # what aiconfigurator lets a step of TensorRT-LLM have beside one prompt and all decodes
_REPEATED = 100  # prompts that AIPerf draws from by default (`--num-dataset-entries`)
_WARM_UP = 2  # waves before the measured ones, as in aiconfigurator's scripts


@dataclass(frozen=True, slots=True)
class Point:
    """A closed loop of `streams` requests, and what was measured: means, in milliseconds."""

    device: str
    backend: str
    model: str
    quant: str
    tp: int
    streams: int
    prompt_tok: int
    output_tok: int
    ttft_ms: float
    tpot_ms: float

    @property
    def group(self) -> str:
        return f"{self.device} {self.backend}"


def read_points(path: Path) -> list[Point]:
    """The points of aggregated serving whose model and device are known; others are left out."""
    with path.open(newline="") as file:
        return [point for row in csv.DictReader(file) if (point := _point(row)) is not None]


def _point(row: Row) -> Point | None:
    name = row["model_path"].lower()
    model = next((ours for pattern, ours in MODELS.items() if re.search(pattern, name)), None)
    if model is None or row["system"] not in DEVICES or row.get("mode", "agg") != "agg":
        return None
    quant = _quant(row, name)
    return Point(
        DEVICES[row["system"]],
        row["backend"],
        model,
        quant,
        _int(row["tp_size"]),
        _int(row["batch_size"]),
        _int(row["isl"]),
        _int(row["osl"]),
        float(row["silicon_ttft_ms"]),
        float(row["silicon_tpot_ms"]),
    )


def _quant(row: Row, name: str) -> str:
    """What the file states; checkpoints of NVIDIA's in 8 and 4 bits have static scales and an fp8 cache."""
    mode = (row.get("gemm_quant_mode") or row.get("precision") or "").lower()
    if "block" in mode:
        return "fp8-block"
    if "fp4" in mode or "fp4" in name:
        return "nvfp4-kv8"
    if "fp8" in mode or "fp8" in name:
        return "fp8" if "dynamic" in name else "fp8-static-kv8"
    return "bf16"


def _int(text: str) -> int:
    return int(float(text))


def predicted_ms(
    point: Point,
    host: HostFit | None,
    tier: str = "generic",
    *,
    computed: bool = False,
    n_lost: int = LOST_SLOTS,
) -> tuple[float, float]:
    """(TTFT, TPOT): means over the first wave and the later ones, as a load tool has them.

    `computed`: as if no prompt were in vLLM's prefix cache. `n_lost`: as if so many of TensorRT-LLM's slots
    were taken. NaN where the model does not fit.
    """
    device = load_device(point.device)
    known = generic() if tier == "generic" else load_calibration(device)
    deployment = Deployment(load_model(point.model)[0], QUANTS[point.quant], Parallel(tp=point.tp), device)
    asked = _asked(point, computed=computed)
    try:
        kv_tok = room(deployment.model, deployment.quant, deployment.parallel, device).kv_tok
        clock = Clock(deployment, _of_engine(replace(known, host=host), point.backend))
        result = simulate(
            asked,
            _limits(point, kv_tok, n_lost),
            clock,
            concurrency=point.streams,
            turnaround_s=_TURNAROUND_S,
        )
    except RooflineError:
        return float("nan"), float("nan")
    waves = len(asked) // point.streams
    by_wave = [1.0, *[(WAVES - 2) / (waves - 2)] * (waves - 2), 1.0]
    weights = np.repeat(by_wave, point.streams) / (WAVES * point.streams)
    return 1e3 * float(weights @ result.ttft_s), 1e3 * float(weights @ result.tpot_s)


def _asked(point: Point, *, computed: bool) -> list[Asked]:
    """The requests of the measured waves: all ten where they differ.

    vLLM caches prefixes by default, and the load tool repeats its prompts: what is left to compute is a
    prompt's last block, but for prompts that the warm-up did not reach. The other engines were started
    without their cache.
    """
    new, some = Asked(0.0, point.prompt_tok, point.output_tok), _SIMULATED * point.streams
    if point.backend != "vllm" or computed:
        return [new] * some
    repeated = replace(new, cached_tok=(point.prompt_tok - 1) // 16 * 16)
    n_new = max(0, _REPEATED - _WARM_UP * point.streams)
    n = WAVES * point.streams if n_new else some
    return ([new] * n_new + [repeated] * n)[:n]


def _limits(point: Point, kv_tok: int, n_lost: int) -> Limits:
    """TensorRT-LLM computes whole prompts; its scheduler and SGLang's work a step ahead, vLLM 0.12's not.

    aiconfigurator starts SGLang with `--enable-mixed-chunk`, and TensorRT-LLM with as many slots as the loop
    has streams and with a step's tokens set to the loop's lengths.
    """
    if point.backend == "trtllm":
        budget = point.streams + point.prompt_tok + _SPARE_TOK
        return Limits(max(1, point.streams - n_lost), budget, kv_tok, chunked_prefill=False, ahead=True)
    return Limits(point.streams, max(_BUDGET, point.prompt_tok), kv_tok, ahead=point.backend != "vllm")


def _of_engine(known: Calibration, backend: str) -> Calibration:
    """Only vLLM's attention computes prompts and decodes in one kernel."""
    return known if backend == "vllm" else replace(known, mixed=1.0)


def ratios(
    points: Sequence[Point], hosts: Sequence[HostFit | None], tier: str = "generic", **how: bool | int
) -> tuple[Amounts, Amounts]:
    """Predicted over measured TTFT and TPOT of each point. Uses all cores: each takes a tenth of a second.

    `how`: as in `predicted_ms`.
    """
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        predict = partial(predicted_ms, tier=tier, **how)  # type: ignore[arg-type]
        both = np.array(list(pool.map(predict, points, hosts, chunksize=4)))
    return (
        both[:, 0] / np.array([point.ttft_ms for point in points]),
        both[:, 1] / np.array([point.tpot_ms for point in points]),
    )


def set_on(point: Point) -> str:
    """The stack whose constants were set without this point's half: the H100 is one, all others the other."""
    return "set-on-h200" if point.device == "h100-sxm5-80g" else "set-on-h100"


def out_of_sample_hosts(points: Sequence[Point]) -> list[HostFit | None]:
    return [stack_host(set_on(point)) for point in points]


_STEPS_MS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0)
_TOKENS_MS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05)


def fit_host(points: Sequence[Point]) -> tuple[float, float]:
    """(seconds a step, seconds a token) of the least mean absolute log error of TPOT, from a grid.

    A stream gains a token a step, so that a step's cost adds to TPOT once and a token's once for each stream.
    """
    bare = ratios(points, [None] * len(points))[1] * [point.tpot_ms for point in points]
    streams, measured = (
        np.array([getattr(point, name) for point in points], dtype=float) for name in ("streams", "tpot_ms")
    )
    known = np.isfinite(bare)

    def cost(constants: tuple[float, float]) -> float:
        predicted = bare + constants[0] + constants[1] * streams
        return float(abs(np.log(predicted / measured))[known].mean())

    step_ms, token_ms = min(itertools.product(_STEPS_MS, _TOKENS_MS), key=cost)
    return step_ms * 1e-3, token_ms * 1e-3


def constants(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """The constants of each half and of all, by the stack's name."""
    points = [p for p in points if p.backend != "vllm"]  # what it computed is inferred, not stated
    halves = {"set-on-h100": "h100-sxm5-80g", "set-on-h200": "h200-sxm-141g"}
    found = {name: fit_host([p for p in points if p.device == device]) for name, device in halves.items()}
    return {"default": fit_host(points)} | found


if __name__ == "__main__":
    for stack, (step_s, token_s) in constants(read_points(Path(sys.argv[1]))).items():
        sys.stdout.write(f"[{stack}]\nstep_s = {step_s:g}\ntoken_s = {token_s:g}\n")
