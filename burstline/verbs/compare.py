"""`burstline compare`: rank runs that did the same work."""

from __future__ import annotations

import argparse
from pathlib import Path

from burstline import exit_codes
from burstline.loadgen.record.rundir import open_run
from burstline.loadgen.record.tables import keep_pandas_out
from burstline.reports.model.contenders import comparison_of
from burstline.reports.page.files import written
from burstline.workloads.request import WorkloadError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folders that `burstline run` wrote; a page over repeats among them is passed over",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FACTOR",
        help="what the runs differ in on purpose: an engine's flag such as max-num-seqs, or engine, version, "
        "devices, dtype, kv-cache-dtype, quantization, tensor-parallel-size, model, cpu, placement "
        "(repeatable); a single difference is recognised by itself",
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="compare though runs differ or were disturbed, and say so",
    )
    parser.add_argument(
        "--format", choices=("text", "markdown", "html", "json"), default="text", help="html: the page"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there instead of printing it")


def run(args: argparse.Namespace) -> int:
    keep_pandas_out()
    runs = [open_run(path) for path in args.runs if not (path / "comparison.json").is_file()]
    if len(runs) < 2:
        raise WorkloadError("one run cannot be compared: name two or more")
    names = [str(run.path.resolve()) for run in runs]
    if len(set(names)) < len(names):
        raise WorkloadError("a run is named twice: compare different runs, such as repeats")
    comparison = comparison_of(runs, (args.out or Path()).parent, varied=args.vary, anyway=args.anyway)
    shown = written(args.format, comparison)
    if args.out is None:
        print(shown)
    else:
        args.out.write_text(shown, "utf-8")
        print(f"Written: {args.out}")
    return exit_codes.DONE if comparison.comparable else exit_codes.INCONCLUSIVE
