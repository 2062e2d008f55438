"""`burstline bound`: predicted speed, the bottleneck of each phase, and how many requests fit."""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from burstline.console import exit_codes
from burstline.console.flags import add_options, read_options
from burstline.errors import RooflineError
from burstline.machine.hardware import config_at, device_text
from burstline.reports.formats.bound_text import compared, told
from burstline.reports.formats.text import text
from burstline.roofline.device.calibration import Calibration, Constants, read_device_file, with_host
from burstline.roofline.device.device import Device
from burstline.roofline.model.families import bundled_models, load_model
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import ELEMENT_BYTES, QUANTS, Quant
from burstline.roofline.predict import capacity
from burstline.roofline.predict.capacity import BLOCK_TOK, Room, check_batch, kv_bytes, largest_batch, room
from burstline.roofline.predict.deployment import (
    UniformBatch,
    decode_curve,
    host_sentence,
    latency_ends_s,
    latency_s,
    phase_bounds,
    ridge_tok,
)
from burstline.roofline.predict.predict import Clock, Deployment, Prediction, StepTimes
from burstline.roofline.predict.simulate import Asked, Limits, simulate
from burstline.roofline.profile.attribute import profile_of
from burstline.roofline.profile.compare import compare
from burstline.roofline.reconcile.inputs import Setup
from burstline.workloads.options import flag_of, option, options_of

GENERATIONS = ("a100-sxm4-80g", "h100-sxm5-80g", "h200-sxm-141g", "b200-sxm")
"""The devices of the what-ifs."""


