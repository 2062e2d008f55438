"""What a page or a terminal says first: how fast it was, what limited it or failed, who is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from burstline.loadgen.record.manifest import Manifest
from burstline.loadgen.record.record import OUTCOME_WORDS, Outcome, failed
from burstline.loadgen.record.summary import Summary
from burstline.loadgen.record.verdict import State
from burstline.loadgen.stats.figure import Absent, Estimate, Figure
from burstline.loadgen.stats.significance import Answer as Decided
from burstline.loadgen.stats.significance import Contrast
from burstline.reports.blocks import Answer
from burstline.reports.model.comparison import (
    E2E,
    OUTPUT,
    TITLES,
    Case,
    Comparison,
    Contender,
    Contrasts,
    Pair,
    Path,
    View,
)
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.number_format import count, counted, duration, number, point, scale_of
from burstline.reports.page.side_by_side import times_of, why_open
from burstline.reports.page.sweep_words import best_loads, limits
from burstline.reports.sentences import say
from burstline.roofline.reconcile.reconciliation import Reconciliation
from burstline.servers.identity import Identity

QUEUED: Final = 0.25
"""Where on average a smaller share of the requests in flight waited in the server, its queue was no limit."""
FULL: Final = 0.9
"""A KV cache in use to this share admits no more requests."""
STRAGGLERS: Final = 0.75
"""A burst that had served 95% of its requests in a smaller share of its time ended with stragglers."""
SAMPLED: Final = 0.9
"""Gauges are read every so often: requests seen to run to this share of those in flight were all of them."""
MEMORY: Final[Sequence[tuple[str, Path]]] = (
    ("GPU memory", ("memory", "device_peak_bytes")),
    ("server memory", ("memory", "server_peak_bytes")),
)
"""The first that is known stands in the first sentence."""
MOST_LISTED: Final = 4
"""Of more cases than this the first lines name only the overall winner: the table below has each."""


def answer(comparison: Comparison) -> Answer:
    """One sentence over all that is shown, and under it what limits it, or each of several cases."""
    view = comparison.run
    return _of_cases(comparison) if view is None else _of_run(view, comparison.cases[0].contenders[0])


def _of_run(view: View, contender: Contender) -> Answer:
    """The sentence, and under it what was cut off or failed, what limited the run, and the slow tail."""
    summary = view.summary
    if not view.has_served:
        return Answer(f"Nothing was served: {cause(view)}")
    if summary.verdict.state == State.FAILED and (why := _failure(summary)):
        details = [_cut_short(summary), served(contender)]
        return Answer(why, tuple(filter(None, details)))
    limit = limit_of(summary, view.manifest)
    details = [_cut_short(summary), _failures(summary), limit, _tail(summary, view.manifest)]
    return Answer(served(contender), tuple(filter(None, details)))


def served(contender: Contender) -> str:
    """`Served 34.0 req/s, 2,170 output tok/s; median first token 13.7 s, then 115 ms per token.`"""
    rate = _of(contender.figure("throughput", "requests_per_s"))
    tokens = _of(contender.figure(*OUTPUT.path))
    first, each = (_of(contender.figure("metrics", name, "p50")) for name in ("ttft", "tpot"))
    rates = [f"{number(rate)} req/s" if rate else "", f"{number(tokens)} output tok/s" if tokens else ""]
    waits = [
        f"median first token {duration(first)}" if first else "",
        f"then {duration(each)} per token" if each else "",
    ]
    text = "; ".join(filter(None, (", ".join(filter(None, group)) for group in (rates, waits))))
    return f"Served {text}." if rates[0] else f"{text[:1].upper()}{text[1:]}."


def cause(view: View) -> str:
    """Why nothing was served: what the run's own error says, else how requests ended and the first error."""
    if view.manifest.error:
        return view.manifest.error
    outcomes = Counter(str(outcome) for outcome in view.words("outcome"))
    if not outcomes:
        return "the plan has no requests."
    words = next((error for error in view.words("error") if error), "")
    in_log = f"the server's log says {view.log_cause.rstrip('.')}; " if view.log_cause else ""
    n = len(view.columns)
    requests = f"all {n:,} requests" if n > 1 else "the one request"
    first, *others = outcomes
    if not others:
        ended = OUTCOME_WORDS.get(first, f"ended as {first}")
        return f"{in_log}{requests} {ended}{f': {words}' if words else ''}."
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in outcomes.most_common())
    return f"{in_log}{requests} failed ({kinds}){f'; first error: {words}' if words else ''}."


