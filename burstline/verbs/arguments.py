"""The flags of each command. Its module is imported after them, so that a wrong flag is told at once."""

import argparse
from collections.abc import Callable, Mapping
from typing import Final

from burstline.console.flags import USAGES, add_flags, add_options, completed
from burstline.console.server_options import START, ServerOptions, add_settings
from burstline.machine.hints import Hints, Stated
from burstline.roofline.model.families import bundled_models
from burstline.servers.registry import ENGINES
from burstline.workloads.spec import GateOptions, Goals, LimitOptions, LoadSpec

BRIEF: Final[Mapping[str, frozenset[str]]] = {
    "run": frozenset({
        "--help", "--help-all", "--engine", "--url", "--model", "--requests", "--rate",
        "--concurrency", "--duration-s", "--prompt-tokens", "--output-tokens", "--data", "--trace",
        "--slo", "--audit", "--repeats", "--out", "--quiet",
    })
}  # fmt: skip
"""The flags that `--help` shows of a command that has many; `--help-all` shows the others too."""


def add_arguments(verb: str, parser: argparse.ArgumentParser) -> None:
    """The flags of a command of `VERBS`."""
    parser.usage = USAGES.get(verb)
    parser.set_defaults(engine_args=())
    for part in PARTS.get(verb, (verb,)):
        if isinstance(part, str):
            add_flags(parser, part)
        elif isinstance(part, type):
            add_options(parser, part)
        else:
            part(parser)


def _run(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "run")
    add_flags(_one_run(parser), "run-canary")
    add_flags(parser.add_argument_group("several machines"), "run-cluster")
    add_flags(parser.add_argument_group("repeats"), "run-repeats")


def _limit(parser: argparse.ArgumentParser) -> None:
    begins = "the search, which begins at --rate or --concurrency, else at the forecast"
    add_options(parser.add_argument_group(begins), LimitOptions)
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


def _serve(parser: argparse.ArgumentParser) -> None:
    name = parser.add_argument("name", nargs="?", metavar="ENGINE", help=f"the engine: {', '.join(ENGINES)}")
    completed(name, "engines")
    add_options(parser, ServerOptions, "engine", "model", *START)
    add_settings(parser)
    add_flags(parser, "serve")


def _bound(parser: argparse.ArgumentParser) -> None:
    from burstline.verbs.bound import BoundOptions  # with the model's constants: numpy

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


PARTS: Final[Mapping[str, tuple[str | type | Callable[[argparse.ArgumentParser], None], ...]]] = {
    "run": (_run,), "limit": (_limit,), "certify": (_certify,), "serve": (_serve,), "bound": (_bound,),
    "study": (_study,), "gate": ("gate", GateOptions, "gate-output"),
    "report": ("report", Hints, Stated, "report-page"),
}  # fmt: skip
"""What a command has but a table of its name in `flags.toml`: other tables, options, or flags in groups."""
