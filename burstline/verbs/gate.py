"""`burstline gate`: is a candidate slower than its baseline? For a CI."""

import argparse
from pathlib import Path

from burstline.reports.model.gated import NUMBERS, Rule
from burstline.suites.gate import run_gate, run_history
from burstline.workloads.request import WorkloadError

LEAST_RUNS = 6
MOST_RUNS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = (
        "burstline gate [OPTIONS] BASELINE CANDIDATE [-- FLAGS OF BOTH RUNS]\n"
        "       burstline gate --history FOLDER [OPTIONS] [CANDIDATE] [-- FLAGS OF THE RUN]"
    )
    add(
        "contenders",
        nargs="*",
        metavar="CONTENDER",
        help="a URL, or a command in quotes such as 'run --engine vllm --model DIR'; the baseline may be the "
        "folder of a run, or of several",
    )
    add(
        "--history",
        type=Path,
        metavar="FOLDER",
        help="compare the newest run in FOLDER, or the candidate, with the older ones",
    )
    add("--metric", action="append", choices=tuple(NUMBERS), help="number to compare (e2e.p50); repeatable")
    add("--margin", type=float, default=5.0, metavar="PERCENT", help="less is called the same (5)")
    add("--max-runs", type=int, default=20, metavar="N", help="maximum runs of both contenders (20)")
    add("--budget-s", type=float, metavar="S", help="start no pair that would end later")
    add("--anyway", action="store_true", help="use disturbed runs and runs of different work")
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help="folder for the results (runs/)")
    parser.set_defaults(engine_args=())


def run(args: argparse.Namespace) -> int:
    if not 0 < args.margin < 100:
        raise WorkloadError(f"--margin {args.margin:g}: expected percent, above 0 and below 100")
    if not LEAST_RUNS <= args.max_runs <= MOST_RUNS:
        raise WorkloadError(f"--max-runs {args.max_runs}: expected {LEAST_RUNS} to {MOST_RUNS}")
    if args.budget_s is not None and not args.budget_s > 0:
        raise WorkloadError(f"--budget-s {args.budget_s:g}: expected seconds above 0")
    numbers = tuple(NUMBERS[name] for name in dict.fromkeys(args.metric or ["e2e.p50"]))
    rule = Rule(numbers, args.margin / 100, args.max_runs // 2, args.anyway)
    if args.history is not None:
        if len(args.contenders) > 1:
            raise WorkloadError("--history judges one run: name one candidate, or none for the newest run")
        candidate = next(iter(args.contenders), None)
        return run_history(args.history, candidate, args.engine_args, rule, args.out)
    if len(args.contenders) != 2:
        raise WorkloadError(
            f"{len(args.contenders)} contenders: expected BASELINE and CANDIDATE, or --history FOLDER"
        )
    baseline, candidate = args.contenders
    return run_gate(baseline, candidate, args.engine_args, rule, args.out, args.budget_s)
