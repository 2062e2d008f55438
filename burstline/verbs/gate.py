"""`burstline gate`: is a candidate slower than its baseline? For a CI."""

import argparse

from burstline.console.flags import USAGES, add_flags, add_options, read_options
from burstline.console.terminal import show
from burstline.suites.gate import CODES, GateOptions, gated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGES["gate"]
    add_flags(parser, "gate")
    add_options(parser, GateOptions)
    add_flags(parser, "gate-output")
    parser.set_defaults(engine_args=())


def run(args: argparse.Namespace) -> int:
    result = gated(args.contenders, args.engine_args, read_options(GateOptions, args), args.out)
    show(result.blocks)
    print(f"Report: {result.path / 'report.html'}")
    return CODES[result.outcome]
