"""What limited a run, and what to try next."""

import math
import re
from collections.abc import Sequence
from typing import Final

from burstline.measure.metrics.definitions import METRICS, PERCENTILES
from burstline.measure.metrics.slo import Slo, parse_slo
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.record import OVERLOADED, Outcome, lost_a_part
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import QUEUE_GREW, SLOW_CLIENT, State, Use, withheld
from burstline.measure.stats.estimates import early_stopping_floor
from burstline.measure.stats.figure import Absent, Estimate, Result, known
from burstline.measure.stats.significance import Answer as Decided
from burstline.measure.stats.significance import Contrast
from burstline.measure.verdict.factors import is_fitted
from burstline.measure.verdict.judge import LISTEN_QUEUE, SEND_LAG
from burstline.reports.model.comparison import E2E, Case, Contender, View
from burstline.reports.model.sweeps import Sweep
from burstline.reports.number_format import count, with_unit
from burstline.reports.page.sweep_words import next_loads, slo_words
from burstline.reports.sentences import NEXT, SET_BY, say, say_next, uncapitalised
from burstline.roofline.reconcile.reconciliation import Reconciliation
from burstline.servers.identity import Identity
from burstline.servers.registry import ENGINES
from burstline.wording import counted
from burstline.workloads.arrivals import ARRIVALS
from burstline.workloads.options import flag_of

QUEUED: Final = 0.25
"""Where on average a smaller share of the requests in flight waited in the server, its queue was no limit."""
PUNCTUAL: Final = 0.1
"""Requests sent late by a smaller share of the mean time between two are the load that was asked for."""
FULL: Final = 0.9
"""A KV cache in use to this share admits no more requests."""
LOW: Final = 0.05
"""A KV cache that was used less says too little of how many requests have room in it."""
BUSY: Final = 0.8
"""Users who pause and have a smaller share of their requests in flight could send more."""
NEARLY: Final = 0.9
"""So large a share counts as all: of requests by gauges read every so often, of replies, of a rate."""
REFUSED: Final = 0.01
"""Where a larger share of the requests was refused, that is the limit."""
BY_LOAD: Final = ("overloaded", "in-flight", "load", "concurrency", "pauses", "one-in-flight", "too-short")
"""The limits that another load would move: what a search has done already."""
OPEN: Final = Result.INCONCLUSIVE
MOST_TIMES: Final = 1000
"""By more no load is made longer to decide an SLO."""
BY_USERS: Final = ("limit.concurrency", "limit.pauses", "limit.one-in-flight")
"""Those after which more at once is advised, as far as the server has slots for them."""


def limit_of(
    summary: Summary,
    manifest: Manifest,
    who: Sequence[str] = (),
    *,
    brief: bool = False,
    hardware: bool = True,
) -> str:
    """What kept the run from being faster, as far as that was recorded: the load, the server, the hardware.

    `Limited by the batch limit of 64 requests (--max-num-seqs): at most 64 of 120 ran at once.`
    `who` names the servers where a page has several; `brief` leaves out how the limit shows, `hardware` adds
    what bounds the engine's steps. "" where not even the requests in flight are known.
    """
    code, values = limited_by(summary, manifest)
    if not code:
        return ""
    flag = _flag(code, manifest)
    values["flag"] = f" ({flag})" if flag and not who else ""
    names, each = listed(who) or "the server", " each" * (len(who) > 1)
    whose = {"who": f"{names}{each}", "whom": names, "it": each.strip() or "it"}
    text = say(code, **whose, **values)
    were = f"{names} {'were' if each else 'was'}{each} limited"
    text = re.sub("^Limited", were, text) if who else f"{text[:1].upper()}{text[1:]}"
    if brief:
        return f"{text.partition(':')[0]}."
    if code in ("limit.refused", "limit.lost"):
        code, values = limited_by(summary, manifest, refusals=False)
        others = say("limit.others", n=f"{summary.counts['ok']:,}")
        also = say(code, flag="", **whose, **values)
        if also.startswith("Limited"):  # one that had room at times refused others then
            text = f"{text}. {re.sub('^Limited', others, also)}"
    roofline = "" if code == "limit.client" or not hardware else used(summary)
    return " ".join(filter(None, (f"{text}.", roofline)))


