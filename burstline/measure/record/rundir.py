"""A run on disk: one folder with the plan, the captures and everything computed from them.

`RunDir` writes it, file by file, each as `*.partial` first and renamed when whole; `Run` reads it, also where
the run was killed half-way.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from burstline.loadgen.capture.files import disk_errors, renamed, write_json
from burstline.measure.record.columns import Columns, columns_of, joined_columns
from burstline.measure.record.decode import decode_run
from burstline.measure.record.manifest import SCHEMA, Manifest, RunClock, Status
from burstline.measure.record.summary import Summary
from burstline.measure.record.tables import COUNTS, PER_REQUEST, RECORDS, TELEMETRY, telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.typed_json import MismatchError
from burstline.servers.host.telemetry import Row
from burstline.servers.registry import ENGINES
from burstline.servers.secret import without_secrets
from burstline.workloads.plan import Plan
from burstline.workloads.plan_table import (
    PLAN,
    WITHOUT_PROMPTS,
    plan_of_table,
    plan_tables,
    requests_without_prompts,
)
from burstline.workloads.request import Request, WorkloadError

if TYPE_CHECKING:
    import pandas as pd

FORECAST: Final = "forecast.json"
"""What the run was expected to measure, written before its first request."""
PROFILE: Final = "profile.json"
"""What was read of the traces: the steps, and what each module took."""
PROFILED_LOAD: Final = "profile_load.json"
"""The profiled load: prompt and output tokens of each request, in the order of their first tokens."""
AUDIT: Final = ("audit/1", "audit/2")
"""The captures of audited requests, sent alone once and twice."""
READINGS: Final = "audit/readings.json"
"""What a second reader made of the replies of the latter."""
_MANIFEST: Final = "manifest.json"
_N_AT_ONCE: Final = 8192
_MOST_UNPACKED_BYTES: Final = 1 << 30
_MOST_RATIO: Final = 200
_PIDS: Final = 2**31


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run being written. Every method raises OSError, with path and free bytes, where the disk is full."""

    path: Path

    @classmethod
    def create(cls, parent: Path, manifest: Manifest) -> RunDir:
        """A new folder `<utc>-<engine>-<workload>-<8 hex>` whose manifest says "running".

        Until it has one the folder is called `*.partial`: a run that is killed here leaves no folder without.
        The manifest's `clock` is the one reading of the wall clock: the same instant on both clocks.
        """
        wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()  # noqa: TID251
        utc = datetime.fromtimestamp(wall_ns / 1e9, UTC)
        words = f"{_slug(manifest.engine)}-{_slug(manifest.workload)}"
        run = cls(parent / f"{utc:%Y%m%dT%H%M%SZ}-{words}-{secrets.token_hex(4)}")
        clock = RunClock(wall_ns, monotonic_ns, utc.isoformat())
        begun = replace(manifest, status="running", pid=os.getpid(), clock=clock)
        with disk_errors(run.path), renamed(run.path) as partial:
            partial.mkdir(parents=True)
            write_json(partial / _MANIFEST, without_secrets(begun.to_json()))
        return run

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is on disk."""
        return read_manifest(self.path)

    def save_manifest(self, manifest: Manifest) -> None:
        """Write the sections that changed, secrets taken out; what else the file holds is kept as it is."""
        path = self.path / _MANIFEST
        old, new = self.manifest.to_json(), without_secrets(manifest.to_json())
        changed = {name: value for name, value in new.items() if value != old.get(name)}
        write_json(path, {**_json(path), **changed})

    def finish(self, status: Status) -> None:
        self.save_manifest(replace(self.manifest, status=status))

    @property
    def captures(self) -> Path:
        return self.path / "captures"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def save_plan(self, plan: Plan) -> None:
        self.save("plan.parquet", plan_tables(plan))
        pa.default_memory_pool().release_unused()  # 20 MB that the load would find taken

    def save_records(self, records: pa.Table) -> None:
        self.save("records.parquet", [records])

    def save_telemetry(self, rows: Iterable[Row], t0_ns: int = 0) -> None:
        """What the watcher saw; `t0_ns`, the run's start, is taken off every `at_ns`."""
        self.save("telemetry.parquet", [telemetry_table(rows, t0_ns)])

    def save_summary(self, summary: Summary) -> None:
        write_json(self.path / "summary.json", summary.to_json())

    def save(self, name: str, parts: Iterable[pa.Table]) -> None:
        """Write one of the tables: `counts.parquet`, `warmup.parquet`, `steps.parquet` and so on."""
        with disk_errors(self.path / name), renamed(self.path / name) as partial:
            parts = iter(parts)
            first = next(parts)
            with pq.ParquetWriter(partial, first.schema, compression="zstd") as writer:
                writer.write_table(first)
                for part in parts:
                    writer.write_table(part)