def limit_of(summary: Summary, manifest: Manifest) -> str:
    """What kept the run from being faster, as far as that was recorded: the load, the server, the hardware.

    `Limited by the load: the server kept up with 20 req/s, with at most 5 requests in flight.` "" where not
    even the requests in flight are known.
    """
    if summary.verdict.state == State.CLIENT_BOUND:
        return f"{say('limit.client')}."
    in_flight = summary.concurrency.max
    if isinstance(in_flight, Absent):
        return ""
    return (
        f"{'; '.join(filter(None, (_limited_by(summary, manifest, in_flight.point), _roofline(summary))))}."
    )


def _limited_by(summary: Summary, manifest: Manifest, in_flight: float) -> str:
    """The load or the server, from the queue in the server and from how the load was paced."""
    waiting, at_a_time = summary.concurrency.server_waiting_mean, manifest.concurrency
    if any(reason.code == "overloaded" for reason in summary.verdict.reasons):
        return say("limit.overloaded")
    level = isinstance(summary.stationarity.in_flight_trend_p, Estimate)
    if at_a_time is None and level and summary.verdict.state != State.NOT_STATIONARY:
        asked = manifest.arrivals.rate_per_s if manifest.arrivals else None
        load = f"{asked:g} req/s" if asked else "the arrivals"
        return say("limit.load", load=load, most=counted(in_flight, "request"))
    # A request that is sent as another's reply closes may overlap with it for a moment.
    in_flight = min(in_flight, at_a_time or in_flight)
    if _is_queued(summary, in_flight):
        return _batch(summary, manifest, in_flight)
    if in_flight == at_a_time == 1:
        return say("limit.one-at-a-time")
    n, waits = counted(in_flight, "request"), _waits(waiting)
    if in_flight == at_a_time:
        return say("limit.concurrency", n=n, waits=waits)
    if in_flight <= 1:
        return say("limit.one-in-flight")
    if isinstance(waiting, Absent):
        return say("limit.unknown", reason=waiting.reason)
    return say("limit.steps" if _is_burst(manifest) else "limit.gaps", n=n, waits=waits)


def _is_burst(manifest: Manifest) -> bool:
    arrivals = manifest.arrivals
    return manifest.concurrency is None and (arrivals is None or arrivals.pattern == "burst")


def _is_queued(summary: Summary, in_flight: float) -> bool:
    """Whether many requests waited in the server, and not all of them ever ran at once."""
    gauges = summary.concurrency
    waiting, running = _of(gauges.server_waiting_mean), _of(gauges.server_running_max)
    many = max(1.0, QUEUED * (_of(gauges.mean) or in_flight))
    return waiting is not None and waiting >= many and (running or 0) < SAMPLED * in_flight


def _waits(waiting: Figure) -> str:
    if isinstance(waiting, Absent):
        return f"but whether any waited in the server is not known ({waiting.reason})"
    if not waiting.point:
        return "none of which waited in the server"
    n = f"{waiting.point:,.1f} on average" if waiting.point >= 0.05 else "almost none"
    return f"of which {n} waited in the server"