def _flag(code: str, manifest: Manifest) -> str:
    """Our flag for this limit where we start the engine, else its own; "" where none is known."""
    engine, setting = ENGINES.get(manifest.engine), SET_BY.get(code, "")
    spelling = engine.settings.get(setting) if engine else None
    own = spelling.flags[-1] if spelling and spelling.flags else ""
    return flag_of(setting) if own and manifest.server and not manifest.server.attached else own


def limited_by(
    summary: Summary, manifest: Manifest, *, refusals: bool = True
) -> tuple[str, dict[str, object]]:
    """The load or the server, from the queue in the server and from how the load was paced.

    Returns the code of the sentence with its values; "" where not even the requests in flight are known.
    `refusals` says whether requests that the server refused count as a limit.
    """
    verdict, rate, lag_s = summary.verdict, manifest.asked.rate, known(summary.instrument.send_lag_p99_s)
    is_late = verdict.has(SEND_LAG) or verdict.state == State.CLIENT_BOUND
    if verdict.has(SEND_LAG) and rate and lag_s is not None:
        is_late = lag_s * rate > PUNCTUAL
    if is_late or verdict.has(SLOW_CLIENT):
        return "limit.client", {}
    most, counts = known(summary.concurrency.max), summary.counts
    if most is None:
        return "", {}
    refused = sum(n for kind, n in counts.items() if kind in OVERLOADED)
    if refusals and refused > REFUSED * counts["planned"]:
        code = "limit.lost" if lost_a_part(counts) else "limit.refused"
        return code, {"n": f"{refused:,} of {counted(counts['planned'], 'request')}"}
    waiting, at_a_time = summary.concurrency.server_waiting_mean, manifest.asked.concurrency
    if verdict.has(QUEUE_GREW):
        code, told = _batch(summary, manifest, most)
        if (known(waiting) or known(summary.concurrency.server_waiting_max) or 0) < 1:
            return "limit.in-flight", {}  # its own count knows of no queue
        return ("limit.overloaded-batch", told) if code == "limit.batch" else ("limit.overloaded", {})
    level = isinstance(summary.stationarity.in_flight_trend_p, Estimate)
    sent = counts["planned"] - counts.get(Outcome.NOT_SENT, 0) * verdict.is_interrupted
    kept = sum(counts.get(kind, 0) for kind in ("ok", Outcome.ABANDONED)) / (sent or 1)
    level = level and kept >= NEARLY and verdict.state != State.NOT_STATIONARY
    if at_a_time is None and level and not _is_queued(summary, manifest.identity, most):
        may_wait = isinstance(waiting, Absent) or waiting.point >= 1
        if may_wait and isinstance(summary.throughput.requests_per_s, Absent):
            return "limit.too-short", {}
        arrivals = ARRIVALS[manifest.asked.pattern].title
        load = f"{arrivals} at {rate:g} req/s" if rate else arrivals
        return "limit.load", {"load": load, "most": counted(most, "request")}
    # A request that is sent as another's reply closes may overlap with it for a moment.
    in_flight = min(most, at_a_time or most)
    if _is_queued(summary, manifest.identity, in_flight) or known(summary.memory.preemptions):
        return _batch(summary, manifest, in_flight)
    mean = known(summary.concurrency.mean)
    if at_a_time and manifest.asked.think_s and mean is not None and mean < BUSY * at_a_time:
        return "limit.pauses", {"mean": f"{mean:.1f}", "n": counted(at_a_time, "user")}
    n, is_all = counted(in_flight, "request"), in_flight == at_a_time
    if in_flight <= 1 and not is_all:
        return "limit.one-in-flight", {}
    if isinstance(waiting, Absent):
        if any(each.code == LISTEN_QUEUE for each in verdict.warnings):
            return "limit.listen-queue", {"n": n}
        if streams := known(summary.concurrency.streaming_max):
            return "limit.streams", {"n": count(streams), "most": n, "reason": waiting.reason}
        code = "limit.too-short" if waiting.code == "too-short" else "limit.unknown"
        return "limit.concurrency-unwatched" if is_all else code, {"n": n, "reason": waiting.reason}
    by = f" ({waiting.note})" if waiting.note else ""
    waits = f", of which {waiting.point:,.1f} on average waited for their prefill{by}"
    running = known(summary.concurrency.server_running_max) or 0
    values: dict[str, object] = {
        "n": n,
        "all": "all" if not waiting.point or running >= in_flight else "nearly all",
        "waits": waits if waiting.point >= 0.05 else "",
    }
    served = known(summary.throughput.requests_per_s)
    if served and rate and served < NEARLY * rate * kept:  # too few requests for a trend of those in flight
        return "limit.unsure", {"served": f"{served:.3g}", "rate": f"{rate:g}"}
    alone = "limit.steps" if manifest.asked.kind == "burst" else "limit.gaps"
    return "limit.concurrency" if is_all else alone, values