class Run:
    """A run read back; every part is loaded when first asked for. A part that was never written is None."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> Status:
        """The manifest's; a "running" whose process is gone was interrupted."""
        manifest = self.manifest
        if manifest.status == "running" and not (manifest.pid < _PIDS and psutil.pid_exists(manifest.pid)):
            return "interrupted"
        return manifest.status

    @cached_property
    def plan(self) -> Plan:
        self._need_plan()
        return plan_of_table(self._read("plan.parquet"))

    @cached_property
    def asked(self) -> list[Request]:
        """The plan's requests, empty `prompt_ids` standing for ids: a large plan is mostly those."""
        self._need_plan()
        table = self._read("plan.parquet", WITHOUT_PROMPTS)
        return [request for request in requests_without_prompts(table) if request.stage is None]

    def plan_columns(self, *names: str) -> pa.Table | None:
        """Columns of the plan's own requests, in order; None where its plan was never written."""
        table = self._read("plan.parquet", ["stage", *names])
        return None if table is None else table.filter(table.column("stage").is_null()).select(names)

    @property
    def record_table(self) -> pa.Table:
        """One row per planned request, in order.

        Decoded anew from the captures where the run was cut off before that; a request without a capture is
        `cancelled`. Read again each time, for it is most of the memory that a large run takes.
        """
        table = self._read("records.parquet")
        return self._decoded if table is None else table

    @cached_property
    def _decoded(self) -> pa.Table:
        return self.decoded()

    @cached_property
    def request_table(self) -> pa.Table:
        """The same without what it holds for each token."""
        table = self._read("records.parquet", PER_REQUEST)
        whole = self._decoded if table is None else table
        return whole.select(PER_REQUEST)

    @cached_property
    def columns(self) -> Columns:
        """The same as arrays, in seconds."""
        parts = self._parts("records.parquet")
        columns = joined_columns(parts) if parts else columns_of(self._decoded)
        pa.default_memory_pool().release_unused()  # a large run's token times, and what decoding took
        return columns

    @cached_property
    def records(self) -> pd.DataFrame:
        """The same for pandas: token times are arrays, what never happened is NaN or None."""
        frame: pd.DataFrame = self.record_table.to_pandas()
        return frame

    @cached_property
    def watched(self) -> Telemetry:
        """The watcher's telemetry as arrays; empty without a watcher."""
        table = self._read("telemetry.parquet")
        return Telemetry.empty() if table is None else Telemetry.of(table)

    @cached_property
    def telemetry(self) -> pd.DataFrame | None:
        """The same for pandas: at_ns, source, name, value, note; a value that is missing is NaN."""
        return _as_frame(self._read("telemetry.parquet"))

    @cached_property
    def steps(self) -> pd.DataFrame | None:
        return _as_frame(self._read("steps.parquet"))

    @cached_property
    def summary(self) -> Summary | None:
        """The summary on disk; WorkloadError, in one line, where a type in it is wrong."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        row = _json(path)
        try:
            return Summary.from_json(row if isinstance(row, dict) else {})
        except MismatchError as error:
            raise WorkloadError(f"{path}: {error}; `burstline report {self.path}` writes it again") from None

    @property
    def server_log(self) -> str:
        path = self.path / "server.log"
        return path.read_text("utf-8", errors="replace") if path.exists() else ""

    def decoded(self) -> pa.Table:
        """The records decoded from the captures once more, as after a parser's repair."""
        self._need_plan()
        engine = self.manifest.engine
        if engine not in ENGINES:
            raise WorkloadError(
                f"{self.path} was made with engine {engine!r}; known are {', '.join(ENGINES)}"
            )
        return decode_run(self.path, ENGINES[engine].decode)

    def _need_plan(self) -> None:
        if not (self.path / "plan.parquet").exists():
            raise WorkloadError(f"{self.path} has no plan.parquet: the run ended before its plan was written")

    def _read(self, name: str, columns: list[str] | None = None) -> pa.Table | None:
        parts = self._parts(name, columns)
        return None if parts is None else pa.concat_tables(parts)

    def _parts(self, name: str, columns: list[str] | None = None) -> Iterator[pa.Table] | None:
        """A table, some rows at a time: read whole, it takes twice its size meanwhile."""
        path = self.path / name
        return self._read_parts(path, columns) if path.exists() else None

    def _read_parts(self, path: Path, columns: list[str] | None) -> Iterator[pa.Table]:
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                yield file.read_row_groups([], columns)
                for batch in file.iter_batches(_N_AT_ONCE, columns=columns, use_threads=False):
                    yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(path, error) from error


