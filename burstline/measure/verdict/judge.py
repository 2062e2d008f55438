"""The verdict of a run: one word, its reasons and what to do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from burstline.measure.record.manifest import Manifest, Status
from burstline.measure.record.record import CUT_OFF, OVERLOADED, Outcome, failed, in_words, lost_a_part
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import (
    MOST_SHARE,
    SLOW_CLIENT,
    Grade,
    Reason,
    State,
    Verdict,
    time_text,
    worst,
)
from burstline.measure.stats.estimates import Estimate, early_stopping_floor
from burstline.measure.stats.figure import known

HEADLINE: Final = tuple((metric, p) for metric in ("ttft", "tpot", "e2e") for p in ("p50", "p99"))
"""The percentiles that people read first: where the client spoils one of them, it spoils the run."""

BUSY: Final = 0.25
"""Of two cores half of one: a server there is slowed, though the instrument may not be."""
WAITING: Final = 0.1
"""The share of the run that the client may spend waiting for a CPU."""
THROTTLED: Final = 0.01
SLOWED: Final = 0.05
"""The share of the readings in which a GPU may be slow from heat: a passing moment moves no median."""


def judge(
    summary: Summary,
    manifest: Manifest,
    status: Status = "complete",
    *,
    decisive: Collection[tuple[str, str]] = HEADLINE,
    cause: str = "",
    others: Mapping[State, Sequence[Reason]] = MappingProxyType({}),
    warnings: tuple[Reason, ...] = (),
) -> Verdict:
    """The verdict: the worst state that has a reason, then the reasons of the others.

    `decisive` are the percentiles that people read first and those with an SLO, `cause` is the error of the
    first request that failed in the most frequent way, `others` are reasons of other checks by state.
    """
    client, disturbed = _client_bound(summary, decisive), _disturbed(summary, manifest)
    if disturbed:  # then the machine is also why the client was late
        disturbed += [reason for reason in client if reason.code in LATE]
        client = [reason for reason in client if reason.code not in LATE]
    failures = _failed(summary.counts, manifest, status, cause)
    own = {State.FAILED: failures, State.CLIENT_BOUND: client, State.DISTURBED: disturbed}
    found = [(state, each) for state in State for each in (*own.get(state, ()), *others.get(state, ()))]
    states = list(dict.fromkeys(state for state, _ in found))
    also = tuple(states[1:]) or None  # they stand in the order of State
    return Verdict(worst(states), tuple(reason for _, reason in found), warnings, also)


def _failed(counts: Mapping[str, int], manifest: Manifest, status: Status, cause: str) -> list[Reason]:
    """Nothing or too little was served, because requests failed."""
    ok, planned = counts["ok"], counts["planned"]
    if status == "failed" and manifest.error and counts.get(Outcome.NOT_SENT) == planned:
        what, _, hint = manifest.error.partition("\n")
        return [Reason("no-start", f"No request was sent: {what}.", hint)]
    if status == "failed" and manifest.error:
        text = f"{manifest.error.rstrip('.')}. {ok:,} of {planned:,} requests had succeeded."
        if manifest.error_code is not None:
            hint = "Remove the cause and run again; an internal error is a bug in Burstline: report it."
            return [Reason(manifest.error_code, text, hint)]
        return [Reason("died", text, "Read the server's log; lower the load, or raise its memory limits.")]
    if not planned:
        return [Reason("no-request", "The plan has no requests.", "Set --requests or --duration-s.")]
    few = ok < early_stopping_floor(0.5)
    interrupted = status == "interrupted" and not few  # judged by what had ended
    failures = failed(counts, interrupted=interrupted)
    n_failed = sum(failures.values())
    planned -= sum(failed(counts).values()) - n_failed
    if (ok and not n_failed) or (not few and n_failed <= manifest.max_failures * planned):
        return []
    kinds = in_words(failures) or f"{planned - ok:,} abandoned"
    cause = f" The first error: {cause.rstrip('.')}." if cause else ""
    advice = _what_to_do(failures, interrupted=status == "interrupted")
    if not ok:
        text = f"None of {planned:,} requests succeeded: {kinds}.{cause}"
        return [Reason("no-success", text, advice)]
    if few:
        text = f"Only {ok:,} of {planned:,} requests succeeded: {kinds}.{cause}"
        return [Reason("mostly-failed", text, advice)]
    share, most = 100 * n_failed / planned, 100 * manifest.max_failures
    text = f"{n_failed:,} of {planned:,} requests failed ({share:.3g}%): {kinds}"
    text = f"{text}; at most {most:.3g}% may fail.{cause}"
    return [Reason("too-many-failures", text, advice)]


def _what_to_do(failures: Mapping[str, int], *, interrupted: bool) -> str:
    """What helps against each kind of failure, the most frequent first."""
    steps: dict[str, dict[str, int]] = {}
    for kind, n in sorted(failures.items(), key=lambda row: -row[1]):
        cut_off = interrupted and kind in CUT_OFF
        steps.setdefault("Run it again." if cut_off else _remedy(kind, failures), {})[kind] = n
    if len(steps) < 2:
        return next(iter(steps), _remedy("", {}))
    told = (f"{in_words(of)} → {step[:1].lower()}{step[1:].rstrip('.')}" for step, of in steps.items())
    return f"{'; '.join(told)}."


def _remedy(kind: str, failures: Mapping[str, int]) -> str:
    if kind in OVERLOADED and not lost_a_part(failures):
        return "Lower the load, or raise the limit of the server's queue."
    if kind == Outcome.TIMEOUT:
        return "Lower the load, or give requests more time with --deadline-s."
    if kind.startswith("http_4"):
        return "Read the first error: the server rejected the requests themselves."
    return "Read the server's log at the time of the first failure."


def _client_bound(summary: Summary, decisive: Collection[tuple[str, str]]) -> list[Reason]:
    """The client was too late: in sending, in following a reply with the next request, or in reading."""
    found, metrics = _read_late(summary, decisive), sorted({metric for metric, _ in decisive})
    sent_late = [
        (each.send_effect_s, f"{metric.upper()} {p}")
        for metric in metrics
        for p, each in summary.grades.get(metric, {}).items()
        if each.is_sent_late and each.send_effect_s is not None
    ]
    if sent_late:
        effect_s, name = max(sent_late)
        names = ", ".join(each for _, each in sorted(sent_late, reverse=True))
        moved = f"changed {name} by {time_text(effect_s)}. Unreliable: {names}."
        text = f"The client sent requests late, which {moved}"
        found.append(Reason("send-lag", text, MACHINE))
    unread = known(summary.instrument.unread_fraction)
    if unread is not None and unread > MOST_SHARE:
        text = (
            f"For {unread:.0%} of the time that requests were in flight, the client had not yet read their "
            "last token: it sent a lower load than asked, so no number is of that load."
        )
        found.append(Reason(SLOW_CLIENT, text, MACHINE))
    if summary.has_late_rates:
        share = known(summary.throughput.read_error_fraction)
        text = f"The client read replies late, which may have changed the rates by {share:.0%}."
        found.append(Reason("read-lag", text, MACHINE))
    if found:
        return found
    for metric in metrics:
        figures = summary.metrics.get(metric)
        bound_s, value_s = (known(figures.instrument_error), known(figures.p50)) if figures else (None, None)
        if bound_s is not None and value_s is not None and bound_s > value_s:
            error, value = time_text(bound_s), time_text(value_s)
            text = f"The client's error, {error}, is larger than {metric.upper()} p50, {value}."
            found.append(Reason("read-lag", text, MACHINE))
    return found


def _read_late(summary: Summary, decisive: Collection[tuple[str, str]]) -> list[Reason]:
    """A decisive percentile is unreliable: by late reads, by wrong time stamps, or for all that is known."""
    unreliable = [
        (math.inf if each.read_effect_s is None else each.read_effect_s, f"{metric.upper()} {p}")
        for metric, row in summary.grades.items()
        for p, each in row.items()
        if (metric, p) in decisive and each.grade == Grade.UNRELIABLE and not each.is_sent_late
    ]
    if not unreliable:
        return []
    effect_s, name = max(unreliable)
    names = ", ".join(each for _, each in sorted(unreliable, reverse=True))
    beyond_s = known(summary.instrument.canary_beyond_p99_s)
    if math.isinf(effect_s):
        text = "The time at which the client read some replies is unknown"
        if beyond_s is None:
            text = f"{text}, and no canary measured this client"
        return [Reason("read-unknown", f"{text}. Unreliable: {names}.", "Repeat the run for longer.")]
    moved = f"may have changed {name} by {effect_s * 1e3:.3g} ms. Unreliable: {names}."
    if beyond_s and beyond_s > effect_s / 2:
        text = (
            f"Events of the canary were {beyond_s * 1e3:.3g} ms outside the client's own error bounds, which "
            f"{moved}"
        )
        advice = "Do not use these times: the client's time stamps are wrong on this machine."
        return [Reason("instrument-error", text, advice)]
    return [Reason("read-lag", f"The client read replies late, which {moved}", MACHINE)]


LATE: Final = ("read-lag", "send-lag", SLOW_CLIENT)
MACHINE: Final = "Run the client on a separate machine, or on more CPUs."


def is_watched(summary: Summary, manifest: Manifest) -> bool:
    """Whether the server's CPU time can be told from that of others: its processes are known."""
    cpu = summary.instrument.server_cpu_s
    return isinstance(cpu, Estimate) or (manifest.server_here and cpu.code != "unwatched")


