"""The verdict of a run: one word, its reasons and what to do; and warnings, facts that do not change it.

What an audit and the hardware say is added by `bench/conclusion.py`, `summarized`.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from burstline.measure.metrics.server import disagreement
from burstline.measure.record import record
from burstline.measure.record.manifest import Manifest, Status
from burstline.measure.record.summary import Conservation, PrefixCache, SessionFigures, Summary
from burstline.measure.record.verdict import MOST_SHARE, SLOW_CLIENT, Grade, Reason, State, Verdict, worst
from burstline.measure.stats.estimates import Absent, Estimate, Figure, early_stopping_floor
from burstline.measure.stats.figure import known
from burstline.servers.identity import Identity
from burstline.wording import counted, time_text, took

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
    if status == "failed" and manifest.error and counts.get(record.Outcome.NOT_SENT) == planned:
        what, _, hint = manifest.error.partition("\n")
        return [Reason.of("no-start", what=what, hint=hint)]
    if status == "failed" and manifest.error:
        code = "client-failed" if manifest.error_code else "died"
        return [Reason.of(code, error=manifest.error.rstrip("."), ok=ok, planned=planned)]
    if not planned:
        return [Reason.of("no-request")]
    few = ok < early_stopping_floor(0.5)
    interrupted = status == "interrupted" and not few  # judged by what had ended
    failures = record.failed(counts, interrupted=interrupted)
    n_failed = sum(failures.values())
    planned -= sum(record.failed(counts).values()) - n_failed
    if (ok and not n_failed) or (not few and n_failed <= manifest.max_failures * planned):
        return []
    kinds = record.in_words(failures) or f"{planned - ok:,} abandoned"
    cause = f" The first error: {cause.rstrip('.')}." if cause else ""
    advice = _what_to_do(failures, interrupted=status == "interrupted")
    told = {"planned": planned, "kinds": kinds, "cause": cause, "advice": advice}
    if not ok:
        return [Reason.of("no-success", **told)]
    if few:
        return [Reason.of("mostly-failed", ok=ok, **told)]
    share, most = n_failed / planned, manifest.max_failures
    return [Reason.of("too-many-failures", n=n_failed, percent=100 * share, most=100 * most, **told)]


def _what_to_do(failures: Mapping[str, int], *, interrupted: bool) -> str:
    """What helps against each kind of failure, the most frequent first."""
    steps: dict[str, dict[str, int]] = {}
    for kind, n in sorted(failures.items(), key=lambda row: -row[1]):
        cut_off = interrupted and kind in record.CUT_OFF
        steps.setdefault("Run it again." if cut_off else _remedy(kind, failures), {})[kind] = n
    if len(steps) < 2:
        return next(iter(steps), _remedy("", {}))
    told = (f"{record.in_words(of)} → {step[:1].lower()}{step[1:].rstrip('.')}" for step, of in steps.items())
    return f"{'; '.join(told)}."


def _remedy(kind: str, failures: Mapping[str, int]) -> str:
    if kind in record.OVERLOADED and not record.lost_a_part(failures):
        return "Lower the load, or raise the limit of the server's queue."
    if kind == record.Outcome.TIMEOUT:
        return "Lower the load, or give requests more time with --deadline-s."
    if kind.startswith("http_4"):
        return "Read the first error: the server rejected the requests themselves."
    if kind == record.Outcome.TRUNCATED:
        return "Read the server's log; if it ends a stream when another begins, pass --concurrency 1."
    if kind == record.Outcome.SHORT:
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
        found.append(Reason.of(SEND_LAG, name=name, effect=time_text(effect_s), names=names))
    unread = known(summary.instrument.unread_fraction)
    if unread is not None and unread > MOST_SHARE:
        found.append(Reason.of(SLOW_CLIENT, share=unread))
    if summary.has_late_rates:
        found.append(Reason.of("read-lag.rates", share=known(summary.throughput.read_error_fraction)))
    if found:
        return found
    for metric in metrics:
        figures = summary.metrics.get(metric)
        bound_s, value_s = (known(figures.instrument_error), known(figures.p50)) if figures else (None, None)
        held = any(each.held for each in summary.grades.get(metric, {}).values())
        if bound_s is not None and value_s is not None and bound_s > value_s and not held:
            error, value = time_text(bound_s), time_text(value_s)
            found.append(Reason.of("read-lag.median", error=error, metric=metric.upper(), value=value))
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
        unchecked = ", and no canary measured this client" if beyond_s is None else ""
        return [Reason.of("read-unknown", unchecked=unchecked, names=names)]
    told = {"name": name, "effect_ms": effect_s * 1e3, "names": names}
    if beyond_s and beyond_s > effect_s / 2:
        return [Reason.of("instrument-error", beyond_ms=beyond_s * 1e3, **told)]
    return [Reason.of("read-lag", **told)]


SEND_LAG: Final = "send-lag"
LATE: Final = ("read-lag", SEND_LAG, SLOW_CLIENT)


def is_watched(summary: Summary, manifest: Manifest) -> bool:
    """Whether the server's CPU time can be told from that of others: its processes are known."""
    cpu = summary.instrument.server_cpu_s
    return isinstance(cpu, Estimate) or (manifest.server_here and cpu.code != "unwatched")