def _is_queued(summary: Summary, identity: Identity | None, in_flight: float) -> bool:
    """Whether requests waited in the server: many, or most of those for whom its full batch had no slot."""
    gauges, slots = summary.concurrency, identity.max_num_seqs if identity else None
    waiting, running = known(gauges.server_waiting_mean), known(gauges.server_running_max) or 0
    if slots and waiting and slots <= running < in_flight and waiting >= QUEUED * (in_flight - slots):
        return True
    many = max(1.0, QUEUED * (known(gauges.mean) or in_flight))
    return waiting is not None and waiting >= many and running < NEARLY * in_flight


def _batch(summary: Summary, manifest: Manifest, in_flight: float) -> tuple[str, dict[str, object]]:
    """What the server's queue waited for: its batch limit, its KV cache, or the tokens of a step.

    A scheduler admits a request unless one of the three is used up, so where two are known to have room it is
    the third. A limit that the run did not reach is not named.
    """
    identity = manifest.identity or Identity(manifest.engine)
    running = known(summary.concurrency.server_running_max)
    kv, preempted = known(summary.memory.kv_peak_fraction), known(summary.memory.preemptions) or 0
    slots, budget = identity.max_num_seqs, identity.max_num_batched_tokens
    full_fraction = known(summary.concurrency.server_full_fraction)
    seldom = full_fraction is not None and full_fraction < 0.5
    if running and slots and running >= slots and not (preempted or seldom):
        code = "limit.batch"
    elif preempted or (kv is not None and not _has_room(summary, kv, identity.kv_tok)):
        code = "limit.kv-cache"
    elif running and slots and budget and kv is not None:
        code = "limit.token-budget"
    else:
        code = "limit.own-batch" if running and not (slots or seldom) else "limit.queue"
    ran = "many requests waited in it"
    if running:
        is_below = code == "limit.queue" and slots is not None and running < slots
        below = f", below the batch limit of {slots:,}," if is_below else ""
        # Those that failed may never have been in the queue.
        asked = summary.counts.get("ok", in_flight) if manifest.asked.kind == "burst" else in_flight
        is_rest = running < asked and known(summary.concurrency.server_waiting_mean)
        fewer = ", and fewer for most of the time in which others waited"
        rest = f"{below}{fewer if seldom else ' and the rest waited'}" * bool(is_rest)
        read = say("gauge.read") * (running < min(asked, slots or asked))
        ran = f"at most {count(running)} of {count(asked)} requests ran at once{read}{rest}"
    full = f", with the KV cache up to {kv:.0%} full" if kv is not None and kv >= 0.005 else ""
    again = f" and {counted(preempted, 'preemption')}" if preempted else ""
    limits = {"slots": counted(slots or 0, "request"), "budget": f"{budget or 0:,}"}
    return code, {**limits, "ran": f"{ran}{full}{again}"}


