"""`burstline show`: the summary of a run, also of one that was killed half-way."""

import argparse
from pathlib import Path

from burstline import exit_codes
from burstline.stdout import json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder that `burstline run` wrote")
    parser.add_argument("--json", action="store_true", help="summary.json instead of text")


def run(args: argparse.Namespace) -> int:
    from loadgen.metrics.summary import summarize_run
    from loadgen.record.rundir import open_run
    from loadgen.record.tables import keep_pandas_out
    from reports.digest import overview
    from reports.formats.text import text

    keep_pandas_out()
    run = open_run(args.run)
    if not (run.path / "plan.parquet").exists():
        why = f": {run.manifest.error}" if run.manifest.error else ""
        words = f"the run ended ({run.status}) before its requests were planned, so nothing was sent{why}"
        print(json_text({"status": run.status, "absent": words}) if args.json else f"{run.name}\n{words}")
    elif args.json:
        summary = run.summary or summarize_run(run)
        print(json_text(summary.to_json()))
    else:
        print(text(overview(run)))
    return exit_codes.DONE