def originals(runs: Iterable[Run]) -> tuple[list[Run], list[tuple[Run, Run]]]:
    """Each run once, and every copy with its original: a copy has the same start and plan.

    A run whose start is not known is its own.
    """
    first: dict[object, Run] = {}
    copies = []
    for run in runs:
        clock, asked = run.manifest.clock, run.manifest.asked
        key = (clock.wall_ns, clock.monotonic_ns, asked.salt, asked.seed) if clock else run.path.resolve()
        if first.setdefault(key, run) is not run:
            copies.append((run, first[key]))
    return list(first.values()), copies


def _unreadable(path: Path, error: Exception) -> WorkloadError:
    why = " ".join(str(error).split())[:200]
    return WorkloadError(f"{path} cannot be read as Parquet ({why}); was it cut or changed?")


def open_run(path: Path, *, check_records: bool = True) -> Run:
    """The run in the folder `path`, of which each part was checked for its kind, its columns and its rows.

    Without `check_records` the records are taken as they are: they are to be made again.

    WorkloadError, in one line, where there is none that this version can read. What a part says is checked by
    `burstline verify`.
    """
    manifest = read_manifest(path)
    names = ["telemetry.parquet", "counts.parquet", *(["records.parquet"] if check_records else [])]
    _check_parts(path, manifest, names)
    return Run(path, manifest)


def _check_parts(run: Path, manifest: Manifest, names: Sequence[str]) -> None:
    for part in run.iterdir():
        if not (part.is_file() or part.is_dir()):
            raise WorkloadError(f"{part} is neither a file nor a folder; expected what `burstline run` wrote")
    n_planned = _n_planned(run, manifest)
    schemas = {"records.parquet": RECORDS, "telemetry.parquet": TELEMETRY, "counts.parquet": COUNTS}
    for name in (name for name in names if (run / name).exists()):
        n_rows, schema = _shape_of(run / name)
        _check_columns(run / name, schema, schemas[name])
        if name == "records.parquet" and n_planned is not None and n_rows != n_planned:
            raise WorkloadError(
                f"{run / name} has {n_rows:,} rows, but {n_planned:,} requests were planned; was it cut? "
                "`burstline report --decode` makes it again from the captures"
            )


def _check_columns(path: Path, schema: pa.Schema, expected: pa.Schema) -> None:
    types = dict(zip(schema.names, schema.types, strict=False))
    if wrong := [field.name for field in expected if types.get(field.name) != field.type]:
        text = f"columns are missing or of other types: {', '.join(wrong[:5])}"
        raise WorkloadError(f"{path}: {text}; was it changed?")


def _n_planned(run: Path, manifest: Manifest) -> int | None:
    """How many requests the plan has, stages not counted; None where it was never written."""
    path = run / "plan.parquet"
    if not path.exists():
        return None
    _, schema = _shape_of(path)
    sha256 = (schema.metadata or {}).get(b"sha256", b"").decode(errors="replace")
    if manifest.plan_sha256 not in (None, sha256):
        raise WorkloadError(f"{path} is not the plan of this run: its hash is not the manifest's plan_sha256")
    _check_columns(path, schema, PLAN)
    try:
        with pq.ParquetFile(path) as file:  # read_table would import pyarrow.dataset, and pandas with it
            return int(file.read(columns=["stage"]).column("stage").null_count)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _shape_of(path: Path) -> tuple[int, pa.Schema]:
    """A table's rows and columns, from its footer; WorkloadError where it would unpack to an absurd size."""
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            n_bytes = sum(metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if n_bytes > max(_MOST_UNPACKED_BYTES, _MOST_RATIO * path.stat().st_size):
        raise WorkloadError(f"{path} would unpack to {n_bytes:,} bytes; expected what `burstline run` wrote")
    return metadata.num_rows, schema


def read_manifest(run: Path) -> Manifest:
    """The manifest in a run's folder, every type checked; WorkloadError, in one line, where one is wrong."""
    path = run / _MANIFEST
    if not path.is_file():
        what = "no such folder" if not run.exists() else f"it has no {_MANIFEST}"
        raise WorkloadError(f"{run} is not a run: {what}; expected a folder that `burstline run` wrote")
    row = _json(path)
    schema = row.get("schema") if isinstance(row, dict) else None
    if schema != SCHEMA:
        version = row.get("version") if isinstance(row, dict) else None
        raise WorkloadError(
            f"{path} has schema {schema}, this version reads only schema {SCHEMA}: use the version that "
            f"wrote it ({version or 'not named'}), or run it again"
        )
    try:
        return Manifest.from_json(row)
    except MismatchError as error:
        raise WorkloadError(f"{path}: {error}; was it edited, or written by another version?") from None


def _json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (orjson.JSONDecodeError, OSError) as error:
        raise WorkloadError(f"{path} is not JSON ({error}); was it cut or changed?") from error


def _as_frame(table: pa.Table | None) -> pd.DataFrame | None:
    return None if table is None else table.to_pandas()


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower() or "run"
