"""`burstline bound`: what the hardware could do, which op bounds each phase, and how many requests fit."""

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from burstline import exit_codes
from burstline.reports.formats.bound_text import compared, told
from burstline.roofline.device.calibration import Calibration, load_calibration
from burstline.roofline.device.device import Device, load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import bundled_models, load_model
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS, Quant
from burstline.roofline.predict.capacity import Room, check_batch, kv_bytes, largest_batch, room
from burstline.roofline.predict.deployment import (
    Line,
    PhaseBound,
    UniformBatch,
    calibrations_of,
    decode_curve,
    host_sentence,
    latency_s,
    phase_bounds,
    ridge_tok,
    unmeasured,
)
from burstline.roofline.predict.generations import GENERATIONS
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.roofline.predict.simulate import Asked, Limits, simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = f"a bundled model ({', '.join(bundled_models())}) or a folder or file with a config.json"
    parser.add_argument("--model", required=True, help=models)
    parser.add_argument(
        "--device",
        required=True,
        nargs="+",
        help="one device or several to compare: an id, the driver's name, or a .toml file of your own",
    )
    parser.add_argument("--batch", type=int, default=1, help="requests at once (for each replica); default 1")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens; default 512")
    parser.add_argument("--output", type=int, default=128, help="output tokens; default 128")
    for ranks, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("dp", "data")):
        parser.add_argument(f"--{ranks}", type=int, default=1, help=f"{meaning}-parallel ranks; default 1")
    parser.add_argument("--quant", choices=tuple(QUANTS), help="default: as the checkpoint's config says")
    parser.add_argument(
        "--network-gb-per-s", type=float, help="between nodes: 1e9 bytes a second, per device and direction"
    )
    parser.add_argument(
        "--utilisation", type=float, default=0.9, help="share of the memory the engine takes; default 0.9"
    )
    parser.add_argument(
        "--simulate",
        type=int,
        nargs="?",
        const=1000,
        metavar="N",
        help="a burst of N such requests at each replica; default 1000",
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of the burst at once; default 256")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="new tokens in one step of it; default 2048"
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="rooflines and decode by batch, as .svg")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(args: argparse.Namespace) -> int:
    _check(args)
    several = len(args.device) > 1
    found = [_analyse_or_say_why(args, name) if several else analyse(args, name) for name in args.device]
    if args.json:
        print(json.dumps(found if several else found[0], indent=2))
    else:
        print(compared(found) if several else told(found[0]))
    if args.figure:
        from burstline.reports.figures.study_figures import write_bound  # matplotlib takes a second to import

        write_bound(args.figure, [one for one in found if "impossible" not in one])
        print(f"Written to {args.figure}.")
    return exit_codes.DONE


def _check(args: argparse.Namespace) -> None:
    """Raise RooflineError, with what was expected, for a number that cannot be."""
    if not 0 < args.utilisation <= 1:
        raise RooflineError(
            f"--utilisation {args.utilisation:g}: expected a share above 0 and up to 1, for example 0.9"
        )
    for flag, value in (
        ("--simulate", args.simulate),
        ("--max-num-seqs", args.max_num_seqs),
        ("--max-num-batched-tokens", args.max_num_batched_tokens),
        ("--network-gb-per-s", args.network_gb_per_s),
    ):
        if value is not None and value <= 0:
            raise RooflineError(f"{flag} {value:g}: expected a number above 0")
    if args.figure and args.figure.suffix not in (".svg", ".png", ".pdf"):
        raise RooflineError(f"--figure {args.figure}: expected a name that ends with .svg, .png or .pdf")


def _analyse_or_say_why(args: argparse.Namespace, name: str) -> dict[str, Any]:
    device = load_device(name)
    try:
        return analyse(args, name)
    except RooflineError as error:
        return {"device": _device_facts(device), "impossible": str(error)}


