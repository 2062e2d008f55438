"""The top of a page: what was measured, and what its verdict is called."""

from __future__ import annotations

from datetime import UTC, datetime

from loadgen.record.summary import Instrument, Summary
from loadgen.record.verdict import Result, State
from loadgen.stats.figure import Absent, Estimate
from loadgen.verdict.comparable import ALONE, COMPARABLE
from reports.blocks import Banner
from reports.number_format import duration
from reports.run_view import View
from reports.slo_lines import target_lines
from servers.identity import Identity
from servers.registry import ENGINES

STATES: dict[str, tuple[str, str, str]] = {
    "VALID": ("good", "✓", "Every check passed: these numbers can be used."),
    "FAILED": (
        "bad",
        "✕",
        "Nothing was served, or too many requests failed: do not use these numbers.",
    ),
    "CLIENT-BOUND": ("bad", "✕", "The client read too late: do not use the metrics graded unreliable."),
    "DISTURBED": ("warn", "!", "Other work on this machine took CPU time from the client or the server."),
    "NOT-STATIONARY": (
        "warn",
        "!",
        "The server did not reach steady state: these numbers depend on the run's length.",
    ),
    "NOT-COMPARABLE": ("warn", "!", "The server did other work than asked: do not compare these numbers."),
    "COLD": ("warn", "!", "The first requests were slower than the rest, and the figures count them."),
}
"""A verdict's tone, its mark and what it means."""


FAILED_BY = {
    "died": "The server died: do not use these numbers.",
    "no-request": "The plan has no requests.",
    "no-success": "Nothing was served.",
    "mostly-failed": "Too many requests failed: do not use these numbers.",
    "too-many-failures": "Too many requests failed: do not use these numbers.",
}
"""What FAILED means, by the code of its first reason."""


INTERRUPTED = "The run was interrupted: these numbers describe its first part, which passed every check."


FAILURES = frozenset({"too-many-failures", "mostly-failed", "no-success"})
"""Reasons that count the failed requests: a warning that does so too says nothing more."""


def title(view: View) -> str:
    """Engine and workload, in the words of those who know them."""
    manifest = view.manifest
    engine = ENGINES[manifest.engine].title if manifest.engine in ENGINES else manifest.engine
    return f"{engine}: {manifest.title or manifest.workload or view.name}"


def facts(view: View) -> list[str]:
    """Who was measured, with what, when: short phrases, those that are known."""
    return [fact for fact in facts_by_name(view).values() if fact]


def facts_by_name(view: View) -> dict[str, str]:
    """The same, each under its name; "" where it is not known."""
    manifest = view.manifest
    identity = manifest.identity or Identity(manifest.engine)
    devices = [device.name for device in manifest.devices]
    utc = manifest.clock.utc if manifest.clock else ""
    at = datetime.fromisoformat(utc).astimezone(UTC) if utc else None
    many = " + ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices))
    return {
        "engine": f"{identity.engine} {identity.version}" if identity.version else "",
        "model": identity.model or (manifest.server.model if manifest.server else None) or "",
        "dtype": identity.dtype or "",
        "devices": many or manifest.host.cpu or "",
        "date": f"{at:%d %B %Y, %H:%M} UTC" if at else "",
        "status": "" if view.status == "complete" else f"the run was {view.status}",
    }


def banner(summary: Summary) -> Banner:
    """The verdict for the top of the page."""
    verdict = summary.verdict
    tone, mark, sentence = STATES[verdict.state]
    refused = {reason.code for reason in verdict.reasons}
    reasons = (
        *verdict.reasons,
        *(w for w in verdict.warnings if not (w.code == "failures" and refused & FAILURES)),
    )
    state: str = verdict.state
    if verdict.state == State.FAILED:
        sentence = next((FAILED_BY[r.code] for r in verdict.reasons if r.code in FAILED_BY), sentence)
    if verdict.state == State.VALID and any(reason.code == "interrupted" for reason in reasons):
        state, tone, mark, sentence = "INTERRUPTED", "warn", "!", INTERRUPTED
        reasons = tuple(reason for reason in reasons if reason.code != "interrupted")
    elif verdict.state == State.VALID and any(t.result != Result.PASS for t in summary.targets):
        tone, sentence = "warn", f"These numbers can be used. SLOs: {_slo_results(summary)}."
    error = _instrument_error(summary.instrument)
    return Banner(state, tone, mark, sentence, reasons, error, target_lines(summary))


SWEEP = "SWEEP"


SENTENCES = {
    SWEEP: ("good", "✓", "One system at several loads: throughput against latency."),
    COMPARABLE: (
        "good",
        "✓",
        "The engines did the same work under the same settings: the numbers compare.",
    ),
    ALONE: ("warn", "!", "Only one system: its runs are shown, nothing is compared."),
    State.NOT_COMPARABLE: ("bad", "✕", "These runs did different work: they are not ranked."),
}


def tone_of(state: str) -> tuple[str, str, str]:
    """Tone, mark and sentence of a comparison's state."""
    return SENTENCES.get(state) or STATES.get(state, ("warn", "!", "See the reasons."))


def _slo_results(summary: Summary) -> str:
    """`1 met, 2 missed`."""
    words = {Result.PASS: "met", Result.FAIL: "missed", Result.INCONCLUSIVE: "inconclusive"}
    results = [target.result for target in summary.targets]
    return ", ".join(f"{results.count(r)} {word}" for r, word in words.items() if r in results)


def _instrument_error(instrument: Instrument) -> str:
    """How late the client was, in a sentence; "" where it is not known."""
    late, error = instrument.send_lag_p99_s, instrument.read_error_p99_s
    if isinstance(late, Absent) or isinstance(error, Absent):
        return ""
    sent = f"99% of requests were sent at most {duration(late.point)} late"
    stamped = "99% of arrivals carry the kernel's time stamp, so late reading does not move them"
    read = f"99% of arrival times are exact to {duration(error.point)}" if error.point > 0 else stamped
    told = f"The instrument: {sent}; {read}."
    return f"{told}{_canary(instrument)}{_network(instrument)}"


def _canary(instrument: Instrument) -> str:
    """How this run's canary checked these bounds, in a sentence; "" where there was no canary."""
    p99, beyond = instrument.canary_p99_s, instrument.canary_beyond_p99_s
    if isinstance(p99, Absent) or isinstance(beyond, Absent):
        too_short = isinstance(p99, Absent) and p99.code == "too-short"
        return " The canary did not check these bounds: the run was too short." if too_short else ""
    within = "within these bounds" if not beyond.point else f"at most {duration(beyond.point)} outside them"
    return (
        f" The canary, a process that streamed {p99.n:,} events with their true times meanwhile, checked "
        f"this: 99% came {within}, and at most {duration(p99.point)} from their true times."
    )


def _network(instrument: Instrument) -> str:
    """What the network holds of every TTFT, in a sentence; "" where the server is on this host."""
    rtt, again = instrument.network_rtt_s, instrument.network_retransmits
    if not isinstance(rtt, Estimate) or not isinstance(again, Estimate):
        return ""
    lost = f"; {again.point:,.0f} TCP segments were sent again" if again.point else ""
    return f" The network's share of each TTFT is {duration(rtt.point)}, one round trip by TCP{lost}."
