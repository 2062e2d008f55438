"""What must hold of a run whose page says a sentence of cause, limit or advice: by the sentence's code.

Each predicate is written from what the sentence means to its reader, over the summary, the manifest and,
where there are records, over these. None calls the code that prints the sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from burstline.measure.record.columns import Columns
from burstline.measure.stats.figure import Absent, Estimate, Figure
from tests.reports.told import Told

Predicate = Callable[[Told], bool]


def _share(section: str, name: str, least: float, most: float = float("inf")) -> Predicate:
    return lambda t: least < t.most(section, name) <= most


def _has_failed(*kinds: str) -> Predicate:
    return lambda t: t.n(*kinds) > 0


def _cache(t: Told, name: str) -> float:
    """A figure of the prefix cache as a share of the prompt tokens, 0 where it is not known."""
    figure = getattr(t.summary.prefix_cache, name, None)
    prompt = getattr(t.summary.prefix_cache, "prompt_tok", None)
    if not isinstance(figure, Estimate) or not isinstance(prompt, Estimate) or not prompt.point:
        return 0.0
    return figure.point / prompt.point


def _hits(t: Told) -> float | None:
    cache = t.summary.prefix_cache
    if cache is None or isinstance(cache.restarted_s, Estimate):
        return None
    known = next((f for f in (cache.replied_tok, cache.counted_tok) if isinstance(f, Estimate)), None)
    return None if known is None or not _cache(t, "prompt_tok") else known.point / _point(cache.prompt_tok)


def _point(figure: Figure | None) -> float:
    return figure.point if isinstance(figure, Estimate) else 0.0


def _planned(t: Told) -> float:
    """The share of the prompt tokens that the plan shares: by its prefixes, or by the turns of sessions."""
    cache, sessions = t.summary.prefix_cache, t.summary.sessions
    if cache is not None and isinstance(cache.infinite_tok, Absent) and sessions is not None:
        return _point(sessions.earlier_fraction)
    return _cache(t, "infinite_tok")


def _hits_are(how: Callable[[float, Told], bool]) -> Predicate:
    def predicate(t: Told) -> bool:
        hits = _hits(t)
        return hits is not None and how(hits, t)

    return predicate


def _of_records(how: Callable[[Columns], bool]) -> Predicate:
    """Of a run without records it is not known."""
    return lambda t: t.columns is None or how(t.columns)


def _together(c: Columns) -> float:
    """The share of events that came within 0.2 ms of the one before, of those of one reply."""
    follows = np.asarray(c.follows, dtype=bool)
    gaps = np.diff(c.event_s, prepend=np.inf)[follows]
    return float((gaps < 2e-4).mean()) if len(gaps) else 0.0


def _slow_start(t: Told) -> bool:
    """Whether the requests at the start waited for longer than the others."""
    if t.columns is None:
        return True
    c = t.columns
    wait = (c.first_s - c.sent_s)[np.argsort(c.due_s, kind="stable")]
    n = int(t.said.get("n", "3"))
    after = int(t.said.get("after") or 0)
    first, rest = wait[after : after + n], wait[after + n :]
    first, rest = first[np.isfinite(first)], rest[np.isfinite(rest)]
    return bool(len(first) and len(rest) and np.median(first) > np.median(rest))


def _gap(sign: int) -> Predicate:
    return lambda t: any(sign * t.most("agreement", f"{name}_gap_s") > 0 for name in ("ttft", "itl", "e2e"))


def _has_trend(t: Told, names: Sequence[str], p: float = 0.06, change: float = 0.01) -> bool:
    """Whether one of these series has a trend that is clear and that one would see."""
    for name in names:
        chance = t.value("stationarity", f"{name}_trend_p")
        if (
            chance is not None
            and chance < p
            and abs(t.most("stationarity", f"{name}_change_fraction")) > change
        ):
            return True
    return False


def _moved(sign: int) -> Predicate:
    return lambda t: _has_trend(t, ["ttft"]) and sign * t.most("stationarity", "ttft_change_fraction") > 0


def _changed(t: Told) -> float:
    """By how much the latency that is named moved over the run, as a share."""
    name = t.said.get("metric", "ttft").lower()
    return t.value("stationarity", f"{name}_change_fraction") or 0.0


def _raised(t: Told) -> float:
    return float(t.said.get("n", "1e9").replace(",", ""))


def _kv_room(t: Told) -> float:
    """About how many requests the KV cache holds at once, infinite where that is not known."""
    running, kv = t.value("concurrency", "server_running_max"), t.value("memory", "kv_peak_fraction")
    return running / kv if running and kv and kv > 0.05 else float("inf")


def _full(t: Told) -> bool:
    """Whether the KV cache had no room for one more request, or put some back."""
    kv, tok = (
        t.most("memory", "kv_peak_fraction"),
        t.manifest.identity.kv_tok if t.manifest.identity else None,
    )
    rate, per_s = t.most("throughput", "requests_per_s"), t.most("throughput", "input_tok_per_s")
    small = tok is not None and rate > 0 and (1 - kv) * tok < per_s / rate
    running = t.most("concurrency", "server_running_max")
    no_other = running > 0 and kv + kv / running > 1
    return kv >= 0.85 or no_other or (kv > 0 and small) or t.most("memory", "preemptions") > 0


def _has_kv_room(t: Told) -> bool:
    return t.most("memory", "kv_peak_fraction") < 0.95 and not t.most("memory", "preemptions")


def _by_batch(t: Told) -> bool:
    running = t.most("concurrency", "server_running_max")
    seldom = t.value("concurrency", "server_full_fraction")
    often = seldom is None or seldom >= 0.5
    return t.waits and running > 0 and often and (t.slots is None or running >= t.slots)


def _disturbed(t: Told) -> bool:
    """Whether processes other than the client took CPU time: seen, or by what the client waited for."""
    elsewhere = any(each.machine and each.machine.others_fraction > 0.1 for each in t.manifest.drivers)
    waited = t.most("instrument", "client_cpu_wait_fraction") > 0.05
    return elsewhere or waited or t.most("instrument", "others_cpu_fraction") > 0.1


_LOWER: Final = ("refused", "http_429", "http_503", "timeout")

OF_REASONS: Final[Mapping[str, Predicate]] = {
    "no-start": lambda t: bool(t.manifest.error) and t.n("ok") == 0 and t.n("not_sent") == t.n("planned"),
    "died": lambda t: bool(t.manifest.error) and t.manifest.error_code is None,
    "client-failed": lambda t: bool(t.manifest.error) and t.manifest.error_code == "client-failed",
    "no-request": lambda t: t.n("planned") == 0,
    "no-success": lambda t: t.n("ok") == 0 < t.n("planned"),
    "mostly-failed": lambda t: 0 < t.n("ok") < 11 and t.n_failed > 0,
    "too-many-failures": lambda t: t.n("ok") > 0 and t.n_failed > t.manifest.max_failures * t.n("planned"),
    "contradiction": lambda t: t.n("planned") > 0 and t.summary.verdict.state == "FAILED",
    "misread": lambda t: bool(
        t.summary.audit and t.summary.audit.second_reader and t.summary.audit.second_reader.differ
    ),
    "send-lag": lambda t: t.unreliable(sent=True),
    "slow-client": lambda t: t.most("instrument", "unread_fraction") > 0.05,
    "read-lag.rates": lambda t: t.most("throughput", "read_error_fraction") > 0.05,
    "read-lag.median": lambda t: any(
        isinstance(each.p50, Estimate) and _point(each.instrument_error) > each.p50.point
        for each in t.summary.metrics.values()
    ),
    "read-lag": lambda t: t.unreliable(sent=False, unknown=False),
    "read-unknown": lambda t: t.unreliable(unknown=True),
    "instrument-error": lambda t: (
        t.unreliable(sent=False) and t.most("instrument", "canary_beyond_p99_s") > 0
    ),
    "busy-machine": lambda t: (
        t.most("instrument", "others_cpu_fraction")
        > (0.04 if t.most("instrument", "client_cpu_wait_fraction") > 0.05 else 0.2)
        and (t.manifest.server_here or t.value("instrument", "server_cpu_s") is not None)
    ),
    "busy-machine.elsewhere": lambda t: any(
        each.machine and each.machine.others_fraction > 0.2 for each in t.manifest.drivers
    ),
    "busy-machine.unwatched": lambda t: (
        t.most("instrument", "others_cpu_fraction") > 0.2 and t.value("instrument", "server_cpu_s") is None
    ),
    "one-core": lambda t: (
        t.manifest.host.cores_allowed == 1
        and t.manifest.on_this_machine
        and t.most("instrument", "client_cpu_wait_fraction") > 0.05
    ),
    "cpu-wait": _share("instrument", "client_cpu_wait_fraction", 0.05),
    "server-cpu": lambda t: (
        t.most("instrument", "client_cpu_wait_fraction") > 0.05
        and (t.manifest.server_here or t.value("instrument", "server_cpu_s") is not None)
        and t.most("instrument", "others_cpu_fraction") < 0.1
    ),
    "throttled": _share("instrument", "throttled_fraction", 0.005),
    "gpu-throttled": _share("instrument", "gpu_slowed_fraction", 0.02),
    "lossy-network": lambda t: any(
        each.host and each.network and each.network.retransmits > 0.005 * each.n_sent
        for each in t.manifest.drivers
    ),
    "overloaded": lambda t: (
        t.is_open and _has_trend(t, ["in_flight"]) and t.most("stationarity", "in_flight_change_fraction") > 0
    ),
    "overloaded.waiting": lambda t: t.is_open and t.in_flight > 1,
    "drifting": lambda t: not t.has("overloaded") and t.manifest.asked.kind != "burst" and _changed(t) > 0,
    "drifting.fell": lambda t: (
        not t.has("overloaded") and t.manifest.asked.kind != "burst" and _changed(t) < 0
    ),
    "drifting.step": lambda t: t.manifest.asked.kind == "closed loop" and _changed(t) > 0,
    "drifting.step-fell": lambda t: t.manifest.asked.kind == "closed loop" and _changed(t) < 0,
    "never-settled": lambda t: t.is_open and not t.has("drifting", "overloaded"),
    "cold": _slow_start,
    "cold.warmed": lambda t: _slow_start(t) and bool(t.manifest.asked.warmup),
    "cold.probe": lambda t: _slow_start(t) and t.manifest.is_probe,
    "cold.left-out": _slow_start,
    "ran-out": lambda t: t.manifest.asked.duration_s is not None and t.n("not_sent") == 0,
    "warm-up": lambda t: t.manifest.load is not None and len(t.manifest.load.warm_up) > 0,
    "interrupted": lambda t: t.n_cut_off > 0 or t.manifest.status in ("interrupted", "running"),
    "lost-drivers": lambda t: len(t.manifest.lost) > 0,
    "too-few": lambda t: 0 < t.n("ok") < 11,
    "failures": lambda t: t.n_failed > 0 and t.n("ok") > 0,
    "not-abandoned": lambda t: (
        t.manifest.asked.cancel_share is not None
        and t.n("abandoned") < t.manifest.asked.cancel_share.share * t.n("planned")
    ),
    "abandoned": lambda t: (
        t.n("abandoned") > 0
        and t.most("memory", "running_after") <= 0
        and t.most("memory", "kv_after_fraction") <= 0.01
        and (t.value("memory", "running_after"), t.value("memory", "kv_after_fraction")) != (None, None)
    ),
    "abandoned.unknown": lambda t: (
        t.n("abandoned") > 0
        and (t.value("memory", "running_after"), t.value("memory", "kv_after_fraction")) == (None, None)
    ),
    "abandoned-not-freed": lambda t: (
        t.n("abandoned") > 0
        and (t.most("memory", "running_after") > 0 or t.most("memory", "kv_after_fraction") > 0.01)
    ),
    "left-open": _share("concurrency", "open_after_fraction", 0.03),
    "listen-queue": lambda t: t.manifest.on_this_machine and t.most("instrument", "network_retransmits") > 0,
    "stolen-cpu": lambda t: t.manifest.on_this_machine and t.most("instrument", "steal_fraction") > 0.03,
    "too-short": lambda t: t.value("instrument", "others_cpu_fraction") is None,
    "canary-lost": lambda t: t.value("instrument", "canary_p99_s") is None,
    "power-cap": _share("instrument", "gpu_power_capped_fraction", 0.02),
    "server-view.shorter": _gap(1),
    "server-view.longer": _gap(-1),
    "prompt-length": _share("lengths", "prompt_mismatches", 0),
    "no-text": lambda t: t.summary.lengths.splits.get("no-text", 0) > 0,
    "chunks": lambda t: (
        t.summary.lengths.splits.get("spread", 0) + t.summary.lengths.splits.get("unknown", 0) > 0
    ),
    "output-length": _share("lengths", "output_mismatches", 0),
    "hidden": _share("lengths", "hidden_tok", 0),
    "recounted": lambda t: not {"tokenize", "tokenizer"}.isdisjoint(t.summary.lengths.output_sources),
    "cut-behind": _share("lengths", "cut_behind", 0),
    "metrics-incomplete": lambda t: (
        t.most("conservation", "output_server_tok") < t.most("conservation", "output_client_tok")
    ),
    "conservation": lambda t: (
        t.most("conservation", "output_server_tok") > t.most("conservation", "output_client_tok")
        and t.n_failed == 0
    ),
    "conservation.failures": lambda t: (
        t.most("conservation", "output_server_tok") > t.most("conservation", "output_client_tok")
        and t.n("ok") < t.n("planned")
    ),
    "replies-differ": lambda t: (
        t.summary.audit is not None and t.summary.audit.answer == "differ more under load"
    ),
    "prefix-restarted": lambda t: (
        t.summary.prefix_cache is not None and isinstance(t.summary.prefix_cache.restarted_s, Estimate)
    ),
    "prefix-restarted.again": lambda t: (
        t.summary.prefix_cache is not None
        and isinstance(t.summary.prefix_cache.restarted_s, Estimate)
        and t.summary.prefix_cache.restarted_s.n > 1
    ),
    "prefix-unknown": lambda t: _hits(t) is None and _planned(t) > 0.005,
    "prefix-cache": _hits_are(lambda hits, t: hits > 0.005 and _planned(t) <= 0.02),
    "prefix-more": _hits_are(lambda hits, t: hits > _planned(t) > 0.005),
    "prefix-off": lambda t: t.manifest.identity is not None and t.manifest.identity.prefix_cache is False,
    "prefix-none": _hits_are(lambda hits, t: hits < 0.1 * _planned(t)),
    "prefix-none.simulated": _hits_are(lambda hits, t: hits < 0.1 * _cache(t, "simulated_tok")),
    "prefix-less": _hits_are(lambda hits, t: hits < _planned(t)),
    "prefix-less.simulated": _hits_are(lambda hits, t: hits < _cache(t, "simulated_tok")),
    "held-by-size": _of_records(lambda c: _together(c) > 0.2),
    "held-to-end": _of_records(lambda c: _together(c) > 0.2),
    "held-by-time": _of_records(lambda c: _together(c) > 0.2),
    "held-by-link": _of_records(lambda c: _together(c) > 0.05),
    "bunched": _of_records(lambda c: _together(c) > 0.05),
    "bunched.whole": _of_records(lambda c: _together(c) > 0.05),
    "in-one-event": _of_records(lambda c: bool((c.ok & (c.n_events <= 2)).any())),
}
"""Of the texts in `reasons.toml`, by their names there."""

HELD: Final = ("held-by-size", "held-to-end", "held-by-time", "held-by-link")

OF_STATES: Final[Mapping[str, Predicate]] = {
    "states.VALID": lambda t: (
        not t.summary.verdict.reasons
        and t.n("ok") > 0
        and not t.manifest.error
        and not any(
            each.code in ("canary-lost", "busy-machine", *HELD) for each in t.summary.verdict.warnings
        )
    ),
    "states.FAILED": lambda t: t.n("ok") == 0 or t.n_failed > t.manifest.max_failures * t.n("planned"),
    "states.CLIENT-BOUND": lambda t: t.unreliable(),
    "states.DISTURBED": _disturbed,
    "states.NOT-STATIONARY": lambda t: t.has("overloaded", "drifting", "never-settled"),
    "states.NOT-COMPARABLE": lambda t: t.has("beats-the-ceiling"),
    "states.COLD": lambda t: t.has("cold"),
    "states.INTERRUPTED": lambda t: t.n_cut_off > 0 or t.manifest.status in ("interrupted", "running"),
    "states.TOO SHORT": lambda t: t.value("instrument", "others_cpu_fraction") is None,
}
"""Of what a verdict means, by the state."""

OF_MEANINGS: Final[Mapping[str, Predicate]] = {
    **{
        f"meant_by.{code}": OF_REASONS[code]
        for code in ("died", "client-failed", "no-start", "no-request", "no-success", "mostly-failed",
                     "too-many-failures", "one-core", "slow-client", "instrument-error", "read-unknown",
                     "send-lag", "contradiction", "misread", "throttled", "gpu-throttled", "lossy-network")
    },
    **{f"meant_by.warned.{code}": OF_REASONS[code] for code in ("canary-lost", *HELD)},
    "meant_by.server-cpu": OF_REASONS["server-cpu"],
    "meant_by.warned.busy-machine": OF_REASONS["busy-machine.unwatched"],
    "meant_by.read-lag": lambda t: t.unreliable(sent=False)
    or OF_REASONS["read-lag.rates"](t)
    or OF_REASONS["read-lag.median"](t),
}  # fmt: skip
"""Of what a state means in this run, by the code of its first reason."""

OF_LIMITS: Final[Mapping[str, Predicate]] = {
    "limit.client": lambda t: not t.as_asked,
    "limit.in-flight": lambda t: t.is_open and t.has("overloaded"),
    "limit.overloaded": lambda t: t.is_open and t.has("overloaded") and t.has_queue,
    "limit.overloaded-batch": lambda t: (
        t.is_open
        and t.has("overloaded")
        and t.has_queue
        and t.slots is not None
        and t.most("concurrency", "server_running_max") >= t.slots
    ),
    "limit.refused": _has_failed("refused", "http_429", "http_503"),
    "limit.lost": lambda t: t.n("http_503") > 0 and t.n("reset", "truncated", "error_event") > 0,
    "limit.others": lambda t: 0 < t.n("ok") < t.n("planned"),
    "limit.load": lambda t: t.is_open and t.kept_up and t.as_asked,
    "limit.concurrency": lambda t: t.users is not None and t.is_watched and t.had_room and t.as_asked,
    "limit.concurrency-unwatched": lambda t: t.users is not None and not t.is_watched and t.as_asked,
    "limit.pauses": lambda t: (
        t.users is not None
        and t.manifest.asked.think_s is not None
        and t.most("concurrency", "mean") < t.users
        and t.had_room
        and t.as_asked
    ),
    "limit.one-in-flight": lambda t: t.in_flight <= 1 and t.as_asked,
    "limit.too-short": lambda t: (
        not t.is_watched or (t.is_open and t.value("throughput", "requests_per_s") is None)
    ),
    "limit.unsure": lambda t: t.most("throughput", "requests_per_s") < (t.manifest.asked.rate or 0),
    "limit.unknown": lambda t: not t.is_watched,
    "limit.listen-queue": lambda t: not t.is_watched and t.most("instrument", "network_retransmits") > 0,
    "limit.streams": lambda t: not t.is_watched and 0 < t.most("concurrency", "streaming_max") < t.in_flight,
    "limit.steps": lambda t: t.users is None and t.is_watched and t.had_room and t.as_asked,
    "limit.gaps": lambda t: t.manifest.asked.kind != "burst" and t.had_room and t.as_asked,
    "limit.batch": lambda t: t.slots is not None and _by_batch(t),
    "limit.kv-cache": lambda t: _full(t) and (t.waits or t.most("memory", "preemptions") > 0),
    "limit.token-budget": lambda t: t.waits and _has_kv_room(t) and not (t.slots and _by_batch(t)),
    "limit.own-batch": lambda t: t.slots is None and _by_batch(t),
    "limit.queue": lambda t: t.waits,
    "limit.ran": lambda t: (
        t.waits
        and t.most("concurrency", "server_running_max") < float(t.said.get("of", "inf").replace(",", ""))
    ),
}
"""Of what limited a run. `limit.ran` is the part that counts those who waited."""

OF_STEPS: Final[Mapping[str, Predicate]] = {
    "NEXT.interrupted": lambda t: t.manifest.status in ("interrupted", "running"),
    "NEXT.limit.overloaded": lambda t: not t.kept_up,
    "NEXT.limit.overloaded-batch": lambda t: not t.kept_up and t.slots is not None and _has_kv_room(t),
    "NEXT.limit.load": lambda t: t.is_open and t.kept_up,
    "NEXT.limit.concurrency": lambda t: t.users is not None and not t.missed("<="),
    "NEXT.limit.one-in-flight": lambda t: t.in_flight <= 1 and not t.missed("<="),
    "NEXT.limit.steps": lambda t: not t.is_watched or t.had_room or t.in_flight <= 1,
    "NEXT.limit.batch": lambda t: t.slots is not None and _by_batch(t) and _has_kv_room(t),
    "NEXT.limit.kv-cache": _full,
    "NEXT.limit.token-budget": OF_LIMITS["limit.token-budget"],
    "NEXT.limit.own-batch": lambda t: (_by_batch(t) and _has_kv_room(t)) or OF_LIMITS["limit.streams"](t),
    "NEXT.limit.listen-queue": OF_LIMITS["limit.listen-queue"],
    "NEXT.limit.queue": lambda t: t.waits,
    "NEXT.limit.too-short": lambda t: not t.is_watched or OF_LIMITS["limit.unsure"](t),
    "NEXT.limit.unknown": lambda t: not t.is_watched,
    "next.looser": lambda t: (
        t.missed("<=")
        and (t.in_flight <= 1 or t.users == 1 or t.kept_up or 0 < t.most("concurrency", "mean") < 1)
    ),
    "next.room": lambda t: t.waits and (t.slots or 0) < _raised(t) <= 1.1 * _kv_room(t),
    "next.all": lambda t: t.waits and (t.slots or 0) < _raised(t) <= 1.1 * _kv_room(t),
    "next.raise": lambda t: t.waits,
    "next.requests": lambda t: any(row.result == "inconclusive" for row in t.summary.targets),
    "next.slots": lambda t: t.slots is not None and t.slots <= t.in_flight,
    "next.lower": lambda t: t.missed("<=") and t.in_flight > 1 and t.manifest.asked.kind != "burst",
}
"""Of what to try next."""

OF_THE_REST: Final[Mapping[str, Predicate]] = {
    "advice.stop-others": lambda t: not t.manifest.server_here
    or t.value("instrument", "others_cpu_fraction") is None
    or t.most("instrument", "others_cpu_fraction") > 0.02,
    "advice.lower-load": _has_failed(*_LOWER),
    "advice.more-time": _has_failed("timeout"),
    "advice.rejected": lambda t: any(kind.startswith("http_4") for kind in t.summary.counts),
    "advice.one-stream": _has_failed("truncated"),
    "advice.natural": _has_failed("short"),
    "advice.first-failure": lambda t: t.n_failed > 0,
    "advice.why-failed": lambda t: t.n_failed > 0,
    "used-by-others": _share("instrument", "others_cpu_fraction", 0.05),
    "no-slo": lambda t: not t.summary.targets and not t.summary.goodput.criteria,
    "not-reconciled": lambda t: hasattr(t.summary.roofline, "absent"),
    "rates.of-succeeded": lambda t: t.n("ok") > 0,
    "rates.few": lambda t: int(t.said.get("n", "0")) < 0.1 * t.n("ok"),
    "rates.apart": lambda t: abs(
        t.most("throughput", "requests_per_s")
        * _point(t.summary.lengths.output_tok.served_mean)
        / (t.most("throughput", "output_tok_per_s") or 1)
        - 1
    )
    > 0.005,
    "tail.burst": lambda t: t.manifest.asked.kind == "burst"
    and 0 < (t.value("metrics", "e2e", "p95") or 0) < t.most("window", "end_s"),
    "slowest": lambda t: (t.value("metrics", "e2e", "p99") or 0)
    > 2.5 * (t.value("metrics", "e2e", "p50") or 1e9),
    "cut-short": lambda t: t.n_cut_off > 0 or t.manifest.status in ("interrupted", "running"),
    "trend.rose": _moved(1),
    "trend.fell": _moved(-1),
    "trend.none": lambda t: abs(t.most("stationarity", "ttft_change_fraction")) <= 0.1,
    "queue.rises": lambda t: t.most("burst", "ttft_slope_s_per_request") > 0,
}  # fmt: skip
"""Of sentences and advice that have no entry of their own in the tables, and of figures."""

PREDICATES: Final = {**OF_REASONS, **OF_STATES, **OF_MEANINGS, **OF_LIMITS, **OF_STEPS, **OF_THE_REST}
