"""A run made ready to be shown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from loadgen.metrics.definitions import METRICS, latencies
from loadgen.record.columns import Columns, Floats
from loadgen.record.manifest import Manifest
from loadgen.record.rundir import Run
from loadgen.record.summary import Summary
from loadgen.record.telemetry import Telemetry
from loadgen.stats.figure import Absent
from loadgen.summarize import summarize_run
from reports.estimate_tables import HEADLINE, QUANTILES, is_per_request, nearest
from reports.figures.series import sending_order
from reports.request_sample import Shown, shown_of
from servers.redact import words_of_server
from servers.registry import ENGINES

LOG_LINES = 12
"""How many of the last lines of the server's log a page may show."""


@dataclass(frozen=True, eq=False)
class View:
    """What every section reads: `summary` is made where none was written, `telemetry` may have no rows.

    `log_tail` are the last lines of the server's log, empty where Burstline did not start it; `log_cause` is
    the line of it that says why nothing was served, where the engine's adapter finds one.
    """

    name: str
    status: str
    manifest: Manifest
    summary: Summary
    telemetry: Telemetry
    columns: Columns
    log_tail: tuple[str, ...] = ()
    log_cause: str | None = None

    @property
    def has_served(self) -> bool:
        """Whether any request succeeded."""
        return bool(self.columns.ok.any())

    def words(self, column: str) -> list[str | None]:
        """A column of text of the records, one entry per request."""
        found: list[str | None] = self.columns.table.column(column).to_pylist()
        return found

    def latency(self, metric: str) -> Floats:
        """One value per record in seconds: +inf where it failed, NaN where it is undefined."""
        return latencies(METRICS[metric], self.columns)

    def counted(self, metric: str) -> Floats:
        """The same, NaN too for what was due in the warm-up: what the summary's numbers are made of."""
        due_s = self.columns.due_s
        return np.where(due_s < self.warm_up_end_s, np.nan, self.latency(metric)) if len(due_s) else due_s

    @cached_property
    def shown(self) -> Shown:
        """Which requests the page shows one by one."""
        slowest = np.argsort(-np.nan_to_num(self.latency("e2e"), nan=-1.0), kind="stable")
        _, first_of_each_kind = np.unique(np.array(self.words("outcome"), dtype=str), return_index=True)
        at_quantiles = (
            nearest(self.counted(key), p)
            for key in HEADLINE
            if is_per_request(key)
            for p in QUANTILES.values()
        )
        named = [*first_of_each_kind.tolist(), *chain.from_iterable(at_quantiles)]
        return shown_of(sending_order(self.columns), slowest, named)

    @property
    def warm_up_end_s(self) -> float:
        """From when requests count, seconds from the run's start; 0 where all do."""
        window = self.summary.window
        n, start = window.n_warm_up, window.start_s
        if isinstance(n, Absent) or isinstance(start, Absent) or not n.point:
            return 0.0
        return start.point


def summary_of(run: Run) -> Summary:
    """The summary on disk; for a run that ended before one was written, what its files give."""
    return run.summary if run.summary is not None else summarize_run(run)


def _log_cause(run: Run) -> str | None:
    engine = ENGINES.get(run.manifest.engine)
    cause = engine.root_cause(run.server_log) if engine else None
    return words_of_server(cause, 300) if cause else None


def view_of(run: Run) -> View:
    summary = summary_of(run)
    return View(
        name=run.name,
        status=run.status,
        manifest=run.manifest,
        summary=summary,
        telemetry=run.watched,
        columns=run.columns,
        log_tail=tuple(run.server_log.splitlines()[-LOG_LINES:]),
        log_cause=_log_cause(run) if not summary.counts.get("ok") else None,
    )
