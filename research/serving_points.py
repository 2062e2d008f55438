"""Published operating points of serving engines, predicted: a closed loop of streams, simulated step by step.

The file's columns are those of aiconfigurator's `silicon_sample.csv`, which can be read as a whole: points
whose model, device or layout is not known are left out. `python -m research.serving_points FILE.csv`
prints the constants of the serving stack that the file's points ask for, set on one half of the devices each,
and the errors of the shipped ones.
"""

import csv
import itertools
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from burstline.roofline.device.calibration import Calibration, HostFit, generic, load_calibration, stack_host
from burstline.roofline.device.device import load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import load_model
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS, Quant
from burstline.roofline.predict.capacity import room
from burstline.roofline.predict.kernels import Amounts
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.roofline.predict.simulate import Asked, FrontEnd, Limits, simulate
from research.check import errors

Row = Mapping[str, str]

DEVICES = {
    "a100_sxm": "a100-sxm4-80g", "h100_sxm": "h100-sxm5-80g", "h200_sxm": "h200-sxm-141g",
    "b200_sxm": "b200-sxm", "gb200": "gb200", "gb200_sxm": "gb200", "gb300": "gb300", "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
MODELS = {
    "llama-?3[._]?1-8b": "llama-3.1-8b", "llama-?3[._]?[13]-70b": "llama-3.1-70b", "qwen3-32b": "qwen3-32b",
    "qwen3-8b": "qwen3-8b", "qwen3-30b-a3b": "qwen3-30b-a3b", "qwen3-235b-a22b": "qwen3-235b-a22b",
    "llama-2-7b": "llama-2-7b", "llama-2-13b": "llama-2-13b", "llama-2-70b": "llama-2-70b",
    "mixtral-8x7b": "mixtral-8x7b", "deepseek-(v3|r1)": "deepseek-v3", "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
WAVES = 10
"""Load tools send some ten requests for each stream, the first ones all at once."""
_SIMULATED = 4  # waves: all are alike but the first and the last
_TURNAROUND_S = 1e-3  # from a reply's end to the client's next request: any time within a step has one effect
_BUDGET = 8192  # new tokens a step: SGLang's default on these devices
_SPARE_TOK = 1500  # what aiconfigurator lets a step have beside one prompt and all decodes
_SCRIPTED = "gap-analysis"
"""Where the points of aiconfigurator's own scripts come from, by the file's column of sources."""
_REPEATED = 100  # prompts that AIPerf draws from by default (`--num-dataset-entries`)
_SET_ON = {"default": ("llama-3.1-8b",), "synchronous": ("llama-3.1-8b", "qwen3-32b")}
"""The models whose points set the constants of a stack; the others' test them."""
# Seconds of the front ends, by the points that set them: of a prompt's token by the devices, of a reply by
# the engine and the half of its loads. No point shows vLLM's limit.
_PROMPT_TOK_S = {"h100": 5e-7, "h200": 3e-6}
_REPLY_S = {
    ("trtllm", True): 95e-6,
    ("trtllm", False): 95e-6,
    ("sglang", True): 50e-6,
    ("sglang", False): 55e-6,
}
_SHORTEST = 0.8  # of the stated length, where lengths are drawn: InferenceX's `random_range_ratio`
_WARM_UP = 2  # waves before the measured ones, as in aiconfigurator's scripts


@dataclass(frozen=True, slots=True)
class Point:
    """A closed loop of `streams` requests, and what was measured: means, in milliseconds.

    `version` has the first numbers of the engine's. `scripted`: aiconfigurator's scripts ran it.
    """

    device: str
    backend: str
    version: tuple[int, ...]
    model: str
    quant: str
    tp: int
    ep: int
    streams: int
    prompt_tok: int
    output_tok: int
    ttft_ms: float
    tpot_ms: float
    scripted: bool

    @property
    def group(self) -> str:
        return f"{self.device} {self.backend}"

    @property
    def ahead(self) -> bool:
        """Whether a step is scheduled while the one before it runs: vLLM does so by default since 0.14."""
        return self.backend != "vllm" or self.version >= (0, 14)

    @property
    def repeats_prompts(self) -> bool:
        """Whether vLLM cached prompts: in loops of whole thousands of tokens (docs/roofline-accuracy.md)."""
        return self.scripted and self.backend == "vllm" and self.prompt_tok % 1000 == 0

    @property
    def lost_slots(self) -> int:
        """Slots that the loops of TensorRT-LLM with Llama-3.1-8B went without (docs/roofline-accuracy.md)."""
        return int(self.scripted and self.backend == "trtllm" and self.model == "llama-3.1-8b")

    @property
    def is_even(self) -> bool:
        """One of two halves of all loads: a checkerboard over the powers of two of both lengths."""
        return round(math.log2(self.prompt_tok)) % 2 == round(math.log2(self.output_tok)) % 2

    @property
    def front_end(self) -> FrontEnd:
        """Of aiconfigurator's runs, by constants set on other points (docs/roofline-accuracy.md)."""
        if not self.scripted:
            return FrontEnd()
        return FrontEnd(_PROMPT_TOK_S[_other_half(self)], _REPLY_S.get((self.backend, not self.is_even), 0.0))

    @property
    def mixes_steps(self) -> bool:
        """Whether prompts share steps with decodes: at SGLang since the scripts ask for it (January 2026)."""
        return self.backend != "sglang" or (self.scripted and self.version >= (0, 5, 6))


def read_points(path: Path) -> list[Point]:
    """The points of aggregated serving whose model, device and layout are known; others are left out."""
    with path.open(newline="") as file:
        return [point for row in csv.DictReader(file) if (point := _point(row)) is not None]


def _point(row: Row) -> Point | None:
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
    return Point(
        DEVICES[row["system"]],
        row["backend"],
        tuple(map(int, re.findall(r"\d+", row.get("backend_version") or "")[:3])),
        model,
        _quant(row, name, load_model(model)[1]),
        tp,
        ep,
        _int(row["batch_size"]),
        _int(row["isl"]),
        _int(row["osl"]),
        float(row["silicon_ttft_ms"]),
        float(row["silicon_tpot_ms"]),
        _SCRIPTED in row.get("silicon_data_source", ""),
    )


def _quant(row: Row, name: str, stored: Quant) -> str:
    """What the file states, unless experts alone are `stored` in 4 bits (gpt-oss).

    NVIDIA's checkpoints in 8 and 4 bits have static scales and an fp8 cache, DeepSeek's and Qwen's scales by
    block.
    """
    mode = (row.get("gemm_quant_mode") or row.get("precision") or "").lower()
    if stored.experts_only:
        return "mxfp4"
    if "fp4" in mode or "fp4" in name:
        return "nvfp4-kv8"
    if "block" in mode or ("fp8" in mode and re.search("deepseek|qwen/qwen3.*-fp8", name)):
        return "fp8-block"
    if "int4" in mode:
        return "int4"
    if "fp8" in mode or "fp8" in name:
        return "fp8" if "dynamic" in name else "fp8-static-kv8"
    return "bf16"


def _int(text: str) -> int:
    return int(float(text))


def predicted_ms(
    point: Point,
    host: HostFit | None,
    front_end: FrontEnd | None = None,
    tier: str = "generic",
    *,
    computed: bool = False,
    n_lost: int | None = None,
) -> tuple[float, float]:
    """(TTFT, TPOT): means over the first wave and the later ones, as a load tool has them.

    `computed`: as if no prompt were in vLLM's prefix cache. `n_lost`: as if so many slots were taken.
    `front_end`: another than the point's. NaN where the model does not fit.
    """
    device = load_device(point.device)
    known = generic(device) if tier == "generic" else load_calibration(device)
    deployment = Deployment(
        load_model(point.model)[0], QUANTS[point.quant], Parallel(tp=point.tp, ep=point.ep), device
    )
    asked = _asked(point, computed=computed)
    try:
        kv_tok = room(deployment.model, deployment.quant, deployment.parallel, device).kv_tok
        clock = Clock(deployment, _of_engine(replace(known, host=host), point.backend))
        result = simulate(
            asked,
            _limits(point, kv_tok, point.lost_slots if n_lost is None else n_lost),
            clock,
            concurrency=point.streams,
            turnaround_s=_TURNAROUND_S,
            front_end=point.front_end if front_end is None else front_end,
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
    without their cache. InferenceX, whose points the file has too, draws lengths.
    """
    new, some = Asked(0.0, point.prompt_tok, point.output_tok), _SIMULATED * point.streams
    if not point.scripted:
        shares = np.random.default_rng(0).uniform(_SHORTEST, 1, (some, 2))
        lengths = np.ceil(shares * (point.prompt_tok, point.output_tok)).astype(int).tolist()
        return [Asked(0.0, prompt_tok, output_tok) for prompt_tok, output_tok in lengths]
    if computed or not point.repeats_prompts:
        return [new] * some
    repeated = replace(new, cached_tok=(point.prompt_tok - 1) // 16 * 16)
    n_new = max(0, _REPEATED - _WARM_UP * point.streams)
    n = WAVES * point.streams if n_new else some
    return ([new] * n_new + [repeated] * n)[:n]


def _limits(point: Point, kv_tok: int, n_lost: int) -> Limits:
    """aiconfigurator's scripts set a step's tokens of TensorRT-LLM and vLLM to the loop's lengths.

    TensorRT-LLM computes whole prompts, and has as many slots as the loop has streams.
    """
    whole = point.backend == "trtllm"
    budget = point.streams + point.prompt_tok + _SPARE_TOK
    if point.backend == "sglang" or not point.scripted:
        budget = max(_BUDGET, point.prompt_tok if point.backend == "sglang" else budget)
    return Limits(
        max(1, point.streams - n_lost),
        budget,
        kv_tok,
        chunked_prefill=not whole,
        mixed_steps=point.mixes_steps,
        ahead=point.ahead,
    )


def _of_engine(known: Calibration, backend: str) -> Calibration:
    """Only vLLM's attention computes prompts and decodes in one kernel."""
    return known if backend == "vllm" else replace(known, mixed=1.0)


def ratios(
    points: Sequence[Point],
    hosts: Sequence[HostFit | None],
    tier: str = "generic",
    *,
    computed: bool = False,
    n_lost: int | None = None,
    front_ends: Sequence[FrontEnd] | None = None,
) -> tuple[Amounts, Amounts]:
    """Predicted over measured TTFT and TPOT of each point. Uses all cores: each takes a tenth of a second.

    `computed`, `n_lost`: as in `predicted_ms`; `front_ends`: others than the points'.
    """
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        predict = partial(predicted_ms, tier=tier, computed=computed, n_lost=n_lost)
        front_ends = front_ends or [point.front_end for point in points]
        both = np.array(list(pool.map(predict, points, hosts, front_ends, chunksize=4)))
    return (
        both[:, 0] / np.array([point.ttft_ms for point in points]),
        both[:, 1] / np.array([point.tpot_ms for point in points]),
    )


_HALVES = {"h100-sxm5-80g": "h100", "h200-sxm-141g": "h200"}


def out_of_sample_hosts(points: Sequence[Point]) -> list[HostFit]:
    """Constants that were set without each point's half: the H100 is one, all others the other."""
    return [stack_host(f"{stack_of(p)}-set-on-{_other_half(p)}") for p in points]


def stack_of(point: Point) -> str:
    """Whose constants a point's predictions use: those of engines that schedule ahead, or that do not."""
    return "default" if point.ahead else "synchronous"


def _other_half(point: Point) -> str:
    return "h200" if point.device == "h100-sxm5-80g" else "h100"


_PROMPT_TOK_US = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
_REPLY_US = (0.0, 40.0, 45.0, 50.0, 55.0, 60.0, 70.0, 80.0, 90.0, 95.0, 100.0, 105.0, 110.0, 115.0)


def fit_front_ends(points: Sequence[Point]) -> tuple[dict[tuple[str, bool], float], dict[str, float]]:
    """(seconds a reply by engine and half of its loads, seconds a prompt's token by half of the devices).

    Of the least mean absolute log error of TTFT and TPOT, from a grid: of replies first, where a token of a
    prompt takes 1 us, then of prompts with the replies of the points' own halves.
    """
    reply_s = {}
    for backend in ("trtllm", "sglang"):
        chosen = [p for p in points if p.backend == backend]
        tried = {us * 1e-6: _wrong(chosen, [FrontEnd(1e-6, us * 1e-6)] * len(chosen)) for us in _REPLY_US}
        for even in (True, False):
            reply_s[backend, even] = _least(tried, np.array([p.is_even == even for p in chosen]))
    own = [reply_s.get((p.backend, p.is_even), 0.0) for p in points]
    tried = {
        us * 1e-6: _wrong(points, [FrontEnd(us * 1e-6, seconds) for seconds in own]) for us in _PROMPT_TOK_US
    }
    halves = {half: np.array([p.device == device for p in points]) for device, half in _HALVES.items()}
    return reply_s, {half: _least(tried, which) for half, which in halves.items()}


def _wrong(points: Sequence[Point], front_ends: Sequence[FrontEnd]) -> Amounts:
    ttft, tpot = ratios(points, out_of_sample_hosts(points), front_ends=front_ends)
    return np.asarray(abs(np.log(ttft)) + abs(np.log(tpot)))


def _least(tried: Mapping[float, Amounts], which: npt.NDArray[np.bool_]) -> float:
    return min(tried, key=lambda seconds: float(np.nanmean(tried[seconds][which])))


_STEPS_MS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, *np.arange(1.0, 4.01, 0.25).tolist())
_TOKENS_MS = tuple(np.arange(0.0, 0.071, 0.005).round(3).tolist())


def fit_host(points: Sequence[Point]) -> tuple[float, float]:
    """(seconds a step, seconds a token) of the least mean absolute log error of TPOT, from a grid.

    A stream gains a token a step, so that a step's cost adds to TPOT once and a token's once for each stream,
    where no front end delays it.
    """
    alone = ratios(points, [None] * len(points), front_ends=[FrontEnd()] * len(points))
    bare = alone[1] * [point.tpot_ms for point in points]
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
    """The constants of each half and of both, by the stack's name.

    The default's are set on Llama-3.1-8B; the halves of the synchronous ones share no model.
    """
    found: dict[str, tuple[float, float]] = {}
    for stack in ("default", "synchronous"):
        chosen = [p for p in points if p.scripted and stack_of(p) == stack and p.model in _SET_ON[stack]]
        halves = {
            f"{stack}-set-on-{half}": [p for p in chosen if p.device == device]
            for device, half in _HALVES.items()
        }
        both = {stack: [p for half in halves.values() for p in half]}
        found |= {name: fit_host(some) for name, some in (both | halves).items() if some}
    return found


def _print(path: Path) -> None:
    points = read_points(path)
    for stack, (step_s, token_s) in constants(points).items():
        sys.stdout.write(f"[{stack}]\nstep_s = {step_s:g}\ntoken_s = {token_s:g}\n")
    replies, prompts = fit_front_ends([p for p in points if p.scripted and p.model in _SET_ON["default"]])
    for (backend, even), seconds in replies.items():
        half = "even" if even else "odd"
        sys.stdout.write(f"front end, {backend}, {half} half of its loads: {seconds * 1e6:g} us a reply\n")
    for half, seconds in prompts.items():
        sys.stdout.write(f"front end, {half}: {seconds * 1e6:g} us a prompt token\n")
    ttft, tpot = ratios(points, [stack_host(stack_of(p)) for p in points])
    sys.stdout.write("\nErrors of the shipped constants, percent: median / 90th percentile, signed median\n")
    kinds = [f"{p.group} {'.'.join(map(str, p.version))} {p.model} {p.quant}" for p in points]
    for kind in sorted(set(kinds)):
        chosen = [i for i, each in enumerate(kinds) if each == kind and np.isfinite(tpot[i])]
        if chosen:
            sys.stdout.write(f"{kind}: TPOT {errors(tpot[chosen])}, TTFT {errors(ttft[chosen])}\n")


if __name__ == "__main__":
    _print(Path(sys.argv[1]))
