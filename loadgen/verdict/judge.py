"""Whether a run can be used, in one word, with reasons and what to do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from burstline.loadgen.record.record import OUTCOME_WORDS, failed
from burstline.loadgen.record.verdict import Grade, Grades, Reason, State, Verdict, worst
from burstline.loadgen.stats.estimates import early_stopping_floor

HEADLINE: Final = tuple((metric, p) for metric in ("ttft", "tpot", "e2e") for p in ("p50", "p99"))
"""The percentiles that people read first: where the client spoils one of them, it spoils the run."""

BUSY: Final = 0.25
"""Of two cores half of one: a server there is slowed, though the instrument may not be."""
WAITING: Final = 0.1
"""The share of the run that the client may spend waiting for a CPU."""
THROTTLED: Final = 0.01


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on.

    `counts` are requests by outcome with `planned` and `ok`, `death` says that the server died, `cause` is
    the error of the first request that failed in the most frequent way. `grades` are how far the client
    moved each percentile at most, `decisive` those that people read first and those with an SLO;
    `canary_beyond_s` is how far the canary's truth lay outside the client's own bounds, for which these
    grades allow (p99, None where it did not say). Shares are of the run's time or the machine's CPU, None
    where unknown: `waited_fraction` the client waited for a CPU, `throttled_fraction` its CPU quota stopped
    it, `others_cpu_fraction` what neither client nor server used; `server_here` says that the server ran on
    this machine and is none of those. `max_failures` is the share of planned requests that may fail.
    `contradictions` are laws between the figures that do not hold: then none of them can be used.
    """

    counts: Mapping[str, int]
    grades: Grades = field(default_factory=dict)
    decisive: Collection[tuple[str, str]] = HEADLINE
    cause: str = ""
    death: str = ""
    canary_beyond_s: float | None = None
    waited_fraction: float | None = None
    throttled_fraction: float | None = None
    others_cpu_fraction: float | None = None
    server_here: bool = False
    max_failures: float = 0.01
    status: str = "complete"
    not_comparable: tuple[Reason, ...] = ()
    not_stationary: tuple[Reason, ...] = ()
    cold: tuple[Reason, ...] = ()
    contradictions: tuple[Reason, ...] = ()


def judge(evidence: Evidence, warnings: tuple[Reason, ...] = ()) -> Verdict:
    """The verdict: the worst state that has a reason, then the reasons of the others."""
    client, disturbed = _client_bound(evidence), _disturbed(evidence)
    if disturbed:  # then the machine is also why the client read late
        disturbed += [reason for reason in client if reason.code == "read-lag"]
        client = [reason for reason in client if reason.code != "read-lag"]
    reasons = {
        State.FAILED: [*_failed(evidence), *evidence.contradictions],
        State.CLIENT_BOUND: client,
        State.DISTURBED: disturbed,
        State.NOT_STATIONARY: list(evidence.not_stationary),
        State.NOT_COMPARABLE: list(evidence.not_comparable),
        State.COLD: list(evidence.cold),
    }
    state = worst(state for state, found in reasons.items() if found)
    return Verdict(state, tuple(reason for state in State for reason in reasons.get(state, ())), warnings)


def _failed(evidence: Evidence) -> list[Reason]:
    """Nothing or too little was served, because requests failed."""
    counts = evidence.counts
    ok, planned = counts["ok"], counts["planned"]
    few = ok < early_stopping_floor(0.5)
    failures = failed(counts)
    n_failed = sum(failures.values())
    if evidence.status == "interrupted" and not few:  # judged by what had ended
        failures = failed(counts, interrupted=True)
        planned -= n_failed - sum(failures.values())
        n_failed = sum(failures.values())
    if evidence.death:
        text = f"{evidence.death.rstrip('.')}. {ok:,} of {counts['planned']:,} requests had succeeded."
        return [Reason("died", text, "Read the server's log; lower the load, or raise its memory limits.")]
    if (ok and not n_failed) or (not few and n_failed <= evidence.max_failures * planned) or not planned:
        return (
            []
            if planned
            else [Reason("no-request", "The plan has no requests.", "Set --requests or --duration-s.")]
        )
    kinds = (
        ", ".join(f"{n:,} {OUTCOME_WORDS.get(kind, kind)}" for kind, n in failures.items())
        or f"{planned - ok:,} abandoned"
    )
    cause = f" The first error: {evidence.cause.rstrip('.')}." if evidence.cause else ""
    if not ok:
        text = f"None of {planned:,} requests succeeded: {kinds}.{cause}"
        return [Reason("no-success", text, "See the first failure below and the server's log.")]
    if few:
        text = f"Only {ok:,} of {planned:,} requests succeeded: {kinds}.{cause}"
        advice = "See the first failure below; lower the load or raise the server's limits."
        return [Reason("mostly-failed", text, advice)]
    share, most = 100 * n_failed / planned, 100 * evidence.max_failures
    text = f"{n_failed:,} of {planned:,} requests failed ({share:.3g}%): {kinds}"
    text = f"{text}; at most {most:.3g}% may.{cause}"
    advice = "See the first failure below; lower the load, or allow more with --max-failures."
    return [Reason("too-many-failures", text, advice)]


def _client_bound(evidence: Evidence) -> list[Reason]:
    """A decisive percentile is unreliable: by late reads, by wrong time stamps, or for all that is known."""
    unreliable = [
        (math.inf if each.read_effect_s is None else each.read_effect_s, f"{metric.upper()} {p}")
        for metric, row in evidence.grades.items()
        for p, each in row.items()
        if (metric, p) in evidence.decisive and each.grade == Grade.UNRELIABLE
    ]
    if not unreliable:
        return []
    effect_s, name = max(unreliable)
    names = ", ".join(each for _, each in sorted(unreliable, reverse=True))
    beyond_s = evidence.canary_beyond_s
    if math.isinf(effect_s):
        text = "How late the client read some replies is not known"
        if beyond_s is None:
            text = f"{text}, and no canary says how late it is on this machine"
        return [Reason("read-unknown", f"{text}. Unreliable: {names}.", "Run it again, for longer.")]
    moved = f"may have moved {name} by {effect_s * 1e3:.3g} ms. Unreliable: {names}."
    if beyond_s and beyond_s > effect_s / 2:
        text = (
            f"The canary's events were {beyond_s * 1e3:.3g} ms outside the client's own bounds, which {moved}"
        )
        advice = "Do not use these times: the client's time stamps are wrong on this machine."
        return [Reason("instrument-error", text, advice)]
    advice = "Run the client on a separate machine, or on more CPUs."
    return [Reason("read-lag", f"Late reading {moved}", advice)]


def _disturbed(evidence: Evidence) -> list[Reason]:
    """Others took CPU time that client or server needed."""
    reasons = []
    advice = "Stop other work on this machine and run again; comparisons need --anyway."
    others, waited, throttled = (
        evidence.others_cpu_fraction,
        evidence.waited_fraction,
        evidence.throttled_fraction,
    )
    if evidence.server_here and others is not None and others > BUSY:
        text = f"Processes that are neither client nor server used {others:.0%} of this machine's CPU."
        reasons.append(Reason("busy-machine", text, advice))
    if waited is not None and waited > WAITING:
        text = f"The client waited for a CPU {waited:.0%} of the time."
        reasons.append(Reason("cpu-wait", text, advice))
    if throttled is not None and throttled > THROTTLED:
        text = f"A CPU quota stopped the client {throttled:.1%} of the time."
        reasons.append(Reason("throttled", text, "Lift the client's CPU quota; comparisons need --anyway."))
    return reasons