def _disturbed(summary: Summary, manifest: Manifest) -> list[Reason]:
    """Others took CPU time that client or server needed, or heat slowed a GPU."""
    client, reasons = summary.instrument, []
    others, waited = known(client.others_cpu_fraction), _point(client.client_cpu_wait_fraction)
    has_one_core = manifest.host.cores_allowed == 1 and manifest.on_this_machine
    most = STOLEN if waited > WAITING and not has_one_core else BUSY  # who it waited for is named
    if is_watched(summary, manifest) and others is not None and others > most:
        reasons.append(Reason.of("busy-machine", share=others, who=took(others, manifest.others_cpu)))
    if waited > WAITING:
        is_here = manifest.server_here or is_watched(summary, manifest)
        is_server = is_here and others is not None and others <= STOLEN
        name = "one-core" if has_one_core else "server-cpu" if is_server else "cpu-wait"
        reasons.append(Reason.of(name, share=waited))
    if (throttled := _point(client.throttled_fraction)) > THROTTLED:
        reasons.append(Reason.of("throttled", share=throttled))
    slowed = _point(client.gpu_slowed_fraction)
    if slowed > SLOWED and manifest.on_this_machine:  # another run would be as fast only in the same heat
        reasons.append(Reason.of("gpu-throttled", share=slowed))
    return reasons + list(_elsewhere(manifest))


def _elsewhere(manifest: Manifest) -> Iterator[Reason]:
    """What disturbed machines of the load that no watcher sees; the server may be one of them."""
    used = {each.host: each.machine.others_fraction for each in manifest.drivers if each.machine}
    busy = [f"{share:.0%} of {host}'s CPU" for host, share in used.items() if share > BUSY]
    if len(busy) > 1:
        yield Reason.of("busy-machine.elsewhere", busy=", ".join(busy))
    for each in manifest.drivers:
        resent = each.network.retransmits if each.network and each.host else 0
        if resent > RESENT * each.n_sent:
            yield Reason.of("lossy-network", host=each.host, resent=resent, n_sent=each.n_sent)


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
        yield Reason.of("warm-up", what=load.warm_up_sentence, n=sum(each.n for each in load.warm_up))
    if (share := _point(summary.concurrency.open_after_fraction)) > LEFT_OPEN:
        yield Reason.of("left-open", share=share)
    again, n_sent = _point(summary.instrument.network_retransmits), sum(d.n_sent for d in manifest.drivers)
    if manifest.on_this_machine and again > RESENT * n_sent:
        yield Reason.of(LISTEN_QUEUE, resent=again, n_sent=n_sent)
    yield from _conservation(summary.conservation, whole=summary.counts["ok"] == summary.counts["planned"])
    used, canary = summary.instrument.others_cpu_fraction, summary.instrument.canary_p99_s
    others = _point(used)
    if others > BUSY and not is_watched(summary, manifest):
        server = summary.instrument.server_cpu_s
        why = f" ({server.reason})" if isinstance(server, Absent) and server.code == "unwatched" else ""
        who = took(others, manifest.others_cpu)
        yield Reason.of("busy-machine.unwatched", share=others, who=who, why=why)
    if (stolen := _point(summary.instrument.steal_fraction)) > STOLEN and manifest.on_this_machine:
        yield Reason.of("stolen-cpu", share=stolen)
    if isinstance(used, Absent) and used.code == "too-short":
        yield Reason.of("too-short")
    if isinstance(canary, Absent) and canary.code == "canary-lost":
        yield Reason.of("canary-lost")
    capped = _point(summary.instrument.gpu_power_capped_fraction)
    if capped > SLOWED and manifest.on_this_machine:
        yield Reason.of("power-cap", share=capped)
    late_s = {name: row["p50"].read_effect_s or 0.0 for name, row in summary.grades.items() if "p50" in row}
    yield from disagreement(summary.agreement, late_s)


