"""A run or a comparison in short, as blocks: what the terminal and a pull request show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from burstline.loadgen.record.record import OUTCOME_WORDS
from burstline.loadgen.record.summary import Section, Summary
from burstline.loadgen.stats.figure import Estimate
from burstline.reports.blocks import Banner, Block, Command, Findings, Heading, Note, table
from burstline.reports.model.comparison import LATENCIES, Case, Comparison, View, alone
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.number_format import counted, duration, with_interval
from burstline.reports.page.answer import answer
from burstline.reports.page.banner import banner, case_banner, run_banner
from burstline.reports.page.estimate_tables import group_table, latency_table, session_tables
from burstline.reports.page.side_by_side import findings, side_by_side, spread_table
from burstline.reports.page.sweep_words import all_loads, findings_of, remarks
from burstline.reports.sentences import say
from burstline.roofline.reconcile.reconciliation import NotReconciled

TOTALS = (
    ("throughput", "output_tok_per_s"),
    ("throughput", "requests_per_s"),
    ("burst", "drain_s"),
    ("memory", "server_peak_bytes"),
    ("memory", "device_peak_bytes"),
)


def headline(view: View) -> list[Block]:
    """What a terminal shows at the end of a run: the answer, the verdict and SLOs, the percentiles."""
    summary = view.summary
    return [answer(alone(view)), run_banner(summary), *_numbers(summary), _outcomes(summary)]


def overview(view: View) -> list[Block]:
    """The verdict, every headline number with its interval, memory, outcomes."""
    summary = view.summary
    groups: tuple[tuple[str, Section], ...] = (
        ("Throughput", summary.throughput),
        ("Memory", summary.memory),
        ("Burst", summary.burst),
        ("Instrument", summary.instrument),
    )
    return [
        Heading(view.name),
        answer(alone(view)),
        run_banner(summary),
        *_numbers(summary),
        *_hardware(summary),
        *_start(view),
        *(group_table(caption, section) for caption, section in groups),
        _outcomes(summary),
    ]


def digest(comparison: Comparison) -> list[Block]:
    """What a pull request shows, and of several runs the terminal too."""
    if comparison.run is not None:
        return _of_run(comparison, comparison.run)
    blocks: list[Block] = [Heading(comparison.title), answer(comparison)]
    swept = sweeps_in(comparison.cases)
    for sweep, _ in swept:
        blocks += [Findings((*findings_of(sweep), *remarks(sweep))), all_loads(sweep, {})]
    in_a_sweep = [case for _, cases in swept for case in cases]
    for case in comparison.cases:
        # All that a lone contender's case holds is in its sweep.
        if case not in in_a_sweep or not case.is_alone:
            blocks += _of_case(case)
    return [*blocks, *(Note(say("missing", what=what)) for what in comparison.missing)]


def _of_run(comparison: Comparison, view: View) -> list[Block]:
    """The answer, verdict, SLOs, numbers, and the command that repeats the run."""
    summary, repeat = view.summary, view.manifest.repeat
    rows = [
        (row.title, with_interval(row.figure))
        for section, name in TOTALS
        for row in getattr(summary, section).rows()
        if row.name == name and isinstance(row.figure, Estimate)
    ]
    return [
        Heading(comparison.title, level=3),
        answer(comparison),
        banner(comparison),
        Note(" · ".join(comparison.facts)),
        *_numbers(summary),
        *([table("Whole run", ["Whole run", "Measured"], rows)] if rows else []),
        _outcomes(summary),
        *([Command("Reproduce this run", repeat)] if repeat else []),
    ]


def _of_case(case: Case) -> Iterator[Block]:
    """Its state and why, and its numbers; where it is refused without ratios and ranking."""
    yield case_banner(case)
    yield Findings(tuple(findings(case)))
    yield side_by_side(case)
    if (spread := spread_table(case)) is not None:
        yield spread


def verdict_line(summary: Summary) -> Banner:
    """The verdict alone, with its SLOs."""
    return replace(run_banner(summary), reasons=(), error="")


def _numbers(summary: Summary) -> Iterator[Block]:
    metrics: dict[str, Section] = {k: row for k, row in summary.metrics.items() if k in LATENCIES}
    if metrics:
        metrics["interactivity"] = summary.interactivity
        yield latency_table("", metrics, graded=summary.grades, evidence=False)
    if summary.sessions is not None:
        yield from session_tables(summary.sessions)


def _hardware(summary: Summary) -> Iterator[Block]:
    """How far the run is from its hardware, in one sentence."""
    found = summary.roofline
    if found is not None:
        yield Note(f"Hardware: {found.absent if isinstance(found, NotReconciled) else found.sentence}")


def _start(view: View) -> Iterator[Block]:
    server = view.manifest.server
    if server is not None and not server.attached and server.ready_s is not None:
        yield Note(f"Start-up: {server.ready_s:.1f} s from the start of the server until its first token.")


def _outcomes(summary: Summary) -> Block:
    counts = {name: n for name, n in summary.counts.items() if n and name != "planned"}
    planned = summary.counts.get("planned", sum(counts.values()))
    start, end = summary.window.start_s, summary.window.end_s
    over = ""
    if isinstance(start, Estimate) and isinstance(end, Estimate):
        over = f"; rates are those of {duration(end.point - start.point)}"
    return Note(
        f"Of {counted(planned, 'request')}: "
        + ", ".join(f"{n:,} {OUTCOME_WORDS.get(k, k)}" for k, n in counts.items())
        + over
    )
