"""`burstline report`: regenerate a run's summary and page from its files, or convert the run."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from burstline.bench.conclusion import keep_profile, write_report
from burstline.console import exit_codes
from burstline.console.flags import read_options
from burstline.console.stdout import json_text
from burstline.console.terminal import show
from burstline.loadgen.capture.files import write_bytes
from burstline.machine.hardware import check_hints, note_hardware
from burstline.machine.hints import Hints, Stated
from burstline.measure.record.run_writer import json_of
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.tables import keep_pandas_out
from burstline.measure.record.typed_json import from_json
from burstline.measure.verdict.certificate import Certificate
from burstline.reports.formats.predicted import Predicted
from burstline.reports.formats.text import markdown
from burstline.reports.model.comparison import Comparison, alone, view_of
from burstline.reports.model.contenders import comparison_of
from burstline.reports.page.certificate_page import certificate_page
from burstline.reports.page.digest import digest, in_short
from burstline.reports.page.files import FILES, write_all, written
from burstline.reports.page.limit_page import RESULT, LimitResult
from burstline.reports.page.prediction_page import PREDICTION, prediction_page
from burstline.suites.execution import SUITE_JSON, comparison_of_suite
from burstline.suites.gate import GateInputs
from burstline.workloads.options import flag_of, options_of
from burstline.workloads.request import WorkloadError

PRINTED: Final = ("text", "json")
OF_PAGE: Final = ("profile", *options_of(Hints), *options_of(Stated), "usd_per_hour", "force", "decode")
"""What only a report's page, and what it is made from, goes by."""


def run(args: argparse.Namespace) -> int:
    for name, (what, page) in OTHER_PAGES.items():
        if (args.run / name).is_file():
            return _other_page(args, what, args.run / name, page)
    if args.short:
        if args.format != ["markdown"] or args.to:
            raise WorkloadError("--short prints Markdown: expected --format markdown --short, without --to")
        comparison = alone(view_of(open_run(args.run)))
        print(markdown(in_short(comparison, comparison.views[0])), end="")
        return exit_codes.DONE
    of_page = [name for name in OF_PAGE if (given := getattr(args, name)) is not None and given is not False]
    if args.format or args.to:
        if of_page:
            other = "--format" if args.format else "--to"
            raise WorkloadError(
                f"{flag_of(of_page[0])} changes the page, which {other} does not write; give it alone first"
            )
        return _in_other_formats(args.run, args.format or tuple(FILES), args.to)
    if args.profile is not None and not args.profile.exists():
        raise WorkloadError(f"--profile {args.profile}: No such file or folder; expected a PyTorch trace")
    if args.usd_per_hour is not None and not 0 < args.usd_per_hour < math.inf:
        raise WorkloadError(f"--usd-per-hour {args.usd_per_hour:g}: expected US dollars above 0")
    run = open_run(args.run, check_records=not args.decode)
    before = run.manifest
    if args.decode or not (run.path / "records.parquet").exists():
        run.save("records.parquet", [_decoded(run)])
        run.note(replace(before, status="complete" if run.status == "complete" else "interrupted"))
    hints = read_options(Hints, args, stated=read_options(Stated, args))
    try:
        if hints.device or hints.model_config or hints.stated.to_json():
            check_hints(hints)
            note_hardware(run, hints, force=args.force, needed=hints.device is not None)
        if args.profile is not None:
            keep_profile(run, args.profile)
        if args.usd_per_hour is not None:  # it outweighs the device's own
            run.note(replace(run.manifest, usd_per_hour=args.usd_per_hour))
    finally:  # what was written before a wrong hint goes with it
        if run.manifest != before:
            run.save_manifest()
    write_report(run)
    print(f"Report: {run.report}")
    return exit_codes.DONE


def _several(folder: Path, kept: Any) -> Comparison:
    """The runs of a suite, in its folder, or those beside it of a sweep or of repeats."""
    if (folder / SUITE_JSON).is_file():
        return comparison_of_suite(folder)
    names = [name for case in kept["cells"] for own in case["runs"].values() for name in own]
    return comparison_of([open_run(folder.parent / name) for name in names], folder, anyway=True)


SEVERAL: Final = "comparison.json"
MakePage = Callable[[Path, Any], str | Comparison]
OTHER_PAGES: Final[Mapping[str, tuple[str, MakePage]]] = {
    RESULT: ("search", lambda folder, kept: LimitResult.from_json(kept).page(folder)),
    "gate.json": ("gate", lambda folder, kept: GateInputs.from_json(kept).page(folder)),
    "certificate.json": ("certificate", lambda _, kept: certificate_page(from_json(Certificate, kept))),
    PREDICTION: ("prediction", lambda _, kept: prediction_page(from_json(Predicted, kept))),
    SEVERAL: ("page over several runs", _several),
}
"""By the file of a folder that is no run: what it is of, and how its page is made."""


def _other_page(args: argparse.Namespace, what: str, file: Path, page: MakePage) -> int:
    """Write the page of what is no run again; one over several runs may be printed instead."""
    shapes = (*PRINTED, "markdown") if file.name == SEVERAL else ()
    given = ["format"] * any(shape not in shapes for shape in args.format or ())
    if given := given + [name for name in ("to", "short", *OF_PAGE) if getattr(args, name)]:
        has = "only a page" + f", and --format {', '.join(shapes)} alone" * bool(shapes)
        raise WorkloadError(f"{flag_of(given[0])} is for a run, and {args.run} is a {what}: it has {has}")
    try:
        made = page(args.run, json_of(file))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise WorkloadError(f"{file} cannot be read: {error}; was it changed, or is it older?") from None
    if isinstance(made, str):
        write_bytes(args.run / "report.html", made.encode())
    elif not args.format:
        write_all(made, args.run)
    told = [written(shape, made) for shape in args.format or () if not isinstance(made, str)]
    print(*(told or [f"Report: {args.run / 'report.html'}"]), sep="\n")
    return exit_codes.DONE


def _in_other_formats(path: Path, formats: Sequence[str], to: Path | None) -> int:
    """Print the run, or write it below `to`; its folder stays as it is."""
    to_files = [name for name in formats if name in FILES]
    if to_files and to is None:
        raise WorkloadError(f"--format {to_files[0]} writes files: give --to DIR")
    if not to_files:
        if to is not None:
            raise WorkloadError(f"--format {formats[0]} is printed: --to {to} would be ignored; drop it")
        keep_pandas_out()
    run = open_run(path)
    for name in formats:
        if name in PRINTED:
            _print(run, name)
    for name in to_files:
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
        told = {"status": run.status, "absent": words}
        print(json_text(told) if name == "json" else f"{run.name}\n{words}")
    elif name == "json":
        print(json_text(view_of(run).summary.to_json()))
    else:
        show(digest(alone(view_of(run))))


def _decoded(run: Run) -> pa.Table:
    """WorkloadError where fewer requests were captured than there are ended ones among the records."""
    records = run.decoded
    if not (run.path / "records.parquet").exists():
        return records
    try:
        kept = Run(run.path, run.manifest).request_table  # which are to be made again
    except WorkloadError:
        return records  # what is there is no table: there is nothing to lose
    before, now = (len(each) - each.column("closed_ns").null_count for each in (kept, records))
    if now < before:
        raise WorkloadError(
            f"{run.path / 'captures'} holds {now:,} of the {before:,} requests that records.parquet has; "
            "were captures cut or removed? Nothing was changed; drop --decode to use records.parquet"
        )
    return records
