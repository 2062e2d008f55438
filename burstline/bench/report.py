"""A run's summary, page and headline from its own files."""

from __future__ import annotations

from dataclasses import replace

from burstline.loadgen.record.rundir import RunDir, open_run
from burstline.loadgen.record.summary import Summary
from burstline.loadgen.record.tables import keep_pandas_out
from burstline.loadgen.summarize import summarize_run
from burstline.machine.efficiency import beside_others, reconciled, suspect
from burstline.reports.formats.text import text
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.digest import headline
from burstline.reports.page.page import render


def write_report(run: RunDir) -> Summary:
    """The summary, and the page, from the run's own files; the same files give the same bytes."""
    keep_pandas_out()
    opened = open_run(run.path)
    roofline = reconciled(opened)
    summary = summarize_run(opened, not_comparable=suspect(roofline))
    summary = replace(summary, roofline=beside_others(roofline, summary.instrument))
    run.save_summary(summary)
    page = open_run(run.path)  # with the summary that was just written
    page.columns = opened.columns
    run.save_report(render(alone(view_of(page))))
    return summary


def headline_of(run: RunDir) -> str:
    """How it went, in a few lines."""
    return text(headline(view_of(open_run(run.path))))
