"""The top of a page: what its verdict is called, why, and what came of the SLOs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from burstline.loadgen.record.summary import Goodput, Instrument, Summary
from burstline.loadgen.record.verdict import Reason, Result, State
from burstline.loadgen.stats.figure import Absent, Estimate
from burstline.loadgen.verdict.comparable import ALONE, COMPARABLE
from burstline.reports.blocks import MARKS, Banner, TargetLine
from burstline.reports.model.comparison import Case, Comparison
from burstline.reports.number_format import count, duration, error, number, with_interval
from burstline.reports.sentences import COMPARED, INTERRUPTED, MEANT_BY, REPEATS, STATES, SWEEP, say

FAILURES: Final = frozenset({"too-many-failures", "mostly-failed", "no-success"})
"""Reasons that count the failed requests: a warning that does so too says nothing more."""


def banner(comparison: Comparison) -> Banner:
    """The verdict for the top of the page."""
    return _of_cases(comparison) if comparison.run is None else run_banner(comparison.run.summary)


def run_banner(summary: Summary) -> Banner:
    """A run's verdict with its reasons, the instrument's error and its SLOs."""
    verdict = summary.verdict
    state: str = verdict.state
    refused = {reason.code for reason in verdict.reasons}
    warnings = (w for w in verdict.warnings if not (w.code == "failures" and refused & FAILURES))
    reasons = (*verdict.reasons, *warnings)
    if state == State.VALID and any(reason.code == "interrupted" for reason in reasons):
        state = INTERRUPTED
        reasons = tuple(reason for reason in reasons if reason.code != "interrupted")
    tone, mark, sentence = STATES[state]
    if state in (State.FAILED, State.CLIENT_BOUND):  # its own reason comes first
        sentence = next((MEANT_BY[r.code] for r in verdict.reasons if r.code in MEANT_BY), sentence)
    elif state == State.VALID and any(t.result != Result.PASS for t in summary.targets):
        tone, sentence = "warn", f"These numbers can be used. SLOs: {_slo_results(summary)}."
    return Banner(
        state, tone, mark, sentence, reasons, _instrument_error(summary.instrument), target_lines(summary)
    )


def case_banner(case: Case) -> Banner:
    """The state of one case, by its name."""
    reasons = (*case.gate.reasons, *case.gate.warnings)
    return _banner(_state(case), reasons, name=f"{case.name}: " if case.name else "")


def _state(case: Case) -> str:
    """The gate's; of one contender that ran several times that these are repeats."""
    return REPEATS if case.is_alone and len(case.views) > 1 else case.gate.state


def _banner(state: str, reasons: tuple[Reason, ...], name: str = "") -> Banner:
    """Not green where runs are used that are not valid (`--anyway`)."""
    tone, mark, sentence = COMPARED.get(state, ("warn", "!", "See the reasons."))
    if tone == "good" and any(reason.code == "verdict" for reason in reasons):
        tone, mark = "warn", "!"
    return Banner(state, tone, mark, sentence, reasons, name=name)


def _of_cases(comparison: Comparison) -> Banner:
    """The worst state of all cases, with the reasons of each."""
    cases = comparison.cases
    refused = [case.name for case in cases if not case.gate.comparable and not case.is_alone]
    # Where a contender is missing, the one that is left is no set of repeats, but alone.
    states = (case.gate.state if comparison.missing else _state(case) for case in cases)
    worst = max(states, key=_severity, default=ALONE)
    worst = SWEEP if worst in (ALONE, REPEATS) and comparison.comparable else worst
    reasons = tuple(
        replace(reason, text=f"{case.name}: {reason.text}") if len(cases) > 1 else reason
        for case in cases
        for reason in (*case.gate.reasons, *case.gate.warnings)
    )
    if 0 < len(refused) < len(cases):
        n, names = len(cases) - len(refused), "; ".join(refused)
        if not any(case.gate.comparable or len(case.contenders) > 1 for case in cases):
            state = f"{n} OF {len(cases)} LOADS USABLE"
            return Banner(state, "warn", "!", say("not-usable", names=names), reasons)
        return Banner(
            f"{n} OF {len(cases)} {COMPARABLE}", "warn", "!", say("not-ranked", names=names), reasons
        )
    return _banner(worst, reasons)


