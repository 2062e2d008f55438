"""The verdict of a run: one word, its reasons and what to do; and warnings, facts that do not change it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from burstline.measure.metrics.server import disagreement
from burstline.measure.record.manifest import Manifest, Status
from burstline.measure.record.record import (
    CUT_OFF,
    NO_TEXT,
    OVERLOADED,
    RECOUNTS,
    Outcome,
    failed,
    in_words,
    lost_a_part,
)
from burstline.measure.record.summary import Conservation, PrefixCache, SessionFigures, Summary
from burstline.measure.record.verdict import MOST_SHARE, SLOW_CLIENT, Grade, Reason, State, Verdict, worst
from burstline.measure.stats.estimates import Absent, Estimate, Figure, early_stopping_floor
from burstline.measure.stats.figure import known
from burstline.servers.identity import Identity
from burstline.wording import time_text

HEADLINE: Final = tuple((metric, p) for metric in ("ttft", "tpot", "e2e") for p in ("p50", "p99"))
"""The percentiles that people read first: where the client spoils one of them, it spoils the run."""

BUSY: Final = 0.25
"""Of two cores half of one: a server there is slowed, though the instrument may not be."""
WAITING: Final = 0.1
"""The share of the run that the client may spend waiting for a CPU."""
THROTTLED: Final = 0.01
STOLEN: Final = 0.05
"""Of all CPU time: a server beside it was slower by about as much, and by more where both cores compute."""
RESENT: Final = 0.01
"""TCP segments sent again for each request: as many wait for a timer of 200 ms, which moves a p99."""
LISTEN_QUEUE: Final = "listen-queue"
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
    if kind == Outcome.TRUNCATED:
        return "Read the server's log; if it ends a stream when another begins, pass --concurrency 1."
    if kind == Outcome.SHORT:
        return "Read the server's log; if replies may end by themselves, pass --ends natural."
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
        text = f"The client sent requests late, which changed {name} by {time_text(effect_s)}. "
        found.append(Reason("send-lag", f"{text}Unreliable: {names}.", MACHINE))
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
        held = any(each.held for each in summary.grades.get(metric, {}).values())
        if bound_s is not None and value_s is not None and bound_s > value_s and not held:
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
        if (metric, p) in decisive and each.grade == Grade.UNRELIABLE and not (each.is_sent_late or each.held)
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
        text = f"Events of the canary were {beyond_s * 1e3:.3g} ms outside the client's own error bounds"
        advice = "Do not use these times: the client's time stamps are wrong on this machine."
        return [Reason("instrument-error", f"{text}, which {moved}", advice)]
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
    advice = "Stop other work on this machine and run again."
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
        reasons.append(Reason("throttled", text, "Lift the client's CPU quota, and run again."))
    slowed = known(client.gpu_slowed_fraction) if manifest.on_this_machine else None
    if slowed is not None and slowed > SLOWED:  # another run would be as fast only in the same heat
        text = f"Heat or a power fault lowered the clocks of a GPU in {slowed:.0%} of the readings."
        advice = "Cool the machine or lower its power limit (`nvidia-smi -q -d PERFORMANCE`), and run again."
        reasons.append(Reason("gpu-throttled", text, advice))
    return reasons + list(_elsewhere(manifest))


def _elsewhere(manifest: Manifest) -> Iterator[Reason]:
    """What disturbed machines of the load that no watcher sees; the server may be one of them."""
    again = "Repair it, or leave the machine out, and run again."
    used = {each.host: each.machine.others_fraction for each in manifest.drivers if each.machine}
    busy = [f"{share:.0%} of {host}'s CPU" for host, share in used.items() if share > BUSY]
    if len(busy) > 1:
        yield Reason("busy-machine", f"Processes other than the client used {', '.join(busy)}.", again)
    for each in manifest.drivers:
        resent = each.network.retransmits if each.network and each.host else 0
        if resent > RESENT * each.n_sent:
            text = f"{each.host} sent {resent:,} TCP segments again for {each.n_sent:,} requests"
            yield Reason("lossy-network", f"{text}: what its network lost is in their latency.", again)


NOTABLE = 0.01
SIMULATED = 0.03
"""By which share of the prompt tokens a simulated cache may differ from a real one: admission is inferred."""
LEFT_OPEN = 0.05
"""Share of the requests' time behind their last token that is mentioned."""
NONE_OF = 0.05
"""Below this share of the expected hits the cache served as good as nothing."""


