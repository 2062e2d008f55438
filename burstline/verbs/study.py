"""`burstline study`: the bottleneck of inference across devices and generations; the cost of training."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from burstline.console import exit_codes
from burstline.reports.formats.text import columns
from burstline.roofline.device.device import load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import bundled_models, load_model
from burstline.roofline.model.ops import Op, ops
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS
from burstline.roofline.predict.bound import ceiling
from burstline.roofline.predict.deployment import UniformBatch, latency_s
from burstline.roofline.predict.generations import (
    GENERATIONS,
    DramPoint,
    Generation,
    dram_scaling,
    generations,
)
from burstline.verbs import study_training

TP = (1, 8)


_INFERENCE = {"prompt": 200, "output": 200, "batch": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", choices=("inference", "training"), default="inference", help="default inference"
    )
    parser.add_argument(
        "--model", default="llama-2-13b", help=f"a bundled model ({', '.join(bundled_models())}) or a path"
    )
    parser.add_argument(
        "--device", nargs="+", default=list(GENERATIONS), help="devices to compare, or to train on"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--figures", type=Path, help="folder for the figures (SVG)")
    inference = parser.add_argument_group("inference")
    inference.add_argument("--prompt", type=int, help="prompt tokens; default 200")
    inference.add_argument("--output", type=int, help="output tokens; default 200")
    inference.add_argument("--batch", type=int, help="batch size; default 1")
    study_training.add_arguments(parser.add_argument_group("training"))


def run(args: argparse.Namespace) -> int:
    others = study_training.DEFAULTS if args.what == "inference" else _INFERENCE
    for name in others:
        if getattr(args, name) is not None:
            raise RooflineError(
                f"--{name.replace('_', '-')} is not for `study {args.what}`; see `study --help`"
            )
    if args.what == "training":
        if len(args.device) > 1 and args.device != list(GENERATIONS):
            raise RooflineError("`study training` takes one --device; run it once for each")
        given = {name: getattr(args, name) for name in study_training.DEFAULTS}
        device = "a100-sxm4-80g" if args.device == list(GENERATIONS) else args.device[0]
        return study_training.run(args.model, device, given, as_json=args.json, figures=args.figures)
    for name, default in _INFERENCE.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return _run_inference(args)


def _run_inference(args: argparse.Namespace) -> int:
    asked = UniformBatch(args.batch, args.prompt, args.output)
    scaling = {tp: dram_scaling(args.model, asked, tp) for tp in TP}
    compared = generations(args.model, asked, args.device)
    if args.figures:
        from burstline.reports.figures.study_figures import write_figures  # matplotlib takes a second

        write_figures(args.figures, scaling, compared)
    if args.json:
        print(json.dumps(_facts(args, asked, scaling, compared), indent=2))
    else:
        print("\n\n".join(_told(args, asked, scaling, compared)))
    return exit_codes.DONE


def _products(args: argparse.Namespace, asked: UniformBatch) -> dict[str, list[Op]]:
    model = load_model(args.model)[0]
    return {
        name: [
            op for op in ops(model, QUANTS["fp16"], Parallel(), step) if op.kind in ("matmul", "attention")
        ]
        for name, (step, _) in asked.steps().items()
    }


def _told(
    args: argparse.Namespace,
    asked: UniformBatch,
    scaling: dict[int, list[DramPoint]],
    compared: Sequence[Generation],
) -> list[str]:
    what = f"{args.model}, batch {asked.batch}, {asked.n_prompt_tok} in, {asked.n_output_tok} out, fp16"
    parts = [_answer(args, scaling, compared)]
    parts += [f"1. What bounds each product: {what}", _bound_table(args, asked)]
    for tp, points in scaling.items():
        parts += [f"2. One A100's compute with other memories: {what}, tp {tp}", _dram_table(points)]
    return [*parts, f"3. Generations: {what}, one device", _generation_table(compared)]


def _answer(
    args: argparse.Namespace,
    scaling: dict[int, list[DramPoint]],
    compared: Sequence[Generation],
) -> str:
    first, *others = [g for g in compared if g.phases]
    limits = "; ".join(
        f"{g.device.name} {g.quant}: "
        + ", ".join(f"{name} {phase.limit()}-bound" for name, phase in g.phases.items())
        for g in (first, *others)
    )
    points = scaling[TP[0]]
    gains = points[0].latency_s / points[-1].latency_s
    binds = max(points[-1].bound_s, key=lambda part: points[-1].bound_s[part])
    return "\n".join(
        [
            f"{args.model}: {limits}.",
            (
                f"{points[-1].technology} instead of {points[0].technology} makes one A100 {gains:.1f} times"
                f" as fast; {binds} binds then."
            ),
        ]
    )


def _bound_table(args: argparse.Namespace, asked: UniformBatch) -> str:
    devices = [load_device(name) for name in args.device]
    rows = [["phase", "product", "FLOP/B", *(f"{d.name} (ridge {d.ridge('fp16'):.0f})" for d in devices)]]
    for phase, found in _products(args, asked).items():
        for op in found:
            cells = [ceiling(op, device).limit for device in devices]
            rows.append([phase, op.name, f"{op.intensity:.1f}", *cells])
    return columns(rows, range(2))


def _dram_table(points: Sequence[DramPoint]) -> str:
    parts = list(points[0].bound_s)
    header = ["memory", "GB/s", "latency s", "speed-up", *parts, "most"]
    rows = [
        [
            point.technology,
            f"{point.bytes_per_s / 1e9:,.0f}",
            f"{point.latency_s:.3f}",
            f"{points[0].latency_s / point.latency_s:.1f}×",
            *(f"{point.bound_s[part] / point.latency_s:.0%}" for part in parts),
            max(parts, key=lambda part: point.bound_s[part]),
        ]
        for point in points
    ]
    return columns([header, *rows], range(1))


def _generation_table(compared: Sequence[Generation]) -> str:
    header = [
        "device",
        "quant",
        "prefill ms",
        "by",
        "decode ms",
        "by",
        "ceiling s",
        "predicted s",
        "speed-up",
    ]
    rows = []
    first = next((latency_s(g.phases) for g in compared if g.phases), 0.0)
    for g in (g for g in compared if g.phases):
        phases = [cell for p in g.phases.values() for cell in (f"{p.ceiling_s * 1e3:.2f}", p.limit())]
        predicted = latency_s(g.phases)
        times = [f"{latency_s(g.phases, ceiling=True):.3f}", f"{predicted:.3f}", f"{first / predicted:.2f}×"]
        rows.append([g.device.name, g.quant, *[*phases, "", ""][:4], *times])
    left_out = [f"{g.device.name} {g.quant}: {g.impossible}" for g in compared if not g.phases]
    return "\n".join([columns([header, *rows], range(2)), *left_out])


def _facts(
    args: argparse.Namespace,
    asked: UniformBatch,
    scaling: dict[int, list[DramPoint]],
    compared: Sequence[Generation],
) -> dict[str, Any]:
    limits = {
        phase: {op.name: {name: ceiling(op, load_device(name)).limit for name in args.device} for op in found}
        for phase, found in _products(args, asked).items()
    }
    return {
        "model": args.model,
        "asked": asdict(asked),
        "limits": limits,
        "dram": {tp: [asdict(point) for point in points] for tp, points in scaling.items()},
        "generations": [
            {
                "device": g.device.id,
                "quant": g.quant,
                "impossible": g.impossible or None,
                "ceiling_s": latency_s(g.phases, ceiling=True) if g.phases else None,
                "predicted_s": latency_s(g.phases) if g.phases else None,
                "limits": {name: phase.limit() for name, phase in g.phases.items()},
            }
            for g in compared
        ],
    }
