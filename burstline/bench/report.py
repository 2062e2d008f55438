"""A run's summary and page from its own files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from burstline.lean import import_lean
from burstline.parallel import share
from loadgen.record.rundir import RunDir, open_run

if TYPE_CHECKING:
    from loadgen.record.summary import Summary

MOST_EVENTS_SHARED: Final = 1 << 24
"""Figures of more events are drawn one by one: each process that draws needs memory for its sums."""


def write_report(run: RunDir) -> Summary:
    """The summary, and the page, from the run's own files; the same files give the same bytes."""
    import_lean()
    from burstline.machine.efficiency import beside_others, reconciled, suspect
    from loadgen.summarize import summarize_run
    from reports.page.page import one_by_one, render

    opened = open_run(run.path)
    roofline = reconciled(opened)
    summary = summarize_run(opened, not_comparable=suspect(roofline))
    summary = replace(summary, roofline=beside_others(roofline, summary.instrument))
    run.save_summary(summary)
    page = open_run(run.path)  # with the summary that was just written
    page.columns = opened.columns
    is_small = len(opened.columns.event_s) <= MOST_EVENTS_SHARED
    run.save_report(render(page, share if is_small else one_by_one))
    return summary
