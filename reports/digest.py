"""A run in short, as blocks: what the terminal and a pull request show."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.record.record import OUTCOME_WORDS
from loadgen.record.rundir import Run
from loadgen.record.summary import Section, Summary
from loadgen.stats.figure import Estimate
from reports.answer import answer
from reports.banner import banner, facts, title
from reports.blocks import Banner, Block, Command, Heading, Note
from reports.estimate_tables import HEADLINE, group_table, latency_table, session_tables
from reports.number_format import counted, with_interval
from reports.run_view import View, summary_of, view_of
from reports.tables import table
from roofline.reconcile.reconciliation import NotReconciled

TOTALS = (
    ("throughput", "output_tok_per_s"),
    ("throughput", "requests_per_s"),
    ("burst", "drain_s"),
    ("memory", "server_peak_bytes"),
    ("memory", "device_peak_bytes"),
)


def headline(run: Run) -> list[Block]:
    """What was served and how fast, the percentiles, the verdict."""
    summary = summary_of(run)
    return [
        answer(summary, run.manifest, lambda: view_of(run)),
        *_latencies(summary),
        *_sessions(summary),
        _outcomes(summary),
        banner(summary),
    ]


def overview(run: Run) -> list[Block]:
    """The verdict, every headline number with its interval, memory, outcomes."""
    summary = summary_of(run)
    groups: tuple[tuple[str, Section], ...] = (
        ("Throughput", summary.throughput),
        ("Memory", summary.memory),
        ("Burst", summary.burst),
        ("Instrument", summary.instrument),
    )
    return [
        Heading(run.name),
        answer(summary, run.manifest, lambda: view_of(run)),
        banner(summary),
        *_latencies(summary),
        *_sessions(summary),
        *_hardware(summary),
        *_start(run),
        *(group_table(caption, section) for caption, section in groups),
        _outcomes(summary),
    ]


def pull_request(view: View) -> list[Block]:
    """The answer, verdict, SLOs, numbers, and the command that repeats the run."""
    summary, repeat = view.summary, view.manifest.repeat
    figures = [(name, summary.figure(section, name), section) for section, name in TOTALS]
    rows = [
        (row.title, with_interval(row.figure))
        for name, figure, section in figures
        if isinstance(figure, Estimate)
        for row in getattr(summary, section).rows()
        if row.name == name
    ]
    return [
        Heading(title(view), level=3),
        answer(summary, view.manifest, lambda: view),
        banner(summary),
        Note(" · ".join(facts(view))),
        *_latencies(summary),
        *_sessions(summary),
        *([table("Whole run", ["Whole run", "Measured"], rows)] if rows else []),
        _outcomes(summary),
        *([Command("Reproduce this run", repeat)] if repeat else []),
    ]


def verdict_line(summary: Summary) -> Banner:
    """The verdict alone, with its SLOs."""
    whole = banner(summary)
    return Banner(whole.state, whole.tone, whole.mark, whole.sentence, (), targets=whole.targets)


def _latencies(summary: Summary) -> Iterator[Block]:
    metrics = {key: row for key, row in summary.metrics.items() if key in HEADLINE}
    if metrics:
        yield latency_table("", metrics, evidence=False)


def _sessions(summary: Summary) -> Iterator[Block]:
    if summary.sessions is not None:
        yield from session_tables(summary.sessions)


def _hardware(summary: Summary) -> Iterator[Block]:
    """How far the run is from its hardware, in one sentence."""
    found = summary.roofline
    if found is not None:
        yield Note(f"Hardware: {found.absent if isinstance(found, NotReconciled) else found.sentence}")


def _start(run: Run) -> Iterator[Block]:
    server = run.manifest.server
    if server is not None and not server.attached and server.ready_s is not None:
        yield Note(f"Start-up: {server.ready_s:.1f} s from the start of the server until its first token.")


def _outcomes(summary: Summary) -> Block:
    counts = {name: n for name, n in summary.counts.items() if n and name != "planned"}
    planned = summary.counts.get("planned", sum(counts.values()))
    return Note(
        f"Of {counted(planned, 'request')}: "
        + ", ".join(f"{n:,} {OUTCOME_WORDS.get(k, k)}" for k, n in counts.items())
    )
