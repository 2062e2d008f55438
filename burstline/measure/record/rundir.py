"""A run on disk: one folder with the plan, the captures and everything computed from them.

`RunDir` (`run_writer.py`) writes it; `Run` adds what is read of it, also if the run was killed half-way.
"""

import io
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from burstline.measure.record.columns import Columns, columns_of, joined_columns
from burstline.measure.record.decode import decode_run
from burstline.measure.record.manifest import Manifest, Status
from burstline.measure.record.run_writer import MOST_BYTES, RunDir, json_of, read_manifest
from burstline.measure.record.summary import Summary
from burstline.measure.record.tables import ADDED, COUNTS, PER_REQUEST, RECORDS, TELEMETRY
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.typed_json import MismatchError
from burstline.servers.registry import ENGINES
from burstline.workloads.plan import Plan
from burstline.workloads.plan_table import PLAN, WITHOUT_PROMPTS, PlannedRequests, plan_of_table
from burstline.workloads.request import WorkloadError

if TYPE_CHECKING:
    import pandas as pd

_N_AT_ONCE: Final = 8192
_MOST_UNPACKED_BYTES: Final = 1 << 30
_MOST_RATIO: Final = 200
_CLOCK_S: Final = 60.0
"""By so much the wall clock may have been set since a run's process began."""