def analyse(args: argparse.Namespace, device_name: str) -> dict[str, Any]:
    """Everything the verb says of one device, ready for JSON. Times are seconds unless the key says µs."""
    model, stored = load_model(args.model)
    device = load_device(device_name)
    if args.network_gb_per_s:
        device = device.with_network(args.network_gb_per_s * 1e9)
    quant = QUANTS[args.quant] if args.quant else stored
    parallel = Parallel(args.tp, args.pp, args.ep, args.dp)
    asked = UniformBatch(args.batch, args.prompt, args.output)
    n_tok = args.prompt + args.output
    deployment = Deployment(model, quant, parallel, device)
    kv_room = room(model, quant, parallel, device, utilisation=args.utilisation)
    check_batch(model, quant, parallel, kv_room, args.batch, n_tok)
    tiers = _calibrations(device_name, device)
    phases = phase_bounds(deployment, asked, tiers)
    latency = {"ceiling": latency_s(phases)} | {tier: latency_s(phases, tier) for tier in tiers}
    n_out = args.batch * args.output * parallel.dp
    return {
        "model": {"name": model.name, "params": model.params(), "active_params": model.active_params()},
        "quant": asdict(quant),
        "parallel": asdict(parallel),
        "device": _device_facts(device),
        "asked": asdict(asked),
        "answer": _answer(deployment, asked, phases),
        "phases": {name: _phase_facts(phase, device) for name, phase in phases.items()},
        "what_if": list(_what_ifs(args, deployment, asked)),
        "decode_s_by_batch": _by_batch(deployment, asked, kv_room, tiers),
        "latency_s": latency,
        "output_tok_per_s": {tier: n_out / seconds for tier, seconds in latency.items()},
        "memory": asdict(kv_room)
        | {
            "kv_bytes_per_tok": kv_bytes(model, quant, parallel, 1),
            "largest_batch": largest_batch(model, quant, parallel, kv_room, n_tok),
        },
        "calibrations": {tier: known.fitted_on for tier, known in tiers.items()},
        "burst": _burst(args, deployment, kv_room.kv_tok, tiers) if args.simulate else None,
        "assumed": [*_assumed(args, device, asked), *_of_calibration(quant, list(tiers.values())[-1])],
    }


def _answer(deployment: Deployment, asked: UniformBatch, phases: Mapping[str, PhaseBound]) -> dict[str, Any]:
    """What limits each phase, and from how many tokens in a step its products compute rather than read."""
    decode = phases.get("decode")
    attention = [
        line.bound.limit for line in (decode.lines if decode else ()) if line.bound.op.kind == "attention"
    ]
    return {
        "limits": {name: phase.limit() for name, phase in phases.items()},
        "ridge_tok": ridge_tok(deployment),
        "attention_memory_bound": bool(attention) and set(attention) == {"memory"},
        "context_tok": asked.n_prompt_tok + round(asked.n_output_tok / 2),
    }


def _what_ifs(
    args: argparse.Namespace, deployment: Deployment, asked: UniformBatch
) -> Iterator[dict[str, Any]]:
    """The same request with one thing changed: how numbers are stored, ranks, the device."""
    changes: list[tuple[str, Deployment]] = [("as asked", deployment)]
    stream = deployment.quant.stream
    for name in ("fp8-static", "fp8-static-kv8", "int4", "nvfp4-kv8"):
        quant = QUANTS[name]
        if quant != deployment.quant and stream in ("bf16", "fp16"):
            changes.append((f"{name} weights", replace(deployment, quant=quant)))
    tp = deployment.parallel.tp
    changes.append((f"TP {2 * tp}", replace(deployment, parallel=replace(deployment.parallel, tp=2 * tp))))
    for id_ in GENERATIONS:
        if id_ != deployment.device.id and deployment.device.vendor == "nvidia":
            device = load_device(id_)
            changes.append((device.name, replace(deployment, device=device)))
    for change, on in changes:
        try:
            kv_room = room(on.model, on.quant, on.parallel, on.device, utilisation=args.utilisation)
            n_tok = asked.n_prompt_tok + asked.n_output_tok
            check_batch(on.model, on.quant, on.parallel, kv_room, asked.batch, n_tok)
            known = calibrations_of(on.device)
            tier = list(known)[-1]
            seconds = latency_s(phase_bounds(on, asked, known), tier)
        except RooflineError as error:
            yield {"change": change, "impossible": str(error)}
        else:
            yield {
                "change": change,
                "tier": tier + (", untested" if unmeasured(on.quant, known[tier]) else ""),
                "latency_s": seconds,
                "output_tok_per_s": asked.batch * asked.n_output_tok * on.parallel.dp / seconds,
                "largest_batch": largest_batch(on.model, on.quant, on.parallel, kv_room, n_tok),
            }


