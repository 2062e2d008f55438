"""`burstline --print-completion SHELL`: a script that completes commands, flags, their choices, and names."""

import argparse
import importlib

import shtab

from burstline.roofline.device.device import bundled_devices
from burstline.roofline.model.families import bundled_models
from burstline.servers.registry import ENGINES
from burstline.verbs import VERBS


def add_completion(parser: argparse.ArgumentParser) -> None:
    """The flag that prints the script and exits, and the commands that the script knows."""
    known = {
        "engines": " ".join(ENGINES),
        "devices": " ".join(("cpu", *(device.id for device in bundled_devices()))),
        "models": " ".join(bundled_models()),
    }
    bash = [f"_burstline_{kind}() {{ compgen -W '{names}' -f -- \"$1\"; }}" for kind, names in known.items()]
    zsh = [f"_burstline_{kind}() {{ compadd {names}; _files; }}" for kind, names in known.items()]
    shtab.add_argument_to(parser, preamble={"bash": "\n".join(bash), "zsh": "\n".join(zsh)})
    verbs = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, (module, summary) in VERBS.items():
        importlib.import_module(module).add_arguments(verbs.add_parser(name, help=summary))
