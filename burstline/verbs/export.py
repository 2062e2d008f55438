"""`burstline export`: a run in the formats of other tools."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from burstline import exit_codes

if TYPE_CHECKING:
    from loadgen.record.rundir import Run

FORMATS = ("parquet", "csv", "markdown", "junit", "trace", "figures")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder that `burstline run` wrote")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="made if it is not there")
    parser.add_argument(
        "--format",
        action="append",
        choices=FORMATS,
        help="parquet and csv: the records; markdown: for a pull request; junit: targets and verdict for CI; "
        "trace: for ui.perfetto.dev; figures: SVG and PNG; may be given several times (all)",
    )


def run(args: argparse.Namespace) -> int:
    from loadgen.record.files import write_bytes
    from loadgen.record.rundir import open_run

    run = open_run(args.run)
    args.to.mkdir(parents=True, exist_ok=True)
    for name in args.format or FORMATS:
        for path, content in _WRITERS[name](run).items():
            target = args.to / path
            target.parent.mkdir(exist_ok=True)
            write_bytes(target, content)
            print(target)
    return exit_codes.DONE


def _parquet(run: "Run") -> dict[str, bytes]:
    import io

    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(run.record_table, out, compression="zstd")
    return {"records.parquet": out.getvalue()}


def _csv(run: "Run") -> dict[str, bytes]:
    from reports.formats.csv import records_csv

    return {"records.csv": records_csv(run)}


def _markdown(run: "Run") -> dict[str, bytes]:
    from reports.digest import pull_request
    from reports.formats.markdown import markdown
    from reports.run_view import view_of

    return {"summary.md": markdown(pull_request(view_of(run))).encode()}


def _junit(run: "Run") -> dict[str, bytes]:
    from reports.formats.junit import junit

    return {"junit.xml": junit(run).encode()}


def _trace(run: "Run") -> dict[str, bytes]:
    from reports.formats.trace_events import trace_json
    from reports.run_view import view_of

    return {"trace.json": trace_json(view_of(run))}


def _figures(run: "Run") -> dict[str, bytes]:
    from reports.formats.figure_files import figure_files
    from reports.run_view import view_of

    return {f"figures/{name}": content for name, content in figure_files(view_of(run)).items()}


_WRITERS: "dict[str, Callable[[Run], dict[str, bytes]]]" = {
    "parquet": _parquet,
    "csv": _csv,
    "markdown": _markdown,
    "junit": _junit,
    "trace": _trace,
    "figures": _figures,
}
