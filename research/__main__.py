"""`python -m research`: the roofline model's predictions against measured kernels and runs, goal by goal."""

import argparse
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from burstline import exit_codes
from burstline.roofline.errors import RooflineError
from research.accuracy import kernel_checks
from research.accuracy_serving import serving_checks
from research.check import Check, table
from research.fit import write_fits

DATA = Path(__file__).parents[1] / "tests" / "data"
KERNELS = ("G2", "G3", "G4", "G5", "G6", "G9", "G10", "G13", "G14", "G15")
_SERVING = ("G7", "G8", "G11", "G12")


def main() -> int:
    """What the command line asks for; a user's mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m research", description="The model against measured data."
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except RooflineError as error:
        print(f"research: {error}", file=sys.stderr)
        return exit_codes.USAGE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the measured tables (default: the clone's tests/data)",
    )
    parser.add_argument("--fit", action="store_true", help="fit the shipped calibrations again, then check")
    parser.add_argument("--goal", metavar="G", help="check this goal only, for example G8")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 3 for any missed goal, also for known misses"
    )


def run(args: argparse.Namespace) -> int:
    """0, or 3 where a goal is missed: with --strict any goal, else one that is not known to be missed."""
    if args.goal is not None and args.goal not in (*KERNELS, *_SERVING):
        known = ", ".join(sorted((*KERNELS, *_SERVING), key=lambda goal: int(goal[1:])))
        raise RooflineError(f"--goal {args.goal}: no such goal; expected one of {known}")
    if not (args.data / "measured").is_dir():
        raise RooflineError(f"no measured tables in {args.data}; run from a clone, or give --data FOLDER")
    if args.fit:
        for path in write_fits(args.data / "measured"):
            print(f"fitted {path}")
    checks = list(_checks(args.data, args.goal))
    missed = [check for check in checks if check.met is False]
    new = [check for check in missed if not check.known]
    judged = sum(check.met is not None for check in checks)
    print(table(checks))
    print(f"\n{judged - len(missed)} of {judged} goals met; {len(missed) - len(new)} misses are known.")
    for check in new:
        print(f"New: {check.goal} {check.what} misses its goal of {check.target}.")
    return exit_codes.TARGET_MISSED if new or (args.strict and missed) else exit_codes.DONE


def _checks(data: Path, goal: str | None) -> Iterator[Check]:
    serving, kernels = goal is None or goal in _SERVING, goal not in _SERVING
    found = chain(kernel_checks(data) if kernels else (), serving_checks(data) if serving else ())
    return (check for check in found if goal in (None, check.goal))


if __name__ == "__main__":
    sys.exit(main())
