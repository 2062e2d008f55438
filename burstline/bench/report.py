"""A run's summary and page from its own files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from burstline.lean import import_lean
from loadgen.record.rundir import RunDir, open_run

if TYPE_CHECKING:
    from loadgen.record.summary import Summary


def write_report(run: RunDir) -> Summary:
    """The summary, and the page, from the run's own files; the same files give the same bytes."""
    import_lean()
    from burstline.machine.efficiency import beside_others, reconciled, suspect
    from loadgen.summarize import summarize_run
    from reports.model.comparison import alone, view_of
    from reports.page.page import render

    opened = open_run(run.path)
    roofline = reconciled(opened)
    summary = summarize_run(opened, not_comparable=suspect(roofline))
    summary = replace(summary, roofline=beside_others(roofline, summary.instrument))
    run.save_summary(summary)
    page = open_run(run.path)  # with the summary that was just written
    page.columns = opened.columns
    run.save_report(render(alone(view_of(page))))
    return summary