@dataclass(frozen=True, slots=True)
class BoundOptions:
    """A question about a model on a device: flags of the command, and arguments of `burstline.bound`."""

    batch: int = option("batch size of each replica (1)", 1, parse=int)
    prompt: int = option("prompt tokens (512)", 512, parse=int)
    output: int = option("output tokens (128)", 128, parse=int)
    tp: int = option("tensor-parallel size (1)", 1, parse=int)
    pp: int = option("pipeline-parallel size (1)", 1, parse=int)
    ep: int = option("expert-parallel size (1)", 1, parse=int)
    dp: int = option("data-parallel size (1)", 1, parse=int)
    quant: str | None = option("format of the weights (the checkpoint's)", choices=tuple(QUANTS))
    network_gb_per_s: float | None = option(
        "network between nodes, in GB/s per device and direction", parse=float
    )
    utilisation: float = option("share of the device's memory that the engine uses (0.9)", 0.9, parse=float)
    simulate: int | None = option(
        "also simulate a burst of N requests to each replica (1000)", parse=int, metavar="N", bare=1000
    )
    max_num_seqs: int = option("simulated burst: requests decoded at once (256)", 256, parse=int)
    max_num_batched_tokens: int = option("tokens per step (2048)", 2048, parse=int)
    constant: tuple[str, ...] = option(
        f"change a constant of the roofline model: {', '.join(slot.name for slot in fields(Constants))}",
        (), many=True, metavar="NAME=VALUE",
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = f"a bundled model ({', '.join(bundled_models())}) or a folder or file with a config.json"
    add("--model", required=True, help=models)
    add(
        "--device",
        required=True,
        nargs="+",
        help="one device, or several to compare: an id, the driver's name, your own .toml file, or cpu",
    )
    add_options(parser, BoundOptions)
    add(
        "--figure",
        type=Path,
        metavar="FILE",
        help="write a figure (SVG): rooflines, and decoding by batch size",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="compare each GEMM in a trace of PyTorch's profiler (a file, or a folder with one per rank) "
        "with the prediction; --prompt and --output give context lengths that a trace lacks",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    options = read_options(BoundOptions, args)
    check(options)
    if args.figure and args.figure.suffix not in (".svg", ".png", ".pdf"):
        raise RooflineError(f"--figure {args.figure}: expected a name that ends with .svg, .png or .pdf")
    if args.trace is not None:
        return _profile(options, args)
    found = [analyse(options, args.model, name, several=len(args.device) > 1) for name in args.device]
    if args.json:
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        print(compared(found) if len(found) > 1 else told(found[0]))
    if args.figure:
        from burstline.reports.figures.study_figures import write_bound  # matplotlib takes a second to import

        write_bound(args.figure, [one for one in found if "impossible" not in one])
        print(f"Written to {args.figure}.")
    return exit_codes.DONE


def _profile(options: BoundOptions, args: argparse.Namespace) -> int:
    """Print a trace's products beside what this deployment should take for them."""
    used = ("prompt", "output", "tp", "pp", "ep", "dp", "quant", "network_gb_per_s", "constant")
    ignored = [row.flag for name, row in options_of(BoundOptions).items()
               if name not in used and getattr(options, name) != row.default]  # fmt: skip
    ignored += ["--figure"] if args.figure else []
    if ignored or len(args.device) > 1:
        what = ", ".join(ignored) or "--device with several names"
        raise RooflineError(f"--trace compares one device with what was measured: {what} would be ignored")
    deployment, known = _set_up(options, args.model, *_known(args.device[0], args.model))
    setup = Setup(deployment, known)
    profile = profile_of(args.trace, deployment.model, deployment.parallel)
    found = compare(profile, setup, options.prompt + options.output / 2)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        from burstline.reports.page.roofline_section import profiled  # it draws: matplotlib takes a second

        print(text(profiled(found)))
    return exit_codes.DONE


def _set_up(
    options: BoundOptions, model_name: str, device: Device, shipped: Calibration
) -> tuple[Deployment, Calibration]:
    """The model on its devices, and the constants in force."""
    model, quant = load_model(model_name, options.quant)
    if options.network_gb_per_s:
        device = device.with_network(options.network_gb_per_s * 1e9)
    parallel = Parallel(options.tp, options.pp, options.ep, options.dp)
    return Deployment(model, quant, parallel, device), shipped.changed(_constants(options.constant))


def check(options: BoundOptions) -> None:
    """Raise RooflineError, with what was expected, for a number that cannot be."""
    if not 0 < options.utilisation <= 1:
        raise RooflineError(
            f"--utilisation {options.utilisation:g}: expected a share above 0 and up to 1, for example 0.9"
        )
    for name in ("simulate", "max_num_seqs", "max_num_batched_tokens", "network_gb_per_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise RooflineError(f"{flag_of(name)} {value:g}: expected a number above 0")
    if options.network_gb_per_s is not None and options.tp * options.pp * options.dp == 1:
        raise RooflineError("--network-gb-per-s would be ignored: one device needs no network; add --tp")


def analyse(
    options: BoundOptions, model_name: str, device_name: str, *, several: bool = False
) -> dict[str, Any]:
    """Everything the verb says of one device, ready for JSON. Times are seconds unless the key says µs.

    Of `several` devices one that is impossible says why.
    """
    device, shipped = _known(device_name, model_name)
    try:
        return _analysis(options, model_name, device, shipped)
    except RooflineError as error:
        if not several:
            raise
        return {"device": _device_facts(device), "impossible": str(error)}


def _analysis(options: BoundOptions, model_name: str, device: Device, shipped: Calibration) -> dict[str, Any]:
    deployment, known = _set_up(options, model_name, device, shipped)
    model, quant, parallel, device = (
        deployment.model, deployment.quant, deployment.parallel, deployment.device,
    )  # fmt: skip
    asked = UniformBatch(options.batch, options.prompt, options.output, options.max_num_batched_tokens)
    n_tok = options.prompt + options.output
    kv_room = room(model, quant, parallel, device, utilisation=options.utilisation)
    check_batch(model, quant, parallel, kv_room, options.batch, n_tok)
    phases = phase_bounds(deployment, asked, known)
    latency = {"ceiling": latency_s(phases, ceiling=True), "predicted": latency_s(phases)}
    n_out = options.batch * options.output * parallel.dp
    return {
        "model": {"name": model.name, "params": model.params(), "active_params": model.active_params()},
        "quant": asdict(quant),
        "parallel": asdict(parallel),
        "device": _device_facts(device),
        "asked": asdict(asked),
        "answer": _answer(deployment, asked, phases),
        "phases": {name: _phase_facts(phase, device) for name, phase in phases.items()},
        "what_if": list(_what_ifs(options, deployment, asked, known, shipped)),
        "constants": list(_moved_by(deployment, asked, known, latency["predicted"])),
        "decode_s_by_batch": _by_batch(deployment, asked, kv_room, known),
        "latency_s": latency,
        "latency_range_s": latency_ends_s(phases),
        "output_tok_per_s": {by: n_out / seconds for by, seconds in latency.items()},
        "memory": {
            **asdict(kv_room),
            "kv_bytes_per_tok": kv_bytes(model, quant, parallel, 1),
            "largest_batch": largest_batch(model, quant, parallel, kv_room, n_tok),
            "fits": capacity.fits(model, quant, parallel, kv_room, options.batch, n_tok),
            "windows": any(layer.attention.window or layer.attention.chunk for layer in model.layers),
        },
        "burst": _burst(options, deployment, kv_room, known) if options.simulate else None,
        "assumed": [*_assumed(options, device, kv_room), *_of_calibration(quant, known)],
    }


def _answer(deployment: Deployment, asked: UniformBatch, phases: Mapping[str, StepTimes]) -> dict[str, Any]:
    """The limit of each phase, and the tokens per step from which its products are compute-bound."""
    decode = phases.get("decode")
    attention = [p.bound.limit for p in (decode.predictions if decode else ()) if p.op.kind == "attention"]
    return {
        "limits": {name: phase.limit for name, phase in phases.items()},
        "ridge_tok": ridge_tok(deployment),
        "attention_memory_bound": bool(attention) and set(attention) == {"memory"},
        "context_tok": asked.mean_context_tok,
    }


def _constants(stated: Sequence[str]) -> dict[str, float]:
    """The values of `--constant`; raises RooflineError for what is none."""
    found = {}
    for one in stated:
        name, _, value = one.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise RooflineError(f"--constant {one}: expected NAME=VALUE, for example memory=0.8") from error
    return found


def _what_ifs(
    options: BoundOptions,
    deployment: Deployment,
    asked: UniformBatch,
    known: Calibration,
    shipped: Calibration,
) -> Iterator[dict[str, Any]]:
    """The same request with one thing changed: constants, how numbers are stored, ranks, the device."""
    changes: list[tuple[str, Deployment, Calibration]] = [("as asked", deployment, known)]
    if known != shipped:
        changes.append(("constants as shipped", deployment, shipped))
    stream = deployment.quant.stream
    for name in ("fp8-static", "fp8-static-kv8", "int4", "nvfp4-kv8"):
        quant = QUANTS[name]
        if quant != deployment.quant and stream in ("bf16", "fp16"):
            changes.append((f"{name} weights", replace(deployment, quant=quant), known))
    tp = deployment.parallel.tp
    wider = replace(deployment, parallel=replace(deployment.parallel, tp=2 * tp))
    changes.append((f"TP {2 * tp}", wider, known))
    for id_ in GENERATIONS:
        if id_ != deployment.device.id and deployment.device.vendor == "nvidia":
            device, theirs = _known(id_, deployment.model.name)
            changed = theirs.changed(_constants(options.constant))
            changes.append((device.name, replace(deployment, device=device), changed))
    for change, on, by in changes:
        try:
            kv_room = room(on.model, on.quant, on.parallel, on.device, utilisation=options.utilisation)
            n_tok = asked.n_prompt_tok + asked.n_output_tok
            check_batch(on.model, on.quant, on.parallel, kv_room, asked.batch, n_tok)
            bounds = phase_bounds(on, asked, by)
        except RooflineError as error:
            yield {"change": change, "impossible": str(error)}
        else:
            seconds = latency_s(bounds)
            yield {
                "change": change,
                "latency_s": seconds,
                "latency_range_s": latency_ends_s(bounds),
                "differs": [each for phase in bounds.values() for each in phase.differs],
                "output_tok_per_s": asked.batch * asked.n_output_tok * on.parallel.dp / seconds,
                "largest_batch": largest_batch(on.model, on.quant, on.parallel, kv_room, n_tok),
            }


def _moved_by(
    deployment: Deployment, asked: UniformBatch, known: Calibration, base_s: float
) -> Iterator[dict[str, Any]]:
    """Each constant that matters here: its value, and how the latency moves where it is 10% larger."""
    for slot in fields(Constants):
        value = getattr(known.constants, slot.name)
        more = known.changed({slot.name: 1.1 * value})
        change = latency_s(phase_bounds(deployment, asked, more)) / base_s - 1
        if abs(change) >= 0.0005:
            own = slot.name in known.own
            yield {"name": slot.name, "value": value, "own": own, "change_at_10_percent_more": change}


def _by_batch(
    deployment: Deployment, asked: UniformBatch, kv_room: Room, known: Calibration
) -> dict[str, list[tuple[int, float]]]:
    """Seconds of a decode step by batch, as far as the cache reaches; the ceiling and as predicted."""
    shape = deployment.model, deployment.quant, deployment.parallel
    most = min(1024, largest_batch(*shape, kv_room, asked.n_prompt_tok + asked.n_output_tok))
    either = {"ceiling": None, "predicted": known}
    return {name: decode_curve(deployment, asked.mean_context_tok, by, most) for name, by in either.items()}


def _burst(options: BoundOptions, on: Deployment, kv_room: Room, known: Calibration) -> dict[str, Any]:
    """A burst of `--simulate` requests through vLLM's scheduling rules, at the ceiling and as predicted."""
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, kv_room.kv_tok)
    one_tok = BLOCK_TOK * math.ceil((options.prompt + options.output) / BLOCK_TOK)
    most = largest_batch(on.model, on.quant, on.parallel, kv_room, one_tok)
    if most != kv_room.kv_tok // one_tok:  # windows keep fewer tokens than all, linear attention its state
        limits = replace(limits, max_num_seqs=min(options.max_num_seqs, most), kv_tok=most * one_tok)
    requests = [Asked(0.0, options.prompt, options.output)] * (options.simulate or 0)
    found = {}
    for name, by in {"ceiling": None, "predicted": known}.items():
        outcome = simulate(requests, limits, Clock(on, by))
        found[name] = {
            "makespan_s": outcome.makespan_s,
            "output_tok_per_s": len(requests) * options.output / outcome.makespan_s,
            "ttft_p50_s": float(np.median(outcome.ttft_s)),
            "ttft_p99_s": float(np.quantile(outcome.ttft_s, 0.99)),
            "tpot_mean_s": float(np.mean(outcome.tpot_s)) if options.output > 1 else None,
            "most_running": int(outcome.steps.n_running.max()),
            "n_preemptions": outcome.n_preemptions,
        }
    return {"n_requests": options.simulate, **asdict(limits), "by": found}


def _known(name: str, model: str) -> tuple[Device, Calibration]:
    """A device as a run of `model` reads it: by name, by file, or this CPU as it was measured."""
    device, known = read_device_file(device_text(name, config_at(model) if name == "cpu" else None), name)
    return device, with_host(known)


def _device_facts(device: Device) -> dict[str, Any]:
    return {
        "id": device.id,
        "name": device.name,
        "peak_flops_per_s": dict(device.peaks),
        "bytes_per_s": device.bytes_per_s,
        "capacity_bytes": device.memory.capacity_bytes,
        "source": device.source,
        "assurance": device.assurance,
    }


def _phase_facts(phase: StepTimes, device: Device) -> dict[str, Any]:
    return {
        "n_steps": phase.n_steps,
        "ceiling_s": phase.ceiling_s,
        "predicted_s": phase.predicted_s,
        "range_s": phase.range_s,
        "kernels_range_s": phase.ends_s,
        "differs": phase.differs,
        "host_s": phase.host_s,
        "bound": phase.limit,
        "ops": [_op_facts(p, phase, device) for p in phase.predictions],
    }


def _op_facts(p: Prediction, phase: StepTimes, device: Device) -> dict[str, Any]:
    op, total = p.op, sum(other.seconds for other in phase.predictions)
    return {
        "op": op.name,
        "kind": op.kind,
        "m": op.m,
        "n": op.n,
        "k": op.k,
        "groups": op.groups,
        "count": op.count,
        "flops": op.count * op.flops,
        "bytes": op.count * (op.bytes or op.link_bytes),
        "intensity": op.intensity,
        "ridge": device.ridge(op.dtype) if op.flops else None,
        "bound": p.limit,
        "level": p.bound.level,
        "ideal_us": p.bound.seconds * 1e6,
        "predicted_us": p.seconds * 1e6,
        "by": p.by,
        "share": p.seconds / total if total else 0.0,
    }


def _assumed(options: BoundOptions, device: Device, kv_room: Room) -> list[str]:
    kept = f"{kv_room.reserved_bytes / 1e9:.1f} GB"
    said = [
        f"peaks and bandwidths are dense datasheet figures ({device.source}; {device.assurance})",
        "every request has the same length; decode is shown at its mean context",
        "the ceiling charges products, attention and cache writes; other passes are assumed to be fused",
        f"engines take {options.utilisation:.0%} of the memory, {kept} of it for activations and NCCL",
        "what they keep follows vocabulary, experts and ranks, as in vLLM 0.19 on H100",
    ]
    if options.batch * options.prompt > options.max_num_batched_tokens:
        said.append(f"prompts are computed {options.max_num_batched_tokens:,} tokens a step, then all decode")
    elif options.batch > 1:
        said.append("the whole batch is prefilled at once, then decodes together")
    if options.pp > 1:
        said.append("each pipeline stage decodes a micro-batch; prompts and bursts pass one at a time")
    if options.tp * options.ep > 1:
        said.append("the ceiling's links are ideal: no latency, the full bandwidth of one direction")
    return said


def _of_calibration(quant: Quant, known: Calibration) -> Iterator[str]:
    yield f"predicted by {known}: {known.source}"
    yield host_sentence(known)
    if quant.held != 1:
        said = f"the weight files hold {quant.held:.0%} of the bytes that config.json says ({quant.weights})"
        yield f"{said}: bytes are as in the files, products as config.json says"
    if ELEMENT_BYTES[quant.weights] < ELEMENT_BYTES[quant.activations]:
        yield f"{quant.weights} weights count as fewer bytes of {quant.activations} products, untested"
