"""`burstline report`: a run's summary and page, made again from its files; or the run in another format."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from burstline import exit_codes
from burstline.bench.report import write_report
from burstline.flags import add_options, read_options
from burstline.loadgen.record.files import write_bytes
from burstline.loadgen.record.rundir import Run, RunDir, open_run
from burstline.loadgen.record.tables import keep_pandas_out
from burstline.machine.hardware import check_hints, note_hardware
from burstline.machine.hints import Hints, Stated
from burstline.reports.model.comparison import view_of
from burstline.reports.page.digest import overview
from burstline.reports.page.files import FILES
from burstline.stdout import json_text
from burstline.terminal import show
from burstline.workloads.request import WorkloadError

PRINTED: Final = ("text", "json")
WRITTEN: Final = ("parquet", "csv", "markdown", "junit", "trace", "figures", "vllm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder that `burstline run` wrote")
    parser.add_argument(
        "--format",
        action="append",
        choices=(*PRINTED, *WRITTEN),
        help="instead of the page: text and json are printed and change nothing; parquet, csv: the records; "
        "markdown: for a pull request; junit: SLOs and verdict for CI; trace: for ui.perfetto.dev; figures: "
        "SVG and PNG; vllm: as `vllm bench serve --save-result` (all of them, with --to alone); may be given "
        "several times",
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="where files of other formats go")
    add_options(parser, Hints)
    add_options(parser, Stated)
    parser.add_argument(
        "--usd-per-hour",
        type=float,
        metavar="USD",
        help="what the server's hardware costs: the page then shows the cost of a million output tokens",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the device that the run was compared with by another"
    )
    parser.add_argument("--decode", action="store_true", help="decode the captures once more before")


def run(args: argparse.Namespace) -> int:
    if args.format or args.to:
        return _in_other_formats(args.run, args.format or WRITTEN, args.to)

    run = open_run(args.run, check_records=not args.decode)
    folder = RunDir(run.path)
    if args.decode or not (run.path / "records.parquet").exists():
        folder.save_records(_decoded(run))
        folder.finish("complete" if run.status == "complete" else "interrupted")
    if args.usd_per_hour is not None:
        if not 0 < args.usd_per_hour < math.inf:
            raise WorkloadError(f"--usd-per-hour {args.usd_per_hour:g}: expected US dollars above 0")
        folder.save_manifest(replace(folder.manifest, usd_per_hour=args.usd_per_hour))
    hints = read_options(Hints, args, stated=read_options(Stated, args))
    if hints.device or hints.model_config or hints.stated.to_json():
        check_hints(hints)
        note_hardware(folder, hints, force=args.force)
    write_report(folder)
    print(f"Report: {folder.report}")
    return exit_codes.DONE


def _in_other_formats(path: Path, formats: Sequence[str], to: Path | None) -> int:
    """Print the run, or write it below `to`; its folder stays as it is."""
    written = [name for name in formats if name in WRITTEN]
    if written and to is None:
        raise WorkloadError(f"--format {written[0]} writes files: give --to DIR")
    if not written:
        keep_pandas_out()
    run = open_run(path)
    for name in formats:
        if name in PRINTED:
            _print(run, name)
    for name in written:
        assert to is not None
        for file, content in FILES[name](run).items():
            target = to / file
            target.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target, content)
            print(target)
    return exit_codes.DONE


def _print(run: Run, name: str) -> None:
    """The run's summary as text or JSON, also of one that was killed half-way."""
    if not (run.path / "plan.parquet").exists():
        why = f": {run.manifest.error}" if run.manifest.error else ""
        words = f"the run ended ({run.status}) before its requests were planned, so nothing was sent{why}"
        print(
            json_text({"status": run.status, "absent": words}) if name == "json" else f"{run.name}\n{words}"
        )
    elif name == "json":
        print(json_text(view_of(run).summary.to_json()))
    else:
        show(overview(view_of(run)))


def _decoded(run: Run) -> pa.Table:
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
