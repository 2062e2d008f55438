"""A run's folder as it is written, file by file, each as `*.partial` first and renamed when whole.

It imports nothing that only reads a run: the load does not wait for that.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from burstline.errors import read_small
from burstline.loadgen.capture.files import disk_errors, renamed, write_json
from burstline.measure.record.manifest import SCHEMA, Manifest, RunClock
from burstline.measure.record.typed_json import MismatchError
from burstline.servers.redact import without_secrets
from burstline.workloads.plan import Plan
from burstline.workloads.plan_table import plan_tables
from burstline.workloads.request import WorkloadError, not_a_run

if TYPE_CHECKING:
    from burstline.roofline.predict.forecast import Forecast, NoForecast

MOST_BYTES: Final = 64 << 20  # of a file of a run that is read whole
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


@dataclass(slots=True, eq=False)
class RunDir:
    """A run's facts, and its folder. Methods raise OSError, with path and free bytes, if the disk is full.

    `save_manifest` is called when the run begins, when its plan is sealed (before its first request, and once
    more after a warm-up), when the load ends or the run fails, and when all else has ended.
    """

    path: Path
    manifest: Manifest
    telemetry_table: pa.Table | None = None
    forecast: "Forecast | NoForecast | None" = None

    @classmethod
    def create(cls, parent: Path, manifest: Manifest) -> Self:
        """A new folder `<utc>-<engine>-<workload>-<8 hex>` whose manifest says "running".

        Until it has one the folder is called `*.partial`: a run that is killed here leaves no folder without.
        The manifest's `clock` is the one reading of the wall clock: the same instant on both clocks.
        """
        wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()  # noqa: TID251
        utc = datetime.fromtimestamp(wall_ns / 1e9, UTC)
        words = f"{_slug(manifest.engine)}-{_slug(manifest.workload)}"
        run = cls(parent / f"{utc:%Y%m%dT%H%M%SZ}-{words}-{secrets.token_hex(4)}", manifest)
        clock = RunClock(wall_ns, monotonic_ns, utc.isoformat())
        run.note(replace(manifest, status="running", pid=os.getpid(), clock=clock))
        with disk_errors(run.path), renamed(run.path) as partial:
            partial.mkdir(parents=True)
            write_json(partial / _MANIFEST, run.manifest.to_json())
        return run

    def note(self, manifest: Manifest) -> None:
        """Keep the manifest in memory, without secrets: a report shows what the folder will hold."""
        self.manifest = Manifest.from_json(without_secrets(manifest.to_json()))

    def save_manifest(self, manifest: Manifest | None = None) -> None:
        """Write all that was noted, and `manifest`, if there is one."""
        self.note(manifest or self.manifest)
        write_json(self.path / _MANIFEST, self.manifest.to_json())

    @property
    def captures(self) -> Path:
        return self.path / "captures"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def save_plan(self, plan: Plan) -> None:
        self.save("plan.parquet", plan_tables(plan))
        pa.default_memory_pool().release_unused()  # 20 MB that the load would find taken

    def save(self, name: str, parts: Iterable[pa.Table]) -> None:
        """Write one of the tables: `records.parquet`, `counts.parquet`, `steps.parquet` and so on."""
        with disk_errors(self.path / name), renamed(self.path / name) as partial:
            parts = iter(parts)
            first = next(parts)
            with pq.ParquetWriter(partial, first.schema, compression="zstd") as writer:
                writer.write_table(first)
                for part in parts:
                    writer.write_table(part)


def read_manifest(run: Path) -> Manifest:
    """The manifest in a run's folder, every type checked; WorkloadError, in one line, where one is wrong."""
    path = run / _MANIFEST
    if not path.is_file():
        raise not_a_run(run, f"it has no {_MANIFEST}") if run.exists() else not_a_run(run)
    row = json_of(path)
    said = row if isinstance(row, dict) else {}
    if (schema := said.get("schema")) != SCHEMA:
        raise WorkloadError(
            f"{path} has schema {schema}, this version reads only schema {SCHEMA}: use the version that "
            f"wrote it ({said.get('version') or 'not named'}), or run it again"
        )
    try:
        return Manifest.from_json(row)
    except MismatchError as error:
        raise WorkloadError(f"{path}: {error}; was it edited, or written by another version?") from None


def json_of(path: Path) -> Any:
    try:
        return orjson.loads(read_small(path, MOST_BYTES, "what `burstline` wrote"))
    except (ValueError, OSError) as error:
        raise WorkloadError(f"{path} is not JSON ({error}); was it cut or changed?") from error


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower() or "run"