def _disturbed(summary: Summary, manifest: Manifest) -> list[Reason]:
    """Others took CPU time that client or server needed, or heat slowed a GPU."""
    client, reasons = summary.instrument, []
    advice = "Stop other work on this machine and run again; compare accepts this run only with --anyway."
    others, waited, throttled = map(
        known, (client.others_cpu_fraction, client.client_cpu_wait_fraction, client.throttled_fraction)
    )
    if is_watched(summary, manifest) and others is not None and others > BUSY:
        text = f"Processes other than the client and the server used {others:.0%} of this machine's CPU."
        reasons.append(Reason("busy-machine", text, advice))
    if waited is not None and waited > WAITING:
        text = f"The client waited for a CPU {waited:.0%} of the time."
        alone = manifest.host.cores_allowed == 1 and manifest.on_this_machine
        one_core = Reason("one-core", text, "Client and server had one core: give them two.")
        reasons.append(one_core if alone else Reason("cpu-wait", text, advice))
    if throttled is not None and throttled > THROTTLED:
        text = f"A CPU quota stopped the client {throttled:.1%} of the time."
        advice = "Lift the client's CPU quota; compare accepts this run only with --anyway."
        reasons.append(Reason("throttled", text, advice))
    slowed = known(client.gpu_slowed_fraction) if manifest.on_this_machine else None
    if slowed is not None and slowed > SLOWED:  # another run would be as fast only in the same heat
        text = f"Heat or a power fault lowered the clocks of a GPU in {slowed:.0%} of the readings."
        advice = "Cool the machine or lower its power limit (`nvidia-smi -q -d PERFORMANCE`), and run again."
        reasons.append(Reason("gpu-throttled", text, advice))
    return reasons