def _batch(summary: Summary, manifest: Manifest, in_flight: float) -> str:
    """What the server's queue waited for: its batch limit, its KV cache, or the tokens of a step.

    A scheduler admits a request unless one of the three is used up, so where two are known to have room it is
    the third. A limit that the run did not reach is not named.
    """
    identity = manifest.identity or Identity(manifest.engine)
    running = _of(summary.concurrency.server_running_max)
    kv, preempted = _of(summary.memory.kv_peak_fraction), _of(summary.memory.preemptions) or 0
    slots, budget = identity.max_num_seqs, identity.max_num_batched_tokens
    if running and slots and running >= slots:
        code = "limit.batch"
    elif preempted or (kv is not None and not _has_room(summary, kv, identity.kv_tok)):
        code = "limit.kv-cache"
    elif running and slots and budget and kv is not None:
        code = "limit.token-budget"
    else:
        code = "limit.own-batch" if running and not slots else "limit.queue"
    ran = "many requests waited in it"
    if running:
        below = f", below the batch limit of {slots:,}," if slots and code == "limit.queue" else ""
        asked = summary.counts.get("planned", in_flight) if _is_burst(manifest) else in_flight
        ran = f"at most {count(running)} of {count(asked)} requests ran at once{below} and the others waited"
    full = f", with the KV cache up to {kv:.0%} full" if kv is not None else ""
    again = f" and {counted(preempted, 'preemption')}" if preempted else ""
    return say(
        code, slots=counted(slots or 0, "request"), budget=f"{budget or 0:,}", ran=f"{ran}{full}{again}"
    )


def _has_room(summary: Summary, kv: float, kv_tok: int | None) -> bool:
    """Whether the fullest KV cache had room for one more prompt of the mean length."""
    rate, tokens = _of(summary.throughput.requests_per_s), _of(summary.throughput.input_tok_per_s)
    prompt = tokens / rate if rate and tokens else 0.0
    return kv < FULL and (kv_tok is None or (1 - kv) * kv_tok >= prompt)


def _roofline(summary: Summary) -> str:
    """What bounds the steps that took most of the time, and how near to that bound they came.

    "" where rates are in doubt.
    """
    found = summary.roofline
    if not isinstance(found, Reconciliation) or found.suspicions or not found.phases:
        return ""
    row = max(found.phases, key=lambda phase: phase.seconds)
    bound = next(iter(row.limit_shares), None)
    if bound is None:
        return ""
    use = {"compute": row.mfu, "memory": row.mbu}.get(bound)
    share = row.seconds / (sum(phase.seconds for phase in found.phases) or 1.0)
    kind = "steps with prefill" if row.phase == "prefill" else "decode-only steps"
    of = f"{kind}, {share:.0%} of the time of all steps," if len(found.phases) > 1 else kind
    steps = f"its {of} are {bound}-bound"
    if use is None or use.measured is None or not 0 < use.measured <= use.ceiling:
        return f"{steps}, by the roofline model"
    what = {"compute": "arithmetic", "memory": "memory bandwidth"}[bound]
    return f"{steps} and reach {use.measured / use.ceiling:.0%} of the {what} that the device can give"


def _interrupted(summary: Summary) -> bool:
    return any(warning.code == "interrupted" for warning in summary.verdict.warnings)


def _cut_short(summary: Summary) -> str:
    if not _interrupted(summary):
        return ""
    ok, planned = summary.counts["ok"], summary.counts["planned"]
    n_cut = summary.counts.get(Outcome.CANCELLED, 0)
    is_whole = isinstance(summary.window.warm_up_s, Absent)
    counts = "count" if is_whole else "count, where they were due in the counted window,"
    late = f"; the {n_cut:,} that it cut off {counts} as infinitely late" if n_cut else ""
    return f"The run was interrupted after {ok:,} of {planned:,} requests{late}. Run it again to its end."


def _failure(summary: Summary) -> str:
    """Why a run that served something has FAILED."""
    reason = next(iter(summary.verdict.reasons), None)
    return reason.text if reason and reason.code == "died" else _failed(summary)


def _failures(summary: Summary) -> str:
    text = _failed(summary)
    return f"{text.rstrip('.')}; they count as infinitely late." if text else ""


def _failed(summary: Summary) -> str:
    kinds = Counter(failed(summary.counts, interrupted=_interrupted(summary)))
    if not kinds:
        return ""
    listed = ", ".join(f"{n:,} {OUTCOME_WORDS.get(kind, kind)}" for kind, n in kinds.most_common(3))
    return f"{kinds.total():,} of {counted(summary.counts['planned'], 'request')} failed ({listed})."


