"""`burstline compare`: rank runs that did the same work."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from burstline.console import exit_codes
from burstline.measure.record.rundir import open_run, originals
from burstline.measure.record.tables import keep_pandas_out
from burstline.reports.model.comparison import Comparison
from burstline.reports.model.contenders import comparison_of
from burstline.reports.model.foreign import foreign_results
from burstline.reports.page.files import written
from burstline.workloads.request import WorkloadError


def runs_in(path: Path) -> list[Path]:
    """The folder, if it is a run or there is none in it; else the runs below it. A page over runs is none."""
    if (path / "manifest.json").is_file():
        return [path]
    below = sorted(each.parent for each in path.glob("**/manifest.json"))
    return below or [path] * (not (path / "comparison.json").is_file())


def compared(paths: Sequence[Path], folder: Path, vary: Sequence[str], anyway: bool) -> Comparison:
    """The runs and other tools' results at these paths; links of its page lead from `folder`."""
    others = [each for path in paths if path.is_file() for each in foreign_results(path)]
    runs = [open_run(found) for path in paths if not path.is_file() for found in runs_in(path)]
    if not runs and others:
        raise WorkloadError("name at least one run of Burstline: results of other tools are read beside it")
    if len(runs) + len(others) < 2:
        raise WorkloadError("one run cannot be compared: name two or more")
    for copy, original in originals(runs)[1]:
        raise WorkloadError(f"{copy.path} is {original.path} again: compare different runs, such as repeats")
    return replace(comparison_of(runs, folder, varied=vary, anyway=anyway), others=tuple(others))


def run(args: argparse.Namespace) -> int:
    keep_pandas_out()
    comparison = compared(args.runs, (args.out or Path()).parent, args.vary, args.anyway)
    shown = written(args.format, comparison)
    if args.out is None:
        print(shown)
    else:
        args.out.write_text(shown, "utf-8")
        print(f"Written: {args.out}")
    return exit_codes.DONE if comparison.comparable else exit_codes.INCONCLUSIVE
