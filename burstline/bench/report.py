"""What follows a load: records, summary, page, headline and exit code, from the run's own files."""

from __future__ import annotations

from dataclasses import replace

from burstline import exit_codes
from burstline.bench.noise import known_for
from burstline.loadgen.metrics.slo import state_decides
from burstline.loadgen.record.decode import decode_run
from burstline.loadgen.record.manifest import Status
from burstline.loadgen.record.rundir import RunDir, open_run
from burstline.loadgen.record.summary import Summary
from burstline.loadgen.record.tables import keep_pandas_out
from burstline.loadgen.summarize import summarize_run
from burstline.machine.efficiency import beside_others, reconciled, suspect
from burstline.machine.hardware import note_hardware
from burstline.machine.hints import Hints
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.digest import headline
from burstline.reports.page.page import render
from burstline.servers.engine import Engine
from burstline.terminal import show


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


def note_facts(run: RunDir, hints: Hints) -> None:
    """What the load ran on, and how far runs of this system are known to differ."""
    note_hardware(run, hints)
    run.save_manifest(replace(run.manifest, noise=known_for(run.manifest)))


def conclude(run: RunDir, engine: Engine, status: Status) -> Summary:
    """Give the run its status, then decode the captures and write records, summary and page.

    In this order: how the load ended is known, and all that follows can be made again from the captures.
    """
    run.save_manifest(replace(run.manifest, status=status))
    run.save_records(decode_run(run.path, engine.decode))
    return write_report(run)


def said(run: RunDir, summary: Summary) -> int:
    """Say in a few lines how it went and where the page is; the exit code of a run that came to its end."""
    show(headline(view_of(open_run(run.path))))
    print(f"Report: {run.report}")
    return of_summary(summary)


def of_summary(summary: Summary) -> int:
    """The exit code of a run that ended."""
    state = exit_codes.INCONCLUSIVE if state_decides(summary) else exit_codes.DONE
    return exit_codes.worst([exit_codes.of_results(target.result for target in summary.targets), state])