def _tail(summary: Summary, manifest: Manifest) -> str:
    """Where the slowest requests stand out: p99 at least three times the median, or the end of a burst."""
    median, most, tail = (_of(summary.figure("metrics", "e2e", p)) for p in ("p50", "p95", "p99"))
    end = _of(summary.window.end_s)
    if _is_burst(manifest) and most and end and most < STRAGGLERS * end:
        return (
            f"The last 5% of the requests made the run last {duration(end)}: the others had ended after "
            f"{duration(most)}. The throughput counts the whole time."
        )
    if not median or not tail or tail < 3 * median:
        return ""
    times = number(tail / median)
    return f"The slowest 1% take at least {duration(tail)}, {times} times the median ({duration(median)})."


def _of(figure: Figure) -> float | None:
    return figure.point if isinstance(figure, Estimate) and figure.point < float("inf") else None


def _of_cases(comparison: Comparison) -> Answer:
    swept = sweeps_in(comparison.cases)
    lines = []
    for sweep, cases in swept:
        of = f"{sweep.name}: " if len(swept) > 1 else ""
        lines += [
            f"{of}{words}" for words in (best_loads(sweep), limits(sweep), *_at_the_top(cases)) if words
        ]
    apart = [case for case in comparison.cases if not any(case in cases for _, cases in swept)]
    if len(apart) == 1 and not lines:
        first, *others = _sentences(apart[0])
        return Answer(first, (*others, *limits_of(apart)))
    lines += [f"{case.name}: {sentence(case)}" if case.name else sentence(case) for case in apart]
    if not lines:
        return Answer(say("nothing"))
    overall = "" if swept else _overall(comparison.cases)
    if not overall:
        return Answer(lines[0], tuple(lines[1:]))
    common = limits_of(apart)
    if len(lines) > MOST_LISTED:
        return Answer(overall, tuple(common if len(common) == 1 else ()))
    return Answer(overall, (*lines, *(common if len(common) == 1 else _limits_by_case(apart))))


def _overall(cases: Sequence[Case]) -> str:
    """Who has the lowest E2E p50 in most cases, and in how many for certain; "" where nothing is ranked."""
    ranked = [case for case in cases if case.gate.comparable and len(case.contenders) > 1]
    leaders = [min(case.contenders, key=lambda each: each.e2e_s).label for case in ranked]
    if not leaders:
        return ""
    first = max(dict.fromkeys(leaders), key=leaders.count)
    n, n_sure = leaders.count(first), sum(case.best(E2E) == first for case in ranked)
    if n_sure < n:
        sure = say("lead", n=n_sure) if n_sure else say("no-lead")
        return say("lowest", first=first, n=n, cases=len(cases), sure=sure)
    leads = sorted(
        min(each.e2e_s for each in case.contenders if each.label != first) / case.named(first).e2e_s
        for case in ranked
        if case.best(E2E) == first
    )
    low, high = number(leads[0]), number(leads[-1])
    by = f"{low}x" if low == high else f"{low}x to {high}x"
    others = {label for case in ranked for label in case.labels} - {first}
    next_ = others.pop() if len(others) == 1 else "the next"
    return say("fastest", first=first, n=n, cases=len(cases), by=by, next=next_)


def limits_of(cases: Sequence[Case], *, brief: bool = False) -> list[str]:
    """What limited each contender's first run, where that is known; the same limit is said once."""
    who: dict[str, list[str]] = {}
    for case in (case for case in cases if case.gate.comparable or case.is_alone):
        for contender in case.contenders:
            view = contender.views[0]
            limit = limit_of(view.summary, view.manifest) if _is_limit_known(view.summary) else ""
            if limit:
                who.setdefault(limit.partition(":")[0] if brief else limit, []).append(contender.label)
    return [f"{', '.join(dict.fromkeys(own))}: {limit[0].lower()}{limit[1:]}" for limit, own in who.items()]


def _at_the_top(cases: Sequence[Case]) -> list[str]:
    """What limited the contenders at the highest load whose runs compare."""
    known = ((case.name, limits_of([case], brief=True)) for case in reversed(cases))
    name, shown = next(((name, shown) for name, shown in known if shown), ("", []))
    return [f"With {name}: {'; '.join(shown)}."] if name and shown else []


