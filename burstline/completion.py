"""`burstline --print-completion SHELL`: a script that completes commands, flags and their choices."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import shtab

from burstline.console.flags import Once
from burstline.roofline.device.device import bundled_devices
from burstline.roofline.model.families import bundled_models
from burstline.servers.registry import ENGINES
from burstline.verbs import VERBS


def add_completion(parser: argparse.ArgumentParser) -> None:
    """The flag that prints the script and exits, and the commands that the script knows."""
    shtab.add_argument_to(parser)
    verbs = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, (module, summary) in VERBS.items():
        verb = verbs.add_parser(name, help=summary)
        for action in (None, Once):  # also in groups, which share what is registered
            verb.register("action", action, Known)
        importlib.import_module(module).add_arguments(verb)


class Known(argparse.Action):
    """Offers the names that are known, where a flag takes others too."""

    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, **how)
        known = {"engine": ENGINES, "name": ENGINES, "like": bundled_models(), "device": _devices()}
        self.choices = self.choices or known.get(dest)


def _devices() -> list[str]:
    return [device.id for device in bundled_devices()]
