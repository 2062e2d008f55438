"""A run on disk: one folder that holds what was asked, what came back and what was made of it.

`RunDir` writes it, file by file, each as `*.partial` first and renamed when whole; `Run` reads it, also where
the run was killed half-way. Not for the process that drives the load: this imports pyarrow.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from loadgen.driver.duration_histogram import Spread
from loadgen.driver.job import DriveReport
from loadgen.record import tables
from loadgen.record.columns import Columns, columns_of
from loadgen.record.decode import decode_run
from loadgen.record.files import disk_errors, renamed, write_bytes, write_json
from loadgen.record.redact import without_secrets
from servers.engine import Identity
from servers.host.telemetry import Row
from servers.registry import ENGINES
from workloads.plan import Plan
from workloads.request import Request, WorkloadError

if TYPE_CHECKING:
    import pandas as pd  # pyarrow imports it where a frame is asked for: a run that begins asks for none

SCHEMA: Final = 1
"""Of the folder and every file in it. Older ones load for ever, newer ones are refused."""

Status = Literal["running", "complete", "interrupted", "failed"]

_MANIFEST: Final = "manifest.json"
_N_AT_ONCE: Final = 8192


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run being written. Every method raises OSError, with path and free bytes, where the disk is full."""

    path: Path

    @classmethod
    def create(cls, parent: Path, engine: str, workload: str, facts: Mapping[str, Any]) -> RunDir:
        """A new folder `<utc>-<engine>-<workload>-<8 hex>` whose manifest says "running".

        The manifest's `clock` is the one reading of the wall clock: the same instant on both clocks.
        """
        wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()  # noqa: TID251
        utc = datetime.fromtimestamp(wall_ns / 1e9, UTC)
        name = f"{utc:%Y%m%dT%H%M%SZ}-{_slug(engine)}-{_slug(workload)}-{secrets.token_hex(4)}"
        run = cls(parent / name)
        with disk_errors(run.path):
            run.path.mkdir(parents=True)
        clock = {"wall_ns": wall_ns, "monotonic_ns": monotonic_ns, "utc": utc.isoformat()}
        base = {"schema": SCHEMA, "status": "running", "pid": os.getpid(), "engine": engine}
        write_json(
            run.path / _MANIFEST, without_secrets({**base, "workload": workload, "clock": clock, **facts})
        )
        return run

    @property
    def captures(self) -> Path:
        return self.path / "captures"

    @property
    def server_log(self) -> Path:
        return self.path / "server.log"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def update(self, **facts: Any) -> None:
        """Lay facts over the manifest, secrets taken out."""
        manifest = orjson.loads((self.path / _MANIFEST).read_bytes())
        write_json(self.path / _MANIFEST, {**manifest, **without_secrets(facts)})

    def finish(self, status: Status) -> None:
        self.update(status=status)

    def save_plan(self, plan: Plan) -> None:
        self._save("plan.parquet", tables.plan_tables(plan))

    def save_counts(self, counts: pa.Table) -> None:
        self._save("counts.parquet", [counts])

    def save_records(self, records: pa.Table) -> None:
        self._save("records.parquet", [records])

    def save_telemetry(self, rows: Iterable[Row], t0_ns: int = 0) -> None:
        """What the watcher saw; `t0_ns`, the run's start, is taken off every `at_ns`."""
        self._save("telemetry.parquet", [tables.telemetry_table(rows, t0_ns)])

    def save_steps(self, steps: pa.Table) -> None:
        self._save("steps.parquet", [steps])

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def save_report(self, html: str) -> None:
        write_bytes(self.report, html.encode())

    def _save(self, name: str, parts: Iterable[pa.Table]) -> None:
        with disk_errors(self.path / name), renamed(self.path / name) as partial:
            parts = iter(parts)
            first = next(parts)
            with pq.ParquetWriter(partial, first.schema, compression="zstd") as writer:
                writer.write_table(first)
                for part in parts:
                    writer.write_table(part)


