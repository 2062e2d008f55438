"""A run made ready to be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from loadgen.columns import Columns, Floats, columns_of
from loadgen.metrics import METRICS, latencies
from loadgen.rundir import Run
from loadgen.summary import summarize_run


@dataclass(frozen=True, slots=True)
class View:
    """What every section reads: `summary` is made where none was written, `telemetry` may have no rows."""

    name: str
    status: str
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: pd.DataFrame
    telemetry: pd.DataFrame
    columns: Columns

    def latency(self, metric: str) -> Floats:
        """One value per record in seconds: +inf where it failed, NaN where it is undefined."""
        return latencies(METRICS[metric], self.columns)

    @property
    def server(self) -> Mapping[str, Any]:
        """What the manifest knows of the server: url, argv, identity and so on; {} where nothing."""
        return self.manifest.get("server") or {}


def summary_of(run: Run) -> Mapping[str, Any]:
    """The summary on disk; for a run that ended before one was written, what its files give."""
    return run.summary if run.summary is not None else summarize_run(run)


def view_of(run: Run) -> View:
    telemetry = run.telemetry
    if telemetry is None:
        telemetry = pd.DataFrame({"at_ns": [], "source": [], "name": [], "value": []})
    return View(
        name=run.name,
        status=run.status,
        manifest=run.manifest,
        summary=summary_of(run),
        records=run.records,
        telemetry=telemetry,
        columns=columns_of(run.record_table),
    )