def caveats(summary: Summary, manifest: Manifest, status: str = "complete") -> Iterator[Reason]:
    """Every warning that applies, out of the summary's own sections."""
    yield from _of_requests(summary, manifest, status)
    yield from _of_tokens(summary)
    if summary.prefix_cache is not None:
        yield from _cached(summary.prefix_cache, summary.sessions, manifest.identity)
    load = manifest.load
    if load is not None and load.warm_up and not load.warm_up_agrees:
        yield Reason("warm-up", load.warm_up_sentence, "Pass --warmup N with more; they do not count.")
    if (share := _point(summary.concurrency.open_after_fraction)) > LEFT_OPEN:
        text = f"Requests stayed open for {share:.0%} of their time after their last token."
        advice = "No latency includes that, but a closed loop waits for it: look at what ends the replies."
        yield Reason("left-open", text, advice)
    again, n_sent = _point(summary.instrument.network_retransmits), sum(d.n_sent for d in manifest.drivers)
    if manifest.on_this_machine and again > RESENT * n_sent:
        text = f"The server's listen queue was full: TCP resent {again:,.0f} segments of {n_sent:,} requests."
        advice = "Each wait, 0.2 s or more, is in TTFT: raise the server's backlog, or send fewer at once."
        yield Reason(LISTEN_QUEUE, text, advice)
    yield from _conservation(summary.conservation, whole=summary.counts["ok"] == summary.counts["planned"])
    used, canary = summary.instrument.others_cpu_fraction, summary.instrument.canary_p99_s
    others = _point(used)
    if others > BUSY and not is_watched(summary, manifest):
        text = f"Processes other than the client used {others:.0%} of this machine's CPU."
        why = summary.instrument.server_cpu_s
        known = f" ({why.reason})" if isinstance(why, Absent) and why.code == "unwatched" else ""
        advice = f"Unless the server is one of them, they competed with it for CPU{known}."
        yield Reason("busy-machine", text, advice)
    if (stolen := _point(summary.instrument.steal_fraction)) > STOLEN and manifest.on_this_machine:
        text = f"The hypervisor gave {stolen:.0%} of this machine's CPU time to other guests."
        yield Reason("stolen-cpu", text, "It slowed the server: run it again while those are idle.")
    if isinstance(used, Absent) and used.code == "too-short":
        text = "The load was too short to see whether other processes disturbed it."
        yield Reason("too-short", text, "Send more with --requests, or for --duration-s 1 or longer.")
    if isinstance(canary, Absent) and canary.code == "canary-lost":
        text = "The canary was lost: for most of the load nothing checked the client's own times."
        yield Reason("canary-lost", text, "Run it again, or `burstline certify`, before you rely on them.")
    capped = summary.instrument.gpu_power_capped_fraction
    if capped is not None and _point(capped) > SLOWED and manifest.on_this_machine:
        text = f"The power limit lowered the clocks of a GPU in {_point(capped):.0%} of the readings."
        yield Reason("power-cap", text, "Compare only with runs under the same power limit.")
    late_s = {name: row["p50"].read_effect_s or 0.0 for name, row in summary.grades.items() if "p50" in row}
    yield from disagreement(summary.agreement, late_s)


