"""`burstline limit`: the highest load within the SLOs, as an interval with a stated error probability."""

import argparse
import sys

from burstline.bench.limit import check_limit, run_limit
from burstline.bench.run_settings import Settings
from burstline.console.flags import read_options
from burstline.console.server_options import server_of
from burstline.machine.hints import Hints
from burstline.verbs.run import checked_load
from burstline.workloads.spec import Goals, LimitOptions, LoadSpec


def run(args: argparse.Namespace) -> int:
    where, goals, hints = server_of(args), read_options(Goals, args), read_options(Hints, args)
    options = read_options(LimitOptions, args)
    load = checked_load(check_limit(read_options(LoadSpec, args), goals, options), goals, where)
    argv, calibrate = tuple(sys.argv[1:]), not args.no_calibrate
    settings = Settings(where, load, goals, args.out, args.quiet, calibrate=calibrate, hints=hints, argv=argv)
    return run_limit(settings, options)