def _has_room(summary: Summary, kv: float, kv_tok: int | None) -> bool:
    """Whether the fullest KV cache had room for one more prompt of the mean length."""
    rate, tokens = known(summary.throughput.requests_per_s), known(summary.throughput.input_tok_per_s)
    prompt = tokens / rate if rate and tokens else 0.0
    return kv < FULL and (kv_tok is None or (1 - kv) * kv_tok >= prompt)


def used(summary: Summary) -> str:
    """What bounds the steps that took most of the time, and how nearly; "" where rates are in doubt."""
    found = summary.roofline
    if not isinstance(found, Reconciliation) or found.suspicions or not found.phases:
        return ""
    row = max(found.phases, key=lambda phase: phase.seconds)
    share = row.seconds / (sum(phase.seconds for phase in found.phases) or 1.0)
    kind = "steps that include prefill" if row.phase == "prefill" else "decode-only steps"
    of = f"{share:.0%} of the engine's time went to {kind}" if len(found.phases) > 1 else f"All were {kind}"
    return f"{of}; these are {row.use(found.device)}."


def limits_of(cases: Sequence[Case], *, brief: bool = False) -> list[str]:
    """What limited each contender's first run, where that is known; the same limit is said once."""
    who: dict[str, list[Contender]] = {}
    for case in (case for case in cases if case.gate.comparable or case.is_alone):
        for contender in case.contenders:
            view = contender.views[0]
            if limit := limit_of(view.summary, view.manifest, [""], brief=brief):
                who.setdefault(limit, []).append(contender)
    lines = []
    for own in who.values():
        view, names = own[0].views[0], list(dict.fromkeys(each.label for each in own))
        lines.append(limit_of(view.summary, view.manifest, names, brief=brief))
    return [f"{lines[0]} {not_why(cases)}".rstrip()] if len(lines) == 1 and not brief else lines


def not_why(cases: Sequence[Case]) -> str:
    """That it is unknown why engines differ in speed, where they do for certain."""
    found = (contrasts.get(E2E.path) for case in cases for _, contrasts in case.pairs())
    differ = any(isinstance(each, Contrast) and each.answer == Decided.DIFFERENT for each in found)
    return say("limit.not-why") if differ and _are_engines(cases) else ""


def _are_engines(cases: Sequence[Case]) -> bool:
    return len({each.views[0].manifest.engine for case in cases for each in case.contenders}) > 1


def limits_at_the_top(sweep: Sweep, cases: Sequence[Case]) -> list[str]:
    """What limited the contenders at the highest load whose runs compare; [] if none is reliable."""
    if all(at.doubts for at in sweep.points):
        return []
    known = ((case.name, limits_of([case], brief=True)) for case in reversed(cases))
    name, shown = next(((name, shown) for name, shown in known if shown), ("", []))
    why = f" {say('limit.not-why')}" if _are_engines(cases) else ""
    return [f"At {name}: {'; '.join(shown).replace('.;', ';')}{why}"] if name and shown else []


def next_step(cases: Sequence[Case]) -> str:
    """What makes the runs comparable, else the difference sure, else the fastest faster; "" if not known."""
    several = [case for case in cases if len(case.contenders) > 1]
    for reason in (case.gate.reasons[0] for case in several if not case.gate.comparable):
        return say_next(reason.advice)
    verdicts = (view.summary.verdict for case in several for view in case.views)
    for verdict in (each for each in verdicts if each.reasons and withheld(each, Use.RANKED)):
        return say_next(verdict.reasons[0].advice)
    leads = [
        (pair, each)
        for case in several
        for pair, own in case.pairs()[:1]
        if isinstance(each := own.get(E2E.path), Contrast)
    ]
    if any(each.noise is None for _, each in leads):
        return say("next.repeat")
    if close := [(pair, each) for pair, each in leads if each.answer == Decided.INCONCLUSIVE]:
        more = max(each.more_runs or 0 for _, each in close)
        names = listed(list(dict.fromkeys(name for pair, _ in close for name in pair)))
        per = " per workload" * (len(several) > 1)
        times, n = counted(more, "more time"), more * 2 * len(close)
        return say("next.more", names=names, times=times, per=per, n=n) if n else ""
    if any(view.summary.verdict.state != State.VALID for case in cases for view in case.views):
        return ""
    steps = {_next_of(case) for case in cases}
    return steps.pop() if len(steps) == 1 else ""


