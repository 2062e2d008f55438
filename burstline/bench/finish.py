"""From captures to the page: decode, summarise, report. Everything here can be done again from the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from burstline.machine.roofline_input import beside_others, reconciled, suspect
from loadgen.driver.job import DriveReport
from loadgen.metrics.summary import summarize_run
from loadgen.metrics.summary_types import Summary
from loadgen.record.arrow import keep_pandas_out
from loadgen.record.decode import decode_run
from loadgen.record.manifest import Status
from loadgen.record.rundir import RunDir, open_run
from reports.page.page import render
from servers.engine import Engine


def conclude(run: RunDir, engine: Engine, status: Status, reports: Sequence[DriveReport]) -> Summary:
    """Give the run its status, then decode the captures and write records, summary and page.

    In this order: how the load ended is known, and all that follows can be made again from the captures.
    """
    run.save_manifest(replace(run.manifest, drivers=tuple(reports), status=status))
    run.save_records(decode_run(run.path, engine.decode))
    return write_report(run)


def write_report(run: RunDir) -> Summary:
    """The summary, and the page, from the run's own files; the same files give the same bytes."""
    keep_pandas_out()
    opened = open_run(run.path)
    roofline = reconciled(opened)
    summary = summarize_run(opened, not_comparable=suspect(roofline))
    summary = replace(summary, roofline=beside_others(roofline, summary.instrument))
    run.save_summary(summary)
    run.save_report(render(open_run(run.path)))
    return summary