def _of_requests(summary: Summary, manifest: Manifest, status: str) -> Iterator[Reason]:
    counts = summary.counts
    ok, planned = counts["ok"], counts["planned"]
    if status == "interrupted":
        text = f"The run was interrupted: {ok:,} of {planned:,} requests had succeeded."
        yield Reason("interrupted", text, "Run it again and let it finish.")
    if lost := manifest.lost:
        first = min(lost, key=lambda each: each.at_s)
        share = sum(each.share for each in lost if each.at_s < first.at_s + 1.0)
        text = f"From {first.at_s:.1f} s on, {share:.0%} of the load was missing: {first.why}."
        yield Reason("lost-drivers", text, "The numbers cover only requests due before that.")
    floor = early_stopping_floor(0.5)
    if 0 < ok == planned < floor:
        many = f"{ok} request{'s' * (ok > 1)} succeeded"
        yield Reason("too-few", f"{many}; even a median needs {floor}.", "Send more with --requests.")
    failures = failed(counts, interrupted=status == "interrupted")
    if failures and ok:
        text = f"{sum(failures.values()):,} of {planned:,} requests failed: {in_words(failures)}."
        advice = "Their latency counts as infinite; the report lists the first of each kind."
        yield Reason("failures", text, advice)
    n, hang_ups = counts.get(Outcome.ABANDONED, 0), manifest.asked.cancel_share
    if n:
        yield _abandoned(summary, f"{n:,} of {planned:,} requests were abandoned, as planned")
    if hang_ups is not None and status == "complete" and n < hang_ups.share * (ok + n) / 2:
        text = f"Only {n:,} of {planned:,} clients hung up; {hang_ups.share:.0%} should have."
        advice = "The other replies ended first: lower N in --cancel-share P,after=N."
        yield Reason("not-abandoned", text, advice)


def _abandoned(summary: Summary, text: str) -> Reason:
    """Whether the server has freed what it held for the clients that hung up."""
    advice = "They are in no latency and no throughput, but the server's work on them slows the others."
    running, kv = summary.memory.running_after, summary.memory.kv_after_fraction
    in_flight = [f"{_point(running):,.0f} requests in flight"] * isinstance(running, Estimate)
    cached = [f"{_point(kv):.1%} of its KV cache in use"] * isinstance(kv, Estimate)
    held = " and ".join(in_flight + cached)
    if not held:
        return Reason("abandoned", f"{text}; the server does not report whether it freed them.", advice)
    if _point(running) > 0 or _point(kv) > NOTABLE:
        text = f"{text}; after the load the server still had {held}, more than before."
        advice = "The server does not stop working on a request when its client hangs up."
        return Reason("abandoned-not-freed", text, advice)
    return Reason("abandoned", f"{text}; the server freed them: {held} after the load.", advice)


def _of_tokens(summary: Summary) -> Iterator[Reason]:
    lengths = summary.lengths
    if n_other := _point(lengths.prompt_mismatches):
        text = f"The server counted a different prompt length than planned for {n_other:,.0f} requests."
        causes = "a special token that the server adds, or a reply that has other tokens in the next turn"
        yield Reason("prompt-length", text, f"The usual causes: {causes}.")
    if n_silent := lengths.splits.get(NO_TEXT, 0):
        text = f"The server counted the tokens of {n_silent:,} replies and sent no text of them."
        yield Reason("no-text", text, "Their E2E is to the reply's end; their TTFT and TPOT are not known.")
    if n_guessed := sum(lengths.splits.get(name, 0) for name in ("spread", "unknown")):
        text = f"The server did not report how many tokens each event of {n_guessed:,} replies carries."
        yield Reason("chunks", text, "Their ITL assumes an even spread: use ICL and TPOT instead.")
    if n_other := _point(lengths.output_mismatches):
        text = f"{n_other:,.0f} replies do not have the requested length: the server did not keep to it."
        yield Reason("output-length", text, "Compare only runs of equal lengths.")
    if n_hidden := _point(lengths.hidden_tok):
        mean = lengths.output_tok.served_mean
        share = n_hidden / (mean.point * mean.n) if isinstance(mean, Estimate) else 1.0
        text = f"The server sent no text of {share:.0%} of the output tokens: hidden reasoning, for example."
        yield Reason("hidden", text, "TTFT is of the first text, TPOT and ITL of the tokens with text.")
    if n_recounted := sum(lengths.output_sources.get(name, 0) for name in RECOUNTS):
        text = f"The server did not count the tokens of {n_recounted:,} replies, so the text was tokenized."
        advice = "Rates and TPOT use that count: where text does not tokenize back, it can be a tenth off."
        yield Reason("recounted", text, advice)
    if n_cut := _point(lengths.cut_behind):
        text = f"{n_cut:,.0f} replies had all their tokens but no proper end: the [DONE] event was missing."
        advice = "They count as successes; usual causes are a proxy or a wrong Content-Length."
        yield Reason("cut-behind", text, advice)


