"""`burstline verify`: recompute a run's records, summary and page from its captures and compare them.

Offline, from the run's own files: they are made once more in another folder, and compared.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from burstline import __version__
from burstline.bench.conclusion import write_report
from burstline.console import exit_codes
from burstline.loadgen.capture.capture import read_captures
from burstline.measure.record.decode import capture_limit_bytes, decoded_batches, were_killed, with_cancelled
from burstline.measure.record.run_writer import read_manifest
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.tables import RECORDS, counts_of, record_table
from burstline.servers.registry import ENGINES
from burstline.workloads.plan import fingerprint
from burstline.workloads.request import WorkloadError

MADE_AGAIN: Final = ("records.parquet", "summary.json", "report.html")


PartCheck = tuple[str, str | None]
"""What was checked, and the problem; None where it is as it should be."""


def run(args: argparse.Namespace) -> int:
    manifest = read_manifest(args.run)
    checks = list(checks_of(args.run))
    for what, problem in checks:
        print(f"ok   {what}" if problem is None else f"BAD  {what}: {problem}")
    if all(problem is None for _, problem in checks):
        print("Records, summary and page follow from the captures.")
        return exit_codes.DONE
    if manifest.version not in (None, __version__):
        print(f"The run was made by version {manifest.version}, this is {__version__}: figures may differ.")
    return exit_codes.INCONCLUSIVE


def checks_of(path: Path) -> Iterator[PartCheck]:
    """Every check, in the order in which the files build on each other; stops where nothing can follow."""
    try:
        opened = open_run(path, check_records=False)
        yield "manifest", None
    except WorkloadError as error:
        yield ("manifest", str(error))
        return
    try:
        yield _plan(opened)
    except Exception as error:  # a file of unknown origin can make a library raise anything
        yield ("plan", _why(error))
        return
    damage: list[str] = []
    records = None
    try:
        n_captured, records = _decoded(opened, damage)
        yield (f"captures ({n_captured:,} can be read)", "; ".join(damage[:5]) or None)
    except Exception as error:
        yield ("captures", _why(error))
        return
    yield _records(opened, records)
    with tempfile.TemporaryDirectory(prefix="burstline-") as folder:
        yield from _made_again(opened, records, Path(folder, path.resolve().name))


def _plan(run: Run) -> PartCheck:
    plan = run.plan
    contents = fingerprint(plan.requests, plan.due_ns)
    differs = contents != (plan.contents_sha256 or plan.sha256)
    differs |= run.manifest.plan_sha256 not in (None, plan.sha256)
    problem = "its contents do not match its hash" if differs else None
    return (f"plan ({len(plan.requests):,} requests)", problem)


def _decoded(run: Run, damage: list[str]) -> tuple[int, pa.Table]:
    """How many captures can be read, and the records of all planned requests, made of them."""
    requests = run.asked
    captures = read_captures(
        run.path / "captures", max_bytes=capture_limit_bytes(requests), on_damage=damage.append
    )
    path = run.path / "counts.parquet"
    counts = counts_of(pq.read_table(path)) if path.exists() else {}
    decode = ENGINES[run.manifest.engine].decode
    batches = decoded_batches(captures, requests, decode, counts, damage.append)
    parts = [record_table(records) for records in batches]
    seen = pa.concat_tables(parts) if parts else RECORDS.empty_table()
    return len(seen), with_cancelled(seen, requests, was_killed=were_killed(run.path / "captures"))


def _records(run: Run, records: pa.Table) -> PartCheck:
    what = "records follow from the captures"
    if not (run.path / "records.parquet").exists():
        return (what, "there is no records.parquet: `burstline report` makes it")
    try:
        n_rows = pq.read_metadata(run.path / "records.parquet").num_rows
        if n_rows != len(records):
            return (what, f"records.parquet has {n_rows:,} rows, the plan {len(records):,} requests")
        kept = run.record_table
    except Exception as error:
        return (what, _why(error))
    if set(kept.schema.names) != set(records.schema.names):
        names = sorted(set(kept.schema.names) ^ set(records.schema.names))
        return (what, f"records.parquet has other columns ({', '.join(names[:5])})")
    differ = [name for name in records.schema.names if kept.column(name) != records.column(name)]
    return (what, f"they differ in {', '.join(differ[:5])}" if differ else None)


def _made_again(run: Run, records: pa.Table, beside: Path) -> Iterator[PartCheck]:
    """Summary and page, made in a folder of the same name that has links to all else."""
    beside.mkdir()
    for each in run.path.iterdir():
        if each.name not in MADE_AGAIN:
            (beside / each.name).symlink_to(each.resolve())
    try:
        again = Run(beside, run.manifest)
        again.save("records.parquet", [records])
        write_report(again)
    except Exception as error:
        yield ("summary and page", f"they cannot be recomputed from these files: {_why(error)}")
        return
    for name in MADE_AGAIN[1:]:
        kept, made = run.path / name, (beside / name).read_bytes()
        differs = _first_difference(kept, made) if kept.exists() else f"there is no {name}"
        yield (f"{name} follows from the records", differs)


def _first_difference(path: Path, made: bytes) -> str | None:
    with path.open("rb") as file:
        kept = file.read(len(made) + 40)
    if kept == made:
        return None
    pairs = enumerate(zip(kept, made, strict=False))
    at = next((k for k, (a, b) in pairs if a != b), min(len(kept), len(made)))
    line = made.count(b"\n", 0, at) + 1
    one, other = (text[max(0, at - 20) : at + 40].decode(errors="replace") for text in (kept, made))
    return f"line {line} differs: {one!r}, recomputed {other!r}"


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, WorkloadError) else f"{type(error).__name__}: {error}"