def _of_requests(summary: Summary, manifest: Manifest, status: str) -> Iterator[Reason]:
    counts = summary.counts
    ok, planned = counts["ok"], counts["planned"]
    if status == "interrupted":
        yield Reason.of("interrupted", ok=ok, planned=planned)
    if lost := manifest.lost:
        first = min(lost, key=lambda each: each.at_s)
        share = sum(each.share for each in lost if each.at_s < first.at_s + 1.0)
        yield Reason.of("lost-drivers", at_s=first.at_s, share=share, why=first.why)
    floor = early_stopping_floor(0.5)
    if 0 < ok == planned < floor:
        yield Reason.of("too-few", many=counted(ok, "request"), floor=floor)
    failures = record.failed(counts, interrupted=status == "interrupted")
    if failures and ok:
        n_failed = sum(failures.values())
        yield Reason.of("failures", n=n_failed, planned=planned, kinds=record.in_words(failures))
    n, hang_ups = counts.get(record.Outcome.ABANDONED, 0), manifest.asked.cancel_share
    if n:
        yield _abandoned(summary, f"{n:,} of {planned:,} requests were abandoned, as planned")
    if hang_ups is not None and status == "complete" and n < hang_ups.share * (ok + n) / 2:
        yield Reason.of("not-abandoned", n=n, planned=planned, share=hang_ups.share)


def _abandoned(summary: Summary, what: str) -> Reason:
    """Whether the server has freed what it held for the clients that hung up."""
    running, kv = summary.memory.running_after, summary.memory.kv_after_fraction
    in_flight = [f"{_point(running):,.0f} requests in flight"] * isinstance(running, Estimate)
    cached = [f"{_point(kv):.1%} of its KV cache in use"] * isinstance(kv, Estimate)
    held = " and ".join(in_flight + cached)
    if not held:
        return Reason.of("abandoned.unknown", what=what)
    is_freed = _point(running) <= 0 and _point(kv) <= NOTABLE
    return Reason.of("abandoned" if is_freed else "abandoned-not-freed", what=what, held=held)


def _of_tokens(summary: Summary) -> Iterator[Reason]:
    lengths = summary.lengths
    mean, n_hidden = lengths.output_tok.served_mean, _point(lengths.hidden_tok)
    n_of = {
        "prompt-length": _point(lengths.prompt_mismatches),
        "no-text": lengths.splits.get(record.NO_TEXT, 0),
        "chunks": sum(lengths.splits.get(name, 0) for name in ("spread", "unknown")),
        "output-length": _point(lengths.output_mismatches),
        "hidden": n_hidden,
        "recounted": sum(lengths.output_sources.get(name, 0) for name in record.RECOUNTS),
        "cut-behind": _point(lengths.cut_behind),
    }
    share = n_hidden / (mean.point * mean.n) if n_hidden and isinstance(mean, Estimate) else 1.0
    for code, n in n_of.items():
        if n:
            replies, requests = counted(n, "reply"), counted(n, "request")
            yield Reason.of(code, replies=replies, requests=requests, share=share)


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
        # Where one starts again, each of the three counters falls once.
        again = "prefix-restarted.again" if cache.restarted_s.n > 3 else "prefix-restarted"
        yield Reason.of(again, at_s=cache.restarted_s.point)
        return
    if isinstance(served_tok, Absent):
        if planned > NOTABLE:
            yield Reason.of("prefix-unknown", planned=planned)
        return
    share = served_tok.point / total_tok
    if share > planned + NOTABLE:
        more = "prefix-cache" if planned <= NOTABLE else "prefix-more"
        yield Reason.of(more, share=share, points=(share - planned) * 100, planned=planned)
    simulated = isinstance(cache.simulated_tok, Estimate)
    expected = _point(cache.simulated_tok) / total_tok if simulated else planned
    is_off = identity is not None and identity.prefix_cache is False
    if (by_turns and not is_off) or share >= expected - (SIMULATED if simulated else NOTABLE):
        return
    none = "prefix-none.simulated" if simulated else "prefix-none"
    less = "prefix-less.simulated" if simulated else "prefix-less"
    code = "prefix-off" if is_off else none if share < NONE_OF * expected else less
    yield Reason.of(code, share=share, points=(expected - share) * 100, expected=expected)


def _conservation(tokens: Conservation, *, whole: bool) -> Iterator[Reason]:
    client, server = _point(tokens.output_client_tok), _point(tokens.output_server_tok)
    if abs(_point(tokens.output_residual)) <= NOTABLE:
        return
    if server < client:
        yield Reason.of("metrics-incomplete", server=server, client=client)
        return
    more = (server - client) / client
    times = f"{more:.0%} more" if more < 1 else f"{server / client:.1f} times as many"
    yield Reason.of("conservation" if whole else "conservation.failures", times=times)


def _point(figure: Figure | None) -> float:
    return figure.point if isinstance(figure, Estimate) else 0.0