_ORDER: Final[tuple[str, ...]] = (
    State.NOT_COMPARABLE,
    *(state for state in State if state != State.NOT_COMPARABLE),
    ALONE,
    REPEATS,
)


def _severity(state: str) -> int:
    """The work that differs is worst: no repeated run would help."""
    return len(_ORDER) - _ORDER.index(state) if state in _ORDER else 0


def target_lines(summary: Summary) -> tuple[TargetLine, ...]:
    """Every target in the order asked, then the share of requests that met all criteria."""
    lines = tuple(
        TargetLine(
            MARKS[row.result],
            row.result,
            row.target,
            with_interval(row.measured),
            "" if row.result == "pass" else row.reason,
        )
        for row in summary.targets
    )
    return (*lines, *_goodput_line(summary.goodput))


def _goodput_line(goodput: Goodput) -> Iterator[TargetLine]:
    share, rate = goodput.attainment, goodput.requests_per_s
    if isinstance(share, Absent):
        return
    per_s = f", {with_interval(rate)}" if isinstance(rate, Estimate) else ""
    met = (
        f"met by {count(share.point * share.n)} of {share.n:,} requests ({number(share.point * 100)}%){per_s}"
    )
    yield TargetLine("→", "goodput", " and ".join(goodput.criteria), met, "")


def _slo_results(summary: Summary) -> str:
    """`1 met, 2 missed`."""
    words = {Result.PASS: "met", Result.FAIL: "missed", Result.INCONCLUSIVE: "inconclusive"}
    results = [target.result for target in summary.targets]
    return ", ".join(f"{results.count(r)} {word}" for r, word in words.items() if r in results)


def _instrument_error(instrument: Instrument) -> str:
    """How late the client was, in a sentence; "" where it is not known."""
    late, read_p99 = instrument.send_lag_p99_s, instrument.read_error_p99_s
    if isinstance(late, Absent) or isinstance(read_p99, Absent):
        return ""
    sent = f"99% of requests were sent at most {duration(late.point)} late"
    stamped = "99% of arrivals carry the kernel's time stamp, so late reading does not move them"
    read = f"99% of arrival times are exact to {error(read_p99.point)}" if read_p99.point > 0 else stamped
    return f"The instrument: {sent}; {read}.{_canary(instrument)}{_network(instrument)}"


def _canary(instrument: Instrument) -> str:
    """How this run's canary checked these bounds, in a sentence; "" where there was no canary."""
    p99, beyond = instrument.canary_p99_s, instrument.canary_beyond_p99_s
    if isinstance(p99, Absent) or isinstance(beyond, Absent):
        too_short = isinstance(p99, Absent) and p99.code == "too-short"
        return " The canary did not check these bounds: the run was too short." if too_short else ""
    within = "within these bounds" if not beyond.point else f"at most {error(beyond.point)} outside them"
    return (
        f" The canary, a process of this machine that streamed {p99.n:,} events with their true times "
        f"meanwhile, checked this: 99% came {within}, "
        f"and at most {error(p99.point)} from their true times."
    )


def _network(instrument: Instrument) -> str:
    """What the network holds of every TTFT, in a sentence; "" where the server is on this host."""
    rtt, again = instrument.network_rtt_s, instrument.network_retransmits
    if not isinstance(rtt, Estimate) or not isinstance(again, Estimate):
        return ""
    lost = f"; {again.point:,.0f} TCP segments were sent again" if again.point else ""
    return f" The network's share of each TTFT is {duration(rtt.point)}, one round trip by TCP{lost}."