def _next_of(case: Case) -> str:
    """What to try next at the fastest; for all at once where they have the same limit, to keep it equal."""
    fastest = min(case.contenders, key=lambda each: each.e2e_s)
    manifests = [each.views[0].manifest for each in case.contenders]
    limits = [limited_by(each.views[0].summary, each.views[0].manifest)[0] for each in case.contenders]
    flags = [_flag(code, manifest) for code, manifest in zip(limits, manifests, strict=True)]
    if len(set(limits)) == 1 < len({manifest.engine for manifest in manifests}) and all(flags):
        own = [f"{flag} of {label}" for flag, label in zip(flags, case.labels, strict=True)]
        return say_next(_raise(listed(own), limits[0], [each.views[0] for each in case.contenders]))
    return next_by(fastest.views[0], fastest.label if len(case.contenders) > 1 else "")


def next_by(view: View, who: str = "") -> str:
    """What to try next, by what limited the run; `who` names the server of several."""
    if view.summary.verdict.is_interrupted:
        return say_next(NEXT["interrupted"])
    code = limited_by(view.summary, view.manifest)[0]
    code = "limit.kv-cache" if code.endswith("batch") and not _room(view) else code
    step, flag = NEXT.get(code, ""), _flag(code, view.manifest)
    by_load = code.startswith(BY_USERS) or view.manifest.asked.rate is not None
    if looser := out_of_reach(view):
        step = looser
    elif view.manifest.is_probe:  # its search has tried other loads
        is_load = code.removeprefix("limit.").removesuffix("-unwatched") in BY_LOAD
        step, flag = (NEXT["limit.steps"], "") if is_load else (step, flag)
    elif by_load and any(slo.op == "<=" for slo in _missed(view.summary)):
        is_one = (known(view.summary.concurrency.max) or 0) <= 1
        step, flag = NEXT["limit.steps"] if is_one else say("next.lower"), ""
    elif more := _more(view):
        step, flag = more, ""
    elif code.startswith(BY_USERS) and (slots := _full_slots(view)):
        by = "rate" if view.manifest.asked.rate else "concurrency"
        step = say("next.slots", load=flag_of(by), slots=slots)
    if flag:
        step = _raise(f"{flag} of {who}" if who else flag, code, [view])
    return say_next(step)


def _more(view: View) -> str:
    """To send as many requests as the first SLO takes that too few leave open; "" where none does."""
    asked, summary = view.manifest.asked, view.summary
    for slo, seen in ((parse_slo(r.target), r.measured) for r in summary.targets if r.result == OPEN):
        mean, needed = summary.figure("metrics", slo.metric, "mean"), 0.0
        if isinstance(seen, Absent) and slo.statistic in PERCENTILES and isinstance(mean, Estimate):
            seen, needed = mean, early_stopping_floor(slo.p)
        elif isinstance(seen, Estimate) and seen.low is not None and seen.high is not None:
            half, gap = max(seen.high - seen.point, seen.point - seen.low), abs(slo.bound - seen.point)
            needed = seen.n * (half / (gap or math.inf)) ** 2
        if isinstance(seen, Estimate) and seen.n < needed < MOST_TIMES * seen.n:
            name = next((name for name in ("duration_s", "sessions") if getattr(asked, name)), "requests")
            n = math.ceil((getattr(asked, name) or summary.counts["planned"]) * needed / seen.n)
            return say("next.requests", flag=flag_of(name), n=n, slo=slo_words(slo))
    return ""