def _by_batch(
    deployment: Deployment, asked: UniformBatch, kv_room: Room, tiers: Mapping[str, Calibration]
) -> dict[str, list[tuple[int, float]]]:
    """Seconds of a decode step by batch, as far as the cache reaches; the ceiling and each tier."""
    shape = deployment.model, deployment.quant, deployment.parallel
    context_tok = asked.n_prompt_tok + round(asked.n_output_tok / 2)
    most = min(1024, largest_batch(*shape, kv_room, asked.n_prompt_tok + asked.n_output_tok))
    known = {"ceiling": None, **tiers}
    return {tier: decode_curve(deployment, context_tok, each, most) for tier, each in known.items()}


def _burst(
    args: argparse.Namespace, deployment: Deployment, kv_tok: int, tiers: Mapping[str, Calibration]
) -> dict[str, Any]:
    """A burst of `--simulate` requests through vLLM's scheduling rules, by the ceiling and by each tier."""
    limits = Limits(args.max_num_seqs, args.max_num_batched_tokens, kv_tok)
    requests = [Asked(0.0, args.prompt, args.output)] * args.simulate
    found = {}
    for tier, known in {"ceiling": None, **tiers}.items():
        outcome = simulate(requests, limits, Clock(deployment, known))
        found[tier] = {
            "makespan_s": outcome.makespan_s,
            "output_tok_per_s": len(requests) * args.output / outcome.makespan_s,
            "ttft_p50_s": float(np.median(outcome.ttft_s)),
            "ttft_p99_s": float(np.quantile(outcome.ttft_s, 0.99)),
            "tpot_mean_s": float(np.mean(outcome.tpot_s)) if args.output > 1 else None,
            "most_running": int(outcome.steps.n_running.max()),
            "n_preemptions": outcome.n_preemptions,
        }
    return {"n_requests": args.simulate, **asdict(limits), "tiers": found}


def _calibrations(name: str, device: Device) -> dict[str, Calibration]:
    """The shipped calibrations; a device file's own where it holds one."""
    if name.endswith(".toml") and "calibration" in tomllib.loads(Path(name).read_text("utf-8")):
        return {"device fit": load_calibration(name)}
    return calibrations_of(device)


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


def _phase_facts(phase: PhaseBound, device: Device) -> dict[str, Any]:
    return {
        "n_steps": phase.n_steps,
        "ceiling_s": phase.ceiling_s,
        "predicted_s": {tier: phase.predicted_s(tier) for tier in phase.host_s},
        "range_s": {tier: phase.range_s(tier) for tier in phase.host_s},
        "host_s": dict(phase.host_s),
        "bound": phase.limit(),
        "ops": [_op_facts(line, phase, device) for line in phase.lines],
    }


def _op_facts(line: Line, phase: PhaseBound, device: Device) -> dict[str, Any]:
    op, total = line.bound.op, sum(other.seconds for other in phase.lines)
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
        "bound": line.limit,
        "level": line.bound.level,
        "ideal_us": line.bound.seconds * 1e6,
        "predicted_us": {tier: p.seconds * 1e6 for tier, p in line.predictions.items()},
        "share": line.seconds / total if total else 0.0,
    }


def _assumed(args: argparse.Namespace, device: Device, asked: UniformBatch) -> list[str]:
    said = [
        f"peaks and bandwidths are dense datasheet figures ({device.source}; {device.assurance})",
        "every request has the same length; decode is shown at its mean context",
        "the ceiling charges products, attention and cache writes; other passes are taken as fused",
        f"engines take {args.utilisation:.0%} of the memory, 1.5 GB of it for activations and graphs",
    ]
    if asked.batch > 1:
        said.append("the whole batch is prefilled at once, then decodes together")
    if args.pp > 1:
        said.append("one micro-batch at a time passes through the pipeline's stages")
    if args.tp * args.ep > 1:
        said.append("the ceiling's links are ideal: no latency, the full bandwidth of one direction")
    if args.simulate:
        said.append(
            "no front end delays the burst: in published runs TensorRT-LLM's sent 9,000 to 33,000 tokens"
            " a second, by version, SGLang's 20,000"
        )
    return said


def _of_calibration(quant: Quant, known: Calibration) -> Iterator[str]:
    yield host_sentence(known)
    yield from unmeasured(quant, known)
