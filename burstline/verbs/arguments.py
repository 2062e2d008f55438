"""The flags of each command. Its module is imported after them, so that a wrong flag is told at once."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from burstline.console.flags import USAGES, add_flags, add_options, completed
from burstline.console.server_options import START, ServerOptions, add_settings
from burstline.machine.hints import Hints, Stated
from burstline.roofline.device.calibration import Constants
from burstline.roofline.model.families import bundled_models
from burstline.roofline.model.shapes import QUANTS
from burstline.servers.registry import ENGINES
from burstline.workloads.options import option
from burstline.workloads.spec import GateOptions, Goals, LimitOptions, LoadSpec

BRIEF: Final[Mapping[str, frozenset[str]]] = {
    "run": frozenset({
        "--help", "--help-all", "--engine", "--url", "--model", "--requests", "--rate",
        "--concurrency", "--duration-s", "--prompt-tokens", "--output-tokens", "--data", "--trace",
        "--slo", "--audit", "--repeats", "--out", "--quiet",
    })
}  # fmt: skip
"""The flags that `--help` shows of a command that has many; `--help-all` shows the others too."""


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
    max_num_batched_tokens: int = option("tokens per step (2048)", 2048, parse=int)
    constant: tuple[str, ...] = option(
        f"change a constant of the roofline model: {', '.join(slot.name for slot in fields(Constants))}",
        (), many=True, metavar="NAME=VALUE",
    )  # fmt: skip


def add_arguments(verb: str, parser: argparse.ArgumentParser) -> None:
    """The flags of a command of `VERBS`."""
    if verb in USAGES:
        parser.usage = USAGES[verb]
    parser.set_defaults(engine_args=())
    if verb in _ADD:
        _ADD[verb](parser)
    else:
        add_flags(parser, verb)


def _run(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "run")
    add_flags(_one_run(parser), "run-canary")
    add_flags(parser.add_argument_group("several machines"), "run-cluster")
    add_flags(parser.add_argument_group("repeats"), "run-repeats")


def _limit(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the search, which begins at --rate or --concurrency, else at the forecast"
    )
    add_options(group, LimitOptions)
    _one_run(parser)


def _one_run(parser: argparse.ArgumentParser) -> argparse._ActionsContainer:
    """The flags that a run and a search have; the group of their output."""
    server = parser.add_argument_group("the server")
    add_options(server, ServerOptions)
    add_settings(server)
    add_options(parser.add_argument_group("the load"), LoadSpec)
    add_options(parser.add_argument_group("service-level objectives"), Goals)
    hardware = parser.add_argument_group("the hardware (roofline)")
    add_options(hardware, Hints)
    add_flags(hardware, "run-hardware")
    out = parser.add_argument_group("output")
    add_flags(out, "run-output")
    return out


def _certify(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("the load"), LoadSpec)
    add_flags(parser.add_argument_group("the client"), "certify-client")
    add_flags(parser, "certify")


def _gate(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "gate")
    add_options(parser, GateOptions)
    add_flags(parser, "gate-output")


def _serve(parser: argparse.ArgumentParser) -> None:
    name = parser.add_argument("name", nargs="?", metavar="ENGINE", help=f"the engine: {', '.join(ENGINES)}")
    completed(name, "engines")
    add_options(parser, ServerOptions, "engine", "model", *START)
    add_settings(parser)
    add_flags(parser, "serve")


def _report(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "report")
    add_options(parser, Hints)
    add_options(parser, Stated)
    add_flags(parser, "report-page")


def _bound(parser: argparse.ArgumentParser) -> None:
    models = f"a bundled model ({', '.join(bundled_models())}) or a folder or file with a config.json"
    completed(parser.add_argument("--model", required=True, help=models), "models")
    add_flags(parser, "bound-device")
    add_options(parser, BoundOptions)
    add_flags(parser, "bound")


def _study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("training",), help="what to predict")
    models = f"a bundled model ({', '.join(bundled_models())}) or a path"
    completed(parser.add_argument("--model", default="llama-2-13b", help=models), "models")
    add_flags(parser, "study-page")
    add_flags(parser, "study")


_ADD: Final[Mapping[str, Callable[[argparse.ArgumentParser], None]]] = {
    "run": _run,
    "limit": _limit,
    "certify": _certify,
    "gate": _gate,
    "serve": _serve,
    "report": _report,
    "bound": _bound,
    "study": _study,
}
"""The commands with more than a table of their name in `flags.toml`."""