def _full_slots(view: View) -> str:
    """The server's batch limit, where as many ran as it has slots and these do not follow from the load."""
    manifest, most = view.manifest, known(view.summary.concurrency.max) or 0
    slots = manifest.identity.max_num_seqs if manifest.identity else None
    if not slots or slots > min(most, manifest.asked.concurrency or most) or is_fitted(manifest):
        return ""
    return f"{counted(slots, 'request')} ({_flag('limit.batch', manifest)})".removesuffix(" ()")


def _raise(flags: str, code: str, views: Sequence[View]) -> str:
    """To raise a limit; one of the batch only as far as each server's KV cache and the load allow."""
    if not code.endswith("batch"):
        return say("next.raise", flags=flags)
    in_flight = min(known(view.summary.concurrency.max) or math.inf for view in views)
    room = min(map(_room, views))
    if room < in_flight:
        step = 10 ** max(0, len(f"{int(room)}") - 2)  # two digits, and never more than have room
        n = f"{int(room) // step * step:,}"
        return say("next.room", flags=flags, n=n) if room else NEXT["limit.kv-cache"]
    return say("next.all" if in_flight < math.inf else "next.raise", flags=flags, n=count(in_flight))


def _room(view: View) -> float:
    """About how many requests have room in the KV cache at once; 0: no more than ran; infinite: not known."""
    summary = view.summary
    running, kv = known(summary.concurrency.server_running_max), known(summary.memory.kv_peak_fraction)
    room = running / kv if running and kv and kv > LOW else math.inf
    return room if (kv or 0) < FULL and room >= (running or 0) + 1 else 0.0


def out_of_reach(view: View) -> str:
    """To loosen the first SLO that the fastest request misses where the server kept up; "" without one."""
    summary, code = view.summary, limited_by(view.summary, view.manifest)[0]
    mean, most = known(summary.concurrency.mean), known(summary.concurrency.max) or 0
    is_alone = most <= 1 or (mean is not None and mean < 1)
    if code != "limit.load" and (not is_alone or code in ("limit.client", "limit.refused", "limit.lost")):
        return ""
    for slo in _missed(summary):
        low, high = (summary.figure("metrics", slo.metric, end) for end in ("min", "max"))
        if slo.statistic and slo.op == "<=" and isinstance(low, Estimate) and low.point > slo.bound:
            up_to = (
                say("next.most", most=with_unit(high)) if isinstance(high, Estimate) and known(high) else ""
            )
            values = {"metric": METRICS[slo.metric].title, "least": with_unit(low), "most": up_to}
            return say("next.looser", slo=slo_words(slo), **values)
    return ""


def next_of_sweep(sweep: Sweep, cases: Sequence[Case]) -> str:
    """The loads to run next, or how to get reliable ones; an SLO out of reach at the lowest is loosened."""
    if all(at.doubts for at in sweep.points):
        return next((say_next(r.advice) for r in cases[0].views[0].summary.verdict.reasons if r.advice), "")
    missed = {at.label for at in sweep.points if at.missed and at.load == sweep.loads[0]}
    found = [out_of_reach(own.views[0]) for own in cases[0].contenders if own.label in missed]
    return next_loads(sweep, say_next(found[0]) if found and all(found) else "")


def _missed(summary: Summary) -> list[Slo]:
    return [parse_slo(each.target) for each in summary.targets if each.result == Result.FAIL]


def limit_at(load: str, view: View) -> tuple[str, str]:
    """What limited a probe at its load; and what to try, "" if not known: no other load."""
    limit = limit_of(view.summary, view.manifest) or say("limit.not-measured")
    return f"At {load}: {uncapitalised(limit)}", next_by(view)


def listed(names: Sequence[str]) -> str:
    """`vllm, tgi and lightllm`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