def _cached(
    cache: PrefixCache, sessions: SessionFigures | None, identity: Identity | None
) -> Iterator[Reason]:
    """Compare the prefix cache's hits with those that the plan and the size of the cache explain."""
    total_tok = _point(cache.prompt_tok)
    if not total_tok:
        return
    served_tok = cache.served_tok
    by_turns = sessions if isinstance(cache.infinite_tok, Absent) else None
    planned = _point(by_turns.earlier_fraction) if by_turns else _point(cache.infinite_tok) / total_tok
    if isinstance(cache.restarted_s, Estimate):
        text = f"The engine restarted {cache.restarted_s.point:.1f} s into the load: its counters began anew."
        if cache.restarted_s.n > 3:  # where one starts again, each of the three counters falls once
            text = "The server's counters fell again and again, as of several servers that answer in turn."
        yield Reason("prefix-restarted", text, "What the prefix cache served is not known: run it again.")
        return
    if isinstance(served_tok, Absent):
        text = f"By the plan, a prefix cache can serve {planned:.1%} of the prompt tokens; the server "
        advice = "TTFT depends on it: compare only runs with the same prefix cache."
        if planned > NOTABLE:
            yield Reason("prefix-unknown", f"{text}does not report how many it served.", advice)
        return
    share = served_tok.point / total_tok
    text = f"The prefix cache served {share:.1%} of the prompt tokens"
    if share > planned + NOTABLE and planned <= NOTABLE:
        advice = "Results are not comparable with uncached runs. Pass a new --salt or disable the cache."
        yield Reason("prefix-cache", f"{text}.", advice)
    elif share > planned + NOTABLE:
        text = f"{text}, {(share - planned) * 100:.1f} points more than the plan's shared prefixes explain"
        advice = "An earlier run probably filled it: pass a new --salt; with --data, restart the server."
        yield Reason("prefix-more", f"{text} ({planned:.1%}).", advice)
    simulated = isinstance(cache.simulated_tok, Estimate)
    expected = _point(cache.simulated_tok) / total_tok if simulated else planned
    if by_turns or share >= expected - (SIMULATED if simulated else NOTABLE):
        return
    bound = "a cache of this size should" if simulated else "the plan allows"
    if identity is not None and identity.prefix_cache is False:
        text = f"Prefix caching is off: it could serve {expected:.1%} of the prompt tokens."
        yield Reason("prefix-off", text, "TTFT depends on it: compare only runs with the same setting.")
    elif share < NONE_OF * expected:
        text = f"{text}; {bound} serve {expected:.1%}." if simulated else f"{text}; {bound} {expected:.1%}."
        advice = "Each prompt got a salt or a template of its own on its way, or the prefix caching is off."
        yield Reason("prefix-none", text, advice)
    else:
        gap = f"{text}, {(expected - share) * 100:.1f} points less than {bound} ({expected:.1%})."
        advice = "Check that the KV cache is large enough; requests sent at the same time cannot share yet."
        if simulated:
            advice = "Another client may have filled the cache, or requests went to several engines."
        yield Reason("prefix-less", gap, advice)


def _conservation(tokens: Conservation, *, whole: bool) -> Iterator[Reason]:
    client, server = _point(tokens.output_client_tok), _point(tokens.output_server_tok)
    if abs(_point(tokens.output_residual)) <= NOTABLE:
        return
    if server < client:
        text = f"The server's own metrics are incomplete: {server:,.0f} of {client:,.0f} generated tokens."
        yield Reason("metrics-incomplete", text, "Use the client's counts, which include every reply.")
        return
    more = (server - client) / client
    times = f"{more:.0%} more" if more < 1 else f"{server / client:.1f} times as many"
    text = f"The server generated {times} tokens than this client received."
    advice = "It may have continued requests that failed here, or other clients use it."
    yield Reason("conservation", text, "Check whether other clients use this server." if whole else advice)


def _point(figure: Figure | None) -> float:
    return figure.point if isinstance(figure, Estimate) else 0.0
