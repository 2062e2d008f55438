"""`burstline report`: a run's summary and page, made again from its files."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from burstline import exit_codes
from burstline.machine.hints import add_cost, add_hints, hints_of
from workloads.request import WorkloadError

if TYPE_CHECKING:
    import pyarrow as pa

    from loadgen.record.rundir import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder that `burstline run` wrote")
    add_hints(parser)
    add_cost(parser)
    parser.add_argument(
        "--force", action="store_true", help="replace the device that the run was compared with by another"
    )
    parser.add_argument("--decode", action="store_true", help="decode the captures once more before")


def run(args: argparse.Namespace) -> int:
    from burstline.bench.report import write_report
    from burstline.lean import import_lean
    from loadgen.record.rundir import RunDir, open_run

    import_lean()
    run = open_run(args.run, check_records=not args.decode)
    folder = RunDir(run.path)
    if args.decode or not (run.path / "records.parquet").exists():
        folder.save_records(_decoded(run))
        folder.finish("complete" if run.status == "complete" else "interrupted")
    if args.usd_per_hour is not None:
        folder.save_manifest(replace(folder.manifest, usd_per_hour=args.usd_per_hour))
    hints = hints_of(args)
    if hints.device or hints.model_config or hints.stated.to_json():
        from burstline.machine.hardware import check_hints, note_hardware

        check_hints(hints)
        note_hardware(folder, hints, lambda words: print(words, file=sys.stderr), force=args.force)
    write_report(folder)
    print(f"Report: {folder.report}")
    return exit_codes.DONE


def _decoded(run: "Run") -> "pa.Table":
    """WorkloadError where fewer requests were captured than there are ended ones among the records."""
    records = run.decoded()
    if not (run.path / "records.parquet").exists():
        return records
    try:
        kept = run.request_table
    except WorkloadError:
        return records  # what is there is no table: there is nothing to lose
    before, now = (len(each) - each.column("closed_ns").null_count for each in (kept, records))
    if now < before:
        raise WorkloadError(
            f"{run.path / 'captures'} holds {now:,} of the {before:,} requests that records.parquet has; "
            "were captures cut or removed? Nothing was changed; without --decode the report is made of these"
        )
    return records
