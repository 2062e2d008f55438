"""`burstline gate`: is a candidate slower than its baseline? For a CI."""

import argparse
from pathlib import Path

from burstline.console.flags import add_options, read_options
from burstline.console.terminal import show
from burstline.suites.gate import CODES, GateOptions, gated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "burstline gate [OPTIONS] BASELINE CANDIDATE [-- FLAGS OF BOTH RUNS]\n"
        "       burstline gate --history FOLDER [OPTIONS] [CANDIDATE] [-- FLAGS OF THE RUN]"
    )
    parser.add_argument(
        "contenders",
        nargs="*",
        metavar="CONTENDER",
        help="a URL, or a command in quotes such as 'run --engine vllm --model DIR'; the baseline may be the "
        "folder of a run, or of several",
    )
    add_options(parser, GateOptions)
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder for the results (runs/)"
    )
    parser.set_defaults(engine_args=())


def run(args: argparse.Namespace) -> int:
    result = gated(args.contenders, args.engine_args, read_options(GateOptions, args), args.out)
    show(result.blocks)
    print(f"Report: {result.path / 'report.html'}")
    return CODES[result.outcome]
