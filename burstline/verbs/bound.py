"""`burstline bound`: predicted speed, the bottleneck of each phase, and how many requests fit."""

import argparse
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from burstline.console import exit_codes
from burstline.console.flags import new_folder, read_options
from burstline.errors import RooflineError
from burstline.machine.catalogue import config_at, device_text
from burstline.reports.formats.predicted import PHASES, shown
from burstline.reports.formats.text import text
from burstline.roofline.device.calibration import Calibration, Constants, read_device_file, with_host
from burstline.roofline.device.device import Device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.answer import Question, UniformBatch, device_facts, facts
from burstline.roofline.predict.predict import Deployment
from burstline.roofline.profile.attribute import profile_of
from burstline.roofline.profile.compare import compare
from burstline.roofline.reconcile.inputs import Setup, StepSeen
from burstline.roofline.reconcile.reconcile import device_facts as ceilings_of
from burstline.roofline.reconcile.reconcile import look, phase_row
from burstline.roofline.reconcile.reconciliation import DeviceFacts, PhaseRow
from burstline.workloads.options import flag_of, option, options_of, words_of

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
    network_gb_per_s: float | None = option("GB/s between nodes, per device and direction", parse=float)
    utilisation: float = option("share of the device's memory that the engine uses (0.9)", 0.9, parse=float)
    max_num_batched_tokens: int = option("tokens per step (2048)", 2048, parse=int)
    constant: tuple[str, ...] = option(
        f"change a constant of the roofline model: {', '.join(slot.name for slot in fields(Constants))}",
        (), many=True, metavar="NAME=VALUE",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    options = read_options(BoundOptions, args)
    check(options)
    if args.trace is not None:
        return _profile(options, args)
    new_folder(args.out)
    found = [analyse(options, args.model, name, several=len(args.device) > 1) for name in args.device]
    if args.json:
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        print(shown(found, args.model))
    if args.out is not None:
        from burstline.reports.page.prediction_page import write_prediction  # with matplotlib: a second

        words = ["burstline", "bound", "--model", args.model, "--device", *args.device, *words_of(options)]
        devices = (name for name, one in zip(args.device, found, strict=True) if "impossible" not in one)
        steps = [_steps(options, args.model, name) for name in devices]
        write_prediction(shown(found, args.model, shlex.join(words), steps), args.out, quiet=args.json)
    return exit_codes.DONE


def _steps(options: BoundOptions, model: str, device: str) -> tuple[DeviceFacts, tuple[PhaseRow, ...]]:
    """The ceilings of a device, and a predicted step of each phase."""
    setup = Setup(*_set_up(options, model, *_known(device, model)))
    steps = _batch(options).steps(setup.deployment.parallel.pp)
    seen = {p: look([StepSeen(steps[p][0], 0.0)], setup, measured=False) for p in PHASES if p in steps}
    return ceilings_of(setup), tuple(phase_row(phase, each, setup) for phase, each in seen.items())


def _batch(options: BoundOptions) -> UniformBatch:
    return UniformBatch(options.batch, options.prompt, options.output, options.max_num_batched_tokens)


def _profile(options: BoundOptions, args: argparse.Namespace) -> int:
    """Print a trace's products beside what this deployment should take for them."""
    used = ("prompt", "output", "tp", "pp", "ep", "dp", "quant", "network_gb_per_s", "constant")
    ignored = [row.flag for name, row in options_of(BoundOptions).items()
               if name not in used and getattr(options, name) != row.default]  # fmt: skip
    ignored += ["--out"] * (args.out is not None)
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
    model, quant = load_model(model_name, options.quant)
    if options.network_gb_per_s:
        device = device.with_network(options.network_gb_per_s * 1e9)
    parallel = Parallel(options.tp, options.pp, options.ep, options.dp)
    return Deployment(model, quant, parallel, device), shipped.changed(_constants(options.constant))


def check(options: BoundOptions) -> None:
    """Raise RooflineError, with what was expected, for a number that cannot be."""
    if not 0 < options.utilisation <= 1:
        raise RooflineError(f"--utilisation {options.utilisation:g}: expected a share above 0 and up to 1")
    for name in ("max_num_batched_tokens", "network_gb_per_s"):
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
        on, known = _set_up(options, model_name, device, shipped)
        question = Question(on, known, _batch(options), options.utilisation)
        return facts(question, shipped, list(_others(options, on)))
    except RooflineError as error:
        if not several:
            raise
        return {"device": device_facts(device), "impossible": str(error)}


def _others(options: BoundOptions, on: Deployment) -> Iterator[tuple[Device, Calibration]]:
    """Other devices for the what-ifs, with the constants that the user changes."""
    for name in GENERATIONS if on.device.vendor == "nvidia" else ():
        if name != on.device.id:
            device, shipped = _known(name, on.model.name)
            yield device, shipped.changed(_constants(options.constant))


def _constants(stated: Sequence[str]) -> dict[str, float]:
    found = {}
    for one in stated:
        name, _, value = one.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise RooflineError(f"--constant {one}: expected NAME=VALUE, for example memory=0.8") from error
    return found


def _known(name: str, model: str) -> tuple[Device, Calibration]:
    """A device as a run of `model` reads it: by name, by file, or this CPU as it was measured."""
    device, known = read_device_file(device_text(name, config_at(model) if name == "cpu" else None), name)
    return device, with_host(known)
