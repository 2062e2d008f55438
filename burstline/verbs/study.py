"""`burstline study training`: how long a training step takes, what bounds it, what fits in memory."""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from burstline.console import exit_codes
from burstline.reports.formats.text import columns
from burstline.roofline.device.calibration import load_calibration
from burstline.roofline.device.device import Device, load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import bundled_models, load_model
from burstline.roofline.training.memory import training_memory
from burstline.roofline.training.recipe import Recipe, Recompute
from burstline.roofline.training.sharding import Sharding, three_level, zero, zero_plus_plus
from burstline.roofline.training.step import TrainingStep, training_step
from burstline.workloads.options import flag_of

SHARDINGS = ("0", "1", "2", "3", "++", "three-level")
_GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", choices=("training",), help="what to predict")
    models = f"a bundled model ({', '.join(bundled_models())}) or a path"
    add("--model", default="llama-2-13b", help=models)
    add("--device", default="a100-sxm4-80g", help="device to train on; default a100-sxm4-80g")
    add("--json", action="store_true", help="print JSON")
    add("--figures", type=Path, help="folder for the figures (SVG)")
    add("--devices", type=int, default=8, help="number of devices; default 8")
    add("--tp", type=int, default=1, help="tensor-parallel devices; default 1")
    add("--pp", type=int, default=1, help="pipeline stages; default 1")
    add("--virtual-stages", type=int, default=1, help="interleaved chunks per pipeline stage; default 1")
    add("--zero", choices=SHARDINGS, default="0", help="ZeRO stage of data parallelism; default 0 (DDP)")
    add("--seq", type=int, default=2048, help="tokens per sequence; default 2048")
    add("--micro-batch", type=int, default=1, help="sequences per micro-batch; default 1")
    add("--sequences", type=int, help="sequences per step; default a micro-batch per replica")
    add("--recompute", choices=get_args(Recompute), default="none", help="what to recompute; default none")
    add("--sequence-parallel", action="store_true", help="also split norms over tensor ranks")
    add("--lora", type=int, metavar="RANK", help="train only LoRA adapters of this rank")
    add("--qlora", type=int, metavar="RANK", help="the same, with frozen 4-bit weights")
    add("--offload", action="store_true", help="keep optimizer states in host memory")
    add("--network-gb-per-s", type=float, help="between nodes: GB/s per device and direction")


def run(args: argparse.Namespace) -> int:
    """Print one recipe: its time, bounds and memory, and what other methods would give."""
    recipe = recipe_of(vars(args))
    calibration = load_calibration(recipe.device)
    step = training_step(recipe, calibration)
    others = [(name, training_step(other, calibration)) for name, other in _methods(recipe)]
    if args.figures:
        from burstline.reports.figures.study_figures import write_training  # matplotlib takes a second

        write_training(args.figures / "training.svg", {"as asked": step, **dict(others)})
    if args.json:
        print(json.dumps({**_facts(step), "methods": {name: _facts(s) for name, s in others}}, indent=2))
    else:
        print("\n\n".join(_report(step, others)))
    return exit_codes.DONE


def recipe_of(asked: dict[str, Any]) -> Recipe:
    """The recipe that the flags describe; raises what is wrong with it."""
    counts = ("devices", "tp", "pp", "virtual_stages", "seq", "micro_batch", "sequences", "lora", "qlora")
    for name in counts:
        if asked[name] is not None and asked[name] < 1:
            raise RooflineError(f"{flag_of(name)} must be at least 1, not {asked[name]}")
    gb_per_s = asked["network_gb_per_s"]
    if gb_per_s is not None and not 0 < gb_per_s < math.inf:
        raise RooflineError(f"--network-gb-per-s {gb_per_s:g}: expected a number above 0")
    if asked["virtual_stages"] > 1 and asked["pp"] == 1:
        raise RooflineError(
            f"--virtual-stages {asked['virtual_stages']} would be ignored: it splits stages; add --pp"
        )
    if asked["sequence_parallel"] and asked["tp"] == 1:
        raise RooflineError("--sequence-parallel would be ignored: it splits over tensor ranks; add --tp")
    if asked["lora"] and asked["qlora"]:
        raise RooflineError("--lora and --qlora are two methods; give one of them")
    model, device = load_model(asked["model"])[0], load_device(asked["device"])
    if gb_per_s is not None:
        device = device.with_network(gb_per_s * _GB)
    in_replica = asked["tp"] * asked["pp"]
    if asked["devices"] % in_replica:
        raise RooflineError(
            f"--tp {asked['tp']} x --pp {asked['pp']} = {in_replica} does not divide --devices"
            f" {asked['devices']}"
        )
    n_ranks = asked["devices"] // in_replica
    return Recipe(
        model,
        device,
        asked["sequences"] or asked["micro_batch"] * n_ranks * asked["pp"],
        asked["seq"],
        asked["micro_batch"],
        sharding_of(asked["zero"], n_ranks, device),
        asked["tp"],
        asked["pp"],
        asked["virtual_stages"],
        asked["sequence_parallel"],
        asked["recompute"],
        adapter_rank=asked["lora"] or asked["qlora"] or 0,
        frozen="int4" if asked["qlora"] else "bf16",
        offload=asked["offload"],
    )


def sharding_of(name: str, n_ranks: int, device: Device) -> Sharding:
    """ZeRO's stage 0 to 3, ZeRO++ ("++") or the three-level scheme, on this device's package and node."""
    reach = {link.scope: link.n_devices for link in device.links}
    if name == "++":
        return zero_plus_plus(n_ranks, reach.get("node", 1))
    if name == "three-level":
        return three_level(n_ranks, reach.get("package", 1), reach.get("node", 1))
    return zero(int(name), n_ranks)


