"""`burstline accuracy`: the roofline model against measured kernels and runs, goal by goal."""

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from burstline import exit_codes
from roofline.errors import RooflineError
from roofline.validate.accuracy import Check

DATA = Path(__file__).parents[2] / "tests" / "data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the measured tables (default: the clone's tests/data)",
    )
    parser.add_argument("--fit", action="store_true", help="fit the shipped calibrations again, then check")
    parser.add_argument("--goal", metavar="G", help="check this goal only, for example G8")


def run(args: argparse.Namespace) -> int:
    """0 where every gate holds, 3 where one does not."""
    if not (args.data / "measured").is_dir():
        raise RooflineError(f"no measured tables in {args.data}; run from a clone, or give --data FOLDER")
    if args.fit:
        from roofline.calibrate.fit import write_fits

        for path in write_fits(args.data / "measured"):
            print(f"fitted {path}")
    checks = [_show(check) for check in _checks(args.data, args.goal)]
    if not checks:
        raise RooflineError(
            f"--goal {args.goal}: no such goal; `burstline accuracy` without it prints them all"
        )
    failed = [check for check in checks if check.passed is False]
    for check in failed:
        print(f"MISSED {check.goal} {check.what}: {check.reached}, gate {check.target}")
    return exit_codes.TARGET_MISSED if failed else exit_codes.DONE


def _checks(data: Path, goal: str | None) -> Iterator[Check]:
    from roofline.validate.accuracy import kernel_checks
    from roofline.validate.accuracy_serving import serving_checks

    serving = goal in (None, "G7", "G8", "G11", "G12")
    kernels = goal is None or not serving
    found = chain(kernel_checks(data) if kernels else (), serving_checks(data) if serving else ())
    return (check for check in found if goal in (None, check.goal))


def _show(check: Check) -> Check:
    verdict = {True: "ok", False: "MISSED", None: "-"}[check.passed]
    print(
        f"{check.goal:<4}{verdict:<7}{check.what:<48}{check.reached:<42}{check.target:<16}{check.data}",
        flush=True,
    )
    if check.reason:
        print(f"           {check.reason}")
    return check