class Run:
    """A run read back; every part is loaded when first asked for. A part that was never written is None."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        """complete, failed, interrupted or running; a "running" whose process is gone was interrupted."""
        status = str(self.manifest.get("status"))
        if status == "running" and not psutil.pid_exists(int(self.manifest.get("pid", 0))):
            return "interrupted"
        return status

    @cached_property
    def plan(self) -> Plan:
        self._need_plan()
        return tables.plan_of(self._read("plan.parquet"))

    @cached_property
    def asked(self) -> list[Request]:
        """The plan's requests, empty `prompt_ids` standing for ids: a large plan is mostly those."""
        self._need_plan()
        names = [name for name in tables.PLAN.names if name != "prompt_ids"]
        return tables.requests_without_prompts(self._read("plan.parquet", names))

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
        table = self._read("records.parquet", tables.PER_REQUEST)
        return self._decoded.select(tables.PER_REQUEST) if table is None else table

    @cached_property
    def columns(self) -> Columns:
        """The same as arrays, in seconds."""
        columns = columns_of(self.record_table)
        pa.default_memory_pool().release_unused()  # a large run's token times, and what decoding took
        return columns

    @cached_property
    def records(self) -> pd.DataFrame:
        """The same for pandas: token times are arrays, what never happened is NaN or None."""
        frame: pd.DataFrame = self.record_table.to_pandas()
        return frame

    @cached_property
    def telemetry(self) -> pd.DataFrame | None:
        """Rows at_ns, source, name, value, note, in the order of time; a value that is missing is NaN."""
        return _as_frame(self._read("telemetry.parquet"))

    @cached_property
    def steps(self) -> pd.DataFrame | None:
        """The engine's own step log."""
        return _as_frame(self._read("steps.parquet"))

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        path = self.path / "summary.json"
        return _json(path) if path.exists() else None

    @property
    def drive_reports(self) -> list[DriveReport]:
        """What the drivers said of themselves (the manifest's `drivers`)."""
        return [_drive_report(row) for row in self.manifest.get("drivers", [])]

    @property
    def identity(self) -> Identity | None:
        """Who the server is (the manifest's `identity`)."""
        row = self.manifest.get("identity")
        return None if row is None else Identity(**row)

    @property
    def server_log(self) -> str:
        path = self.path / "server.log"
        return path.read_text("utf-8", errors="replace") if path.exists() else ""

    def decoded(self) -> pa.Table:
        """The records decoded from the captures once more, as after a parser's repair."""
        self._need_plan()
        engine = str(self.manifest.get("engine"))
        if engine not in ENGINES:
            raise WorkloadError(
                f"{self.path} was made with engine {engine!r}; known are {', '.join(ENGINES)}"
            )
        return decode_run(self.path, ENGINES[engine].decode)

    def _need_plan(self) -> None:
        if not (self.path / "plan.parquet").exists():
            raise WorkloadError(f"{self.path} has no plan.parquet: the run ended before its plan was written")

    def _read(self, name: str, columns: list[str] | None = None) -> pa.Table | None:
        path = self.path / name
        if not path.exists():
            return None
        try:
            # In batches: read whole, a table takes twice its size meanwhile.
            with pq.ParquetFile(path, memory_map=True) as file:
                batches = list(file.iter_batches(_N_AT_ONCE, columns=columns, use_threads=False))
                return pa.Table.from_batches(batches, batches[0].schema if batches else file.schema_arrow)
        except pa.ArrowException as error:
            raise WorkloadError(
                f"{path} cannot be read as Parquet ({error}); was it cut or changed?"
            ) from error


def open_run(path: Path) -> Run:
    """The run in the folder `path`; WorkloadError where there is none that this version can read."""
    manifest_path = path / _MANIFEST
    if not manifest_path.is_file():
        what = "no such folder" if not path.exists() else f"it has no {_MANIFEST}"
        raise WorkloadError(f"{path} is not a run: {what}; expected a folder that `burstline run` wrote")
    manifest = _json(manifest_path)
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if not isinstance(schema, int):
        raise WorkloadError(f"{manifest_path} names no schema; expected a number up to {SCHEMA}")
    if schema > SCHEMA:
        raise WorkloadError(
            f"{path} has schema {schema}, this Burstline reads up to {SCHEMA}; use the version that wrote it "
            f"({manifest.get('version', 'not named')}) or a newer one"
        )
    return Run(path, manifest)


def _json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"{path} is not JSON ({error}); was it cut or changed?") from error


def _drive_report(row: Mapping[str, Any]) -> DriveReport:
    spreads = {name: row[name] and Spread(**row[name]) for name in ("late", "read_lag", "connect")}
    return DriveReport(**{**row, **spreads})


def _as_frame(table: pa.Table | None) -> pd.DataFrame | None:
    return None if table is None else table.to_pandas()


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower() or "run"