class Run(RunDir):
    """A run with its parts, each read when first needed if it is not in memory; None if it was never written.

    A run that has just ended reads back its plan (the load needed the memory), its records (in memory they
    take twice their size while they become columns), and the few readings of an audit or a profile.
    """

    @classmethod
    def of(cls, run: RunDir) -> Self:
        return cls(run.path, run.manifest, run.telemetry_table, run.forecast)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> Status:
        """The manifest's; a "running" whose process is gone was interrupted."""
        status = self.manifest.status
        return "interrupted" if status == "running" and not _is_written(self.manifest) else status

    @cached_property
    def plan(self) -> Plan:
        self._need_plan()
        return plan_of_table(self._read("plan.parquet"))

    @cached_property
    def asked(self) -> PlannedRequests:
        """The plan's requests, empty `prompt_ids` standing for ids: a large plan is mostly those."""
        self._need_plan()
        return PlannedRequests(self.plan_columns(*WITHOUT_PROMPTS))

    def plan_columns(self, *names: str) -> pa.Table | None:
        """Columns of the plan's own requests, in order; None where its plan was never written."""
        table = self._read("plan.parquet", [*{"stage", *names}])
        return None if table is None else table.filter(table.column("stage").is_null()).select(names)

    @property
    def record_table(self) -> pa.Table:
        """One row per planned request, in order.

        Decoded anew from the captures where the run was cut off before that; a request without a capture is
        `cancelled`. Read again each time, for it is most of the memory that a large run takes.
        """
        table = self._read("records.parquet")
        return self.decoded if table is None else table

    @cached_property
    def records(self) -> "pd.DataFrame":
        """The same for pandas: token times are arrays, what never happened is NaN or None."""
        frame: pd.DataFrame = self.record_table.to_pandas()
        return frame

    @cached_property
    def request_table(self) -> pa.Table:
        """The same without what it holds for each token."""
        table = self._read("records.parquet", PER_REQUEST)
        return (self.decoded if table is None else table).select(PER_REQUEST)

    @cached_property
    def columns(self) -> Columns:
        """The same as arrays, in seconds."""
        parts = self._parts("records.parquet")
        columns = joined_columns(parts) if parts else columns_of(self.decoded)
        pa.default_memory_pool().release_unused()  # a large run's token times, and what decoding took
        return columns

    @cached_property
    def watched(self) -> Telemetry:
        """The watcher's telemetry as arrays; empty without a watcher."""
        table = self.telemetry_table or self._read("telemetry.parquet")
        return Telemetry({}, []) if table is None else Telemetry.of(table)

    @cached_property
    def telemetry(self) -> "pd.DataFrame | None":
        """The same for pandas: at_ns, source, name, value, note; a value that is missing is NaN."""
        return _as_frame(self._read("telemetry.parquet"))

    @cached_property
    def steps(self) -> "pd.DataFrame | None":
        return _as_frame(self._read("steps.parquet"))

    @cached_property
    def summary(self) -> Summary | None:
        """The summary on disk; WorkloadError, in one line, where a type in it is wrong."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        row = json_of(path)
        try:
            return Summary.from_json(row if isinstance(row, dict) else {})
        except MismatchError as error:
            raise WorkloadError(f"{path}: {error}; `burstline report RUN` writes it again") from None

    @property
    def server_log(self) -> str:
        """Its end, where it is long."""
        path = self.path / "server.log"
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - MOST_BYTES))
            return file.read(MOST_BYTES).decode("utf-8", "replace")

    @cached_property
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
        with _parquet(path, memory_map=True) as file:
            lacking = ADDED.difference(file.schema_arrow.names) if path.name == "records.parquet" else ()
            batches = file.iter_batches(_N_AT_ONCE, columns=columns, use_threads=False)
            tables = (pa.Table.from_batches([batch]) for batch in batches)
            for part in chain([file.read_row_groups([], columns)], tables):
                for name in lacking:
                    part = part.append_column(name, pa.nulls(len(part), RECORDS.field(name).type))
                yield part


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


@contextmanager
def _parquet(path: Path, *, memory_map: bool = False) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, memory_map=memory_map) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise WorkloadError(f"{path} cannot be read as Parquet ({why}); was it cut or changed?") from error


def open_run(path: Path, *, check_records: bool = True) -> Run:
    """The run in the folder `path`, of which each part was checked for its kind, its columns and its rows.

    Without `check_records` the records are taken as they are: they are to be made again.

    WorkloadError, in one line, where there is none that this version can read. What a part says is checked by
    `burstline verify`.
    """
    manifest = read_manifest(path)
    if manifest.status == "running" and manifest.pid != os.getpid() and _is_written(manifest):
        raise WorkloadError(f"{path} is still running (process {manifest.pid}); wait until it has ended")
    for part in path.iterdir():
        if not (part.is_file() or part.is_dir()):
            raise WorkloadError(f"{part} is neither a file nor a folder; expected what `burstline run` wrote")
        is_kept = part.suffix in (".json", ".toml") and part.name != "summary.json"
        if is_kept and part.stat().st_size > MOST_BYTES:
            raise WorkloadError(f"{part} has over {MOST_BYTES >> 20} MB; expected what `burstline run` wrote")
    n_planned = _n_planned(path, manifest)
    parts = {"telemetry": TELEMETRY, "counts": COUNTS} | ({"records": RECORDS} if check_records else {})
    for file, expected in ((path / f"{name}.parquet", schema) for name, schema in parts.items()):
        if not file.exists():
            continue
        n_rows, schema = _shape_of(file)
        _check_columns(file, schema, expected)
        if expected is RECORDS and n_planned is not None and n_rows != n_planned:
            raise WorkloadError(
                f"{file} has {n_rows:,} rows, but {n_planned:,} requests were planned; was it cut? "
                "`burstline report --decode` makes it again from the captures"
            )
    return Run(path, manifest)


def _is_written(manifest: Manifest) -> bool:
    """Whether the process that writes the run lives; one that began after the run only has its number."""
    begun_s = manifest.clock.wall_ns / 1e9 if manifest.clock else math.inf
    with suppress(psutil.Error, ValueError, OverflowError):
        process = psutil.Process(manifest.pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < begun_s + _CLOCK_S
    return False


def _check_columns(path: Path, schema: pa.Schema, expected: pa.Schema) -> None:
    types = dict.fromkeys(ADDED) | dict(zip(schema.names, schema.types, strict=False))
    if wrong := [field.name for field in expected if types.get(field.name, "") not in (field.type, None)]:
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
    with _parquet(path) as file:  # read_table would import pyarrow.dataset, and pandas with it
        return int(file.read(columns=["stage"]).column("stage").null_count)


def _shape_of(path: Path) -> tuple[int, pa.Schema]:
    """A table's rows and columns, from its footer; WorkloadError where it would unpack to an absurd size."""
    with _parquet(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
        n_bytes = sum(metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
    if n_bytes > max(_MOST_UNPACKED_BYTES, _MOST_RATIO * path.stat().st_size):
        raise WorkloadError(f"{path} would unpack to {n_bytes:,} bytes; expected what `burstline run` wrote")
    return metadata.num_rows, schema


def _as_frame(table: pa.Table | None) -> "pd.DataFrame | None":
    return None if table is None else table.to_pandas()
