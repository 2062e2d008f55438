"""From captures to the page: decode, summarise, report. Everything here can be done again from the files.

What summary and page need is imported while child processes decode: that takes a second core as long.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from loadgen.driver.job import DriveReport
from loadgen.record.arrow import keep_pandas_out
from loadgen.record.decode import decode_run, stage_records
from loadgen.record.manifest import Status
from loadgen.record.rundir import RunDir, open_run
from servers.engine import Engine

if TYPE_CHECKING:
    from loadgen.metrics.summary_types import Summary


def conclude(run: RunDir, engine: Engine, status: Status, reports: Sequence[DriveReport]) -> Summary:
    """Give the run its status, then decode the captures and write records, summary and page.

    In this order: how the load ended is known, and all that follows can be made again from the captures.
    """
    run.save_manifest(replace(run.manifest, drivers=tuple(reports), status=status))
    run.save_records(decode_run(run.path, engine.decode, meanwhile=_import_report))
    handover = stage_records(run.path, engine.decode)
    if handover is not None:
        run.save_warm_up(handover)
    return write_report(run)


def _import_report() -> None:
    for name in ("burstline.machine.roofline_input", "loadgen.metrics.summary", "reports.page.page"):
        importlib.import_module(name)


def write_report(run: RunDir) -> Summary:
    """The summary, and the page, from the run's own files; the same files give the same bytes."""
    from burstline.machine.roofline_input import beside_others, reconciled, suspect
    from loadgen.metrics.summary import summarize_run
    from reports.page.page import render

    keep_pandas_out()
    opened = open_run(run.path)
    roofline = reconciled(opened)
    summary = summarize_run(opened, not_comparable=suspect(roofline))
    summary = replace(summary, roofline=beside_others(roofline, summary.instrument))
    run.save_summary(summary)
    run.save_report(render(open_run(run.path)))
    return summary
