"""`burstline gate`: is a candidate slower than its baseline? For a CI."""

import argparse

from burstline.console.flags import read_options
from burstline.console.terminal import show
from burstline.suites.gate import CODES, gated
from burstline.workloads.spec import GateOptions


def run(args: argparse.Namespace) -> int:
    result = gated(args.contenders, args.engine_args, read_options(GateOptions, args), args.out)
    show(result.blocks)
    print(f"Report: {result.path / 'report.html'}")
    return CODES[result.outcome]