def _limits_by_case(cases: Sequence[Case]) -> list[str]:
    """The limit of each case, short where its contenders' limits differ: its section has them in full."""
    lines = []
    for case in cases:
        known = limits_of([case])
        known = limits_of([case], brief=True) if len(known) > 1 else known
        if known:
            lines.append(f"{case.name}: {'; '.join(known).rstrip('.')}.")
    return lines


def _is_limit_known(summary: Summary) -> bool:
    """Whether the server's queue was recorded, or whether requests in flight stayed level."""
    known = (summary.concurrency.server_waiting_mean, summary.stationarity.in_flight_trend_p)
    return any(isinstance(figure, Estimate) for figure in known)


def sentence(case: Case) -> str:
    """`vllm is 1.48x faster than tgi (E2E p50), 95% CI [1.29, 1.69].`"""
    pairs = case.pairs()
    if not pairs or not case.gate.comparable:
        return _sentences(case)[0]
    return f"{pair_words(*pairs[0], others=False)}."


def _sentences(case: Case) -> list[str]:
    """The fastest against the runner-up, then against each other contender.

    `vllm is 1.48x faster than tgi (E2E p50), 95% CI [1.29, 1.69]; output 1.31x higher; GPU memory equal.`
    """
    first, *others = case.contenders
    if not others:
        return [f"{first.label}: {served(first)}"]
    if not case.gate.comparable:
        why = next((reason.text.rstrip(".") for reason in case.gate.reasons), case.gate.state)
        return [say("not-compared", why=why), f"{'; '.join(map(_own, case.contenders))}."]
    return [f"{pair_words(pair, contrasts)}." for pair, contrasts in case.pairs()]


def _own(contender: Contender) -> str:
    figure = contender.figure(*E2E.path)
    if isinstance(figure, Absent):
        return say("no-e2e", label=contender.label)
    scale = scale_of([figure])
    return f"{contender.label} {point(figure, scale)} {scale.unit} (E2E p50)"


def pair_words(pair: Pair, contrasts: Contrasts, *, others: bool = True) -> str:
    """How much faster the first is, with the `others`: output and memory."""
    memory = next((own for own in MEMORY if isinstance(contrasts.get(own[1]), Contrast)), MEMORY[0])
    also = (("output", OUTPUT.path), memory) if others else ()
    parts = (_also(name, path, contrasts.get(path)) for name, path in also)
    text = "; ".join(filter(None, (_faster(pair, contrasts), *parts)))
    e2e = contrasts.get(E2E.path)
    if not isinstance(e2e, Contrast) or e2e.noise is not None:
        return text
    return f"{text}: {why_open(e2e, contrasts)}"


def _also(name: str, path: Path, contrast: Contrast | Absent | None) -> str:
    """`output 1.31x higher`; "" where it is not known."""
    if not isinstance(contrast, Contrast):
        return ""
    if contrast.answer == Decided.SAME:
        return f"{name} equal"
    is_open = contrast.answer == Decided.INCONCLUSIVE and contrast.noise is not None
    open_still = f" ({say('open')})" if is_open else ""
    return f"{name} {times_of(contrast, *TITLES[path]).text}{open_still}"


def _faster(pair: Pair, contrasts: Contrasts) -> str:
    """How much faster the first is by E2E p50; why that is not significant unless all lacks the noise."""
    one, other = pair
    contrast = contrasts.get(E2E.path)
    if not isinstance(contrast, Contrast):
        return say("no-e2e-ratio", one=one, other=other)
    times = times_of(contrast, E2E.title, E2E.better)
    ends = f", 95% CI {times.ends}" if times.ends else ""
    if contrast.answer == Decided.SAME:
        return say("equal", one=one, other=other, percent=number((times.value - 1) * 100), ends=ends)
    if times.value < 1.005:
        return say("equally-long", one=one, other=other, ends=ends)
    why = "" if contrast.noise is None else why_open(contrast, contrasts)
    return f"{say('faster', one=one, times=times.text, other=other, ends=ends)}{f': {why}' if why else ''}"
