"""`burstline --print-completion SHELL`: a script that completes commands, flags and their choices."""

import argparse
import importlib

import shtab

from burstline.verbs import VERBS


def add_completion(parser: argparse.ArgumentParser) -> None:
    """The flag that prints the script and exits, and the commands that the script knows."""
    shtab.add_argument_to(parser)
    verbs = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, (module, summary) in VERBS.items():
        importlib.import_module(module).add_arguments(verbs.add_parser(name, help=summary))