def _methods(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    for stage in (0, 1, 2, 3):
        for recompute in ("none", "full"):
            sharding = zero(stage, recipe.sharding.n_ranks)
            name = f"{sharding.name}, recompute {recompute}"
            yield name, replace(recipe, sharding=sharding, recompute=recompute)


def _report(step: TrainingStep, others: list[tuple[str, TrainingStep]]) -> Iterator[str]:
    yield _answer(step, others)
    yield "\n".join(["1. Where a step's time goes", columns(_time_rows(step), (0,))])
    yield "\n".join(
        ["2. What bounds each product (one micro-batch, all stages)", columns(_op_rows(step), (0, 1, 5))]
    )
    yield "\n".join(["3. Memory of the fullest device", columns(_memory_rows(step), (0,))])
    header = ["method", "s a step", "tok/s", "MFU", "exposed", "GB a device", "fits"]
    rows = [
        [
            name,
            f"{other.seconds:.3g}",
            f"{other.tok_per_s:,.0f}",
            f"{other.mfu:.0%}",
            f"{other.exposed_s / other.seconds:.0%}",
            f"{other.memory.total / _GB:.1f}",
            "yes" if other.fits else "no",
        ]
        for name, other in others
    ]
    yield "\n".join(["4. The same with other methods", columns([header, *rows], (0,))])
    yield (
        "Assumed: bf16 weights and gradients, Adam in fp32, FlashAttention, ops at calibrated rates;"
        "\ncollectives of weights and gradients run behind computing, those of tensor parallelism do not."
        "\nMeasured sets and errors, in a clone: docs/howto/train-a-model.md."
    )


def _answer(step: TrainingStep, others: list[tuple[str, TrainingStep]]) -> str:
    recipe, capacity = step.recipe, step.recipe.device.memory.capacity_bytes
    largest = largest_micro_batch(recipe)
    room = (
        f"It fits: {step.memory.total / _GB:.1f} of {capacity / _GB:.1f} GB a device; micro-batches of up to"
        f" {largest} fit."
        if step.fits
        else f"It does not fit: {step.memory.total / _GB:.1f} GB a device of {capacity / _GB:.1f}."
    )
    fitting = [(name, other) for name, other in others if other.fits]
    if not step.fits and fitting:
        name, best = max(fitting, key=lambda pair: pair[1].tok_per_s)
        room += f" Fastest that does: {name} ({best.tok_per_s:,.0f} tok/s)."
    elif not step.fits:
        room += (
            " No sharding or recomputation of this many devices makes it fit; try more devices or --qlora."
        )
    return (
        f"{recipe.model.name} on {recipe.n_devices} x {recipe.device.name}, {recipe.sharding.name}:"
        f" {step.seconds:.3g} s a step of {recipe.n_seq} x {recipe.n_seq_tok:,} tokens,"
        f" {step.tok_per_s:,.0f} tok/s, {step.flops_per_s / 1e12:.0f} TFLOP/s a device"
        f" ({step.mfu:.0%} MFU).\n{room}"
    )


def largest_micro_batch(recipe: Recipe) -> int:
    """The largest power of two that fits; 0 where 1 does not."""
    largest = 0
    for power in range(20):
        size = 2**power
        n_seq = size * recipe.sharding.n_ranks * recipe.n_micro
        if not training_memory(replace(recipe, micro_batch=size, n_seq=n_seq)).fits(recipe.device):
            break
        largest = size
    return largest


def _time_rows(step: TrainingStep) -> list[list[str]]:
    by_pass = dict.fromkeys(("forward", "backward", "recompute"), 0.0)
    for each in step.work:
        if each.op.kind != "collective":
            by_pass[each.during] += each.seconds
    whole = sum(by_pass.values())
    computing = {f"compute, {name}": step.compute_s * s / whole for name, s in by_pass.items() if s}
    parts = {
        **computing,
        "tensor-parallel collectives": step.tensor_s,
        "pipeline bubble": step.bubble_s,
        "other communication, exposed": step.exposed_s,
        "optimizer": step.optimizer_s,
    }
    rows = [
        [name, f"{seconds:.4g}", f"{seconds / step.seconds:.1%}"]
        for name, seconds in parts.items()
        if seconds
    ]
    hidden = [["(communication behind computing)", f"{step.hidden_s:.4g}", ""]] if step.hidden_s else []
    return [["part", "s", "share"], *rows, *hidden]


def _op_rows(step: TrainingStep) -> list[list[str]]:
    whole = sum(each.seconds for each in step.work)
    rows = [["op", "during", "M x N x K", "runs", "FLOP/B", "bound by", "s", "share"]]
    for each in step.work:
        op = each.op
        if op.kind not in ("matmul", "attention") or each.seconds < 0.005 * whole:
            continue
        size = f"{op.m:,.0f} x {op.n:,.0f} x {op.k:,.0f}"
        cells = [op.name, each.during, size, str(op.count), f"{op.intensity:.0f}", each.prediction.limit]
        rows.append([*cells, f"{each.seconds:.4g}", f"{each.seconds / whole:.1%}"])
    return rows


def _memory_rows(step: TrainingStep) -> list[list[str]]:
    rows = [[name, f"{value / _GB:.2f}"] for name, value in asdict(step.memory).items()]
    return [["kind", "GB"], *rows, ["total", f"{step.memory.total / _GB:.2f}"]]


def _facts(step: TrainingStep) -> dict[str, Any]:
    names = ("seconds", "tok_per_s", "flops_per_s", "mfu", "compute_s", "tensor_s", "bubble_s", "exposed_s")
    return {
        **{name: getattr(step, name) for name in (*names, "hidden_s", "optimizer_s", "fits")},
        "memory_bytes": {**asdict(step.memory), "total": step.memory.total},
    }
