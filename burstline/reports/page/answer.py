"""What a page or a terminal says first: how fast it was, what limited it or failed, who is faster."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from burstline.measure.metrics.audit import audit_sentence
from burstline.measure.metrics.throughput import throughputs
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.record import CUT_OFF, Outcome, failed, in_words, outcome_words
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import State
from burstline.measure.stats.figure import Absent, Estimate, known
from burstline.measure.stats.significance import Answer as Decided
from burstline.measure.stats.significance import Contrast
from burstline.reports.blocks import Answer
from burstline.reports.model.comparison import (
    E2E,
    INPUT,
    OUTPUT,
    TITLES,
    Case,
    Comparison,
    Contender,
    Contrasts,
    Pair,
    Path,
    View,
    better,
)
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.number_format import changed, duration, number, point, scale_of, with_unit
from burstline.reports.page.bottleneck import (
    limit_of,
    limits_at_the_top,
    limits_of,
    listed,
    next_by,
    next_of_sweep,
    next_step,
    not_why,
)
from burstline.reports.page.side_by_side import Times, detectable, is_same, times_of
from burstline.reports.page.sweep_words import best_loads, limits
from burstline.reports.sentences import say
from burstline.roofline.reconcile.reconciliation import NotReconciled
from burstline.wording import counted

STRAGGLERS: Final = 0.75
"""A burst that had served 95% of its requests in a smaller share of its time ended with stragglers."""
VISIBLY: Final = 0.01
"""What a reader who multiplies printed numbers takes for more than rounding."""
FEW: Final = 0.1
"""A window in which a smaller share of the successes ended says little of the run."""
MEMORY: Final[Sequence[tuple[str, Path]]] = (
    ("GPU memory", ("memory", "device_peak_bytes")),
    ("host memory", ("memory", "server_peak_bytes")),
)
"""The first that is known stands in the first sentence."""
OTHERS: Final[tuple[Path, ...]] = (("metrics", "ttft", "p50"), ("metrics", "tpot", "p50"), OUTPUT.path)
"""The numbers that the first sentence names where they go another way than the E2E p50."""
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
        return Answer(f"No request succeeded: {cause(view)}")
    told = f"{served(contender)} {few_ended(view)}".rstrip()
    reasons = [each.text for each in summary.verdict.reasons[:1] if each.code in ("died", "client-failed")]
    if summary.verdict.state == State.FAILED and (why := reasons[0] if reasons else _failed(summary)):
        speed = f"{told} {say('rates.of-succeeded')}"
        details = [cut_short(view), speed, limit_of(summary, view.manifest)]
        return Answer(why, tuple(filter(None, details)))
    limit, slowest = limit_of(summary, view.manifest), tail(summary, view.manifest)
    if summary.verdict.state == State.VALID:  # of other runs the verdict says what to do
        limit = f"{limit} {next_by(view)}".strip()
    lacking = summary.roofline
    why = say("not-reconciled", why=lacking.absent) if isinstance(lacking, NotReconciled) else ""
    details = [cut_short(view), failures(view), limit, why, slowest, counted_apart(summary)]
    details += [audit_sentence(summary.audit)] if summary.audit else []
    return Answer(told, tuple(filter(None, details)))


def headline_numbers(contender: Contender) -> list[tuple[Path, str]]:
    """The numbers of the first sentence that are known, by their place in the summary."""
    requests: Path = ("throughput", "requests_per_s")
    rates = ((requests, ""), (OUTPUT.path, "output tok/s"))
    waits: tuple[Path, ...] = ("metrics", "ttft", "p50"), ("metrics", "tpot", "p50")
    if not contender.views[0].is_generating:
        rates, waits = (rates[0], (INPUT.path, "input tok/s")), (E2E.path,)
    found = []
    for path, unit in (*rates, *((path, "") for path in waits)):
        figure = contender.figure(*path)
        if known(figure) or (known(figure) == 0 and path[0] == "throughput"):
            scale = scale_of([figure])
            found.append((path, f"{point(figure, scale)} {unit or scale.unit}"))
    return found


def served(contender: Contender) -> str:
    """`Served 34.0 req/s, 2,170 output tok/s; median first token 13.7 s, then ....`"""
    shown = dict(headline_numbers(contender))
    for key in [key for key in shown if any(view.summary.spoilt_by(*key) for view in contender.views)]:
        shown[key] += " (unreliable)"
    rates = [text for key, text in shown.items() if key[0] == "throughput"]
    words: dict[Path, str] = {
        ("metrics", "ttft", "p50"): "median first token {}",
        ("metrics", "tpot", "p50"): "then {} per token (median TPOT)",
        E2E.path: "median latency {}",
    }
    waits = [words[key].format(text) for key, text in shown.items() if key in words]
    text = "; ".join(filter(None, (", ".join(rates), ", ".join(waits))))
    if not text and isinstance(none := contender.figure(*E2E.path), Absent):
        return f"There are no figures: {none.reason}."
    return f"Served {text}." if rates else f"{text[:1].upper()}{text[1:]}."


def rates(view: View) -> str:
    """`34.0 req/s · 2,170 output tok/s`"""
    known_numbers = headline_numbers(Contender(view.manifest.engine, (view,)))
    return " · ".join(text for path, text in known_numbers if path[0] == "throughput")


def few_ended(view: View) -> str:
    """The rates of the whole run, where few of its successes ended in the window; else ""."""
    summary, ok = view.summary, view.summary.counts.get("ok", 0)
    rate, lasted = summary.throughput.requests_per_s, summary.window.length_s
    if isinstance(rate, Absent) or isinstance(lasted, Absent) or rate.n >= FEW * ok:
        return ""
    whole = rates(replace(view, summary=replace(summary, throughput=throughputs(view.columns))))
    return say("rates.few", n=rate.n, ok=counted(ok, "request"), window=with_unit(lasted), whole=whole)


def cause(view: View) -> str:
    """Why nothing was served: what the run's own error says, else how requests ended and the first error."""
    if view.manifest.error:
        return f"{view.manifest.error.partition(chr(10))[0].rstrip('.')}."
    if not (outcomes := Counter(str(outcome) for outcome in view.words("outcome"))):
        return "the plan has no requests."
    words = next((error for error in view.words("error") if error), "")
    if view.summary.verdict.is_interrupted and set(outcomes) <= CUT_OFF:
        return "the run was interrupted before a request had ended."
    in_log = f"the server's log says {view.log_cause.rstrip('.')}; " if view.log_cause else ""
    requests = f"all {n:,} requests" if (n := len(view.columns)) > 1 else "the one request"
    first, *others = outcomes
    if not others:
        ended = f"ended as {first}" if (told := outcome_words(first)) == first else told
        return f"{in_log}{requests} {ended}{f': {words}' if words else ''}."
    kinds = in_words(dict(outcomes.most_common()))
    return f"{in_log}{requests} failed ({kinds}){f'; first error: {words}' if words else ''}."


def cut_short(view: View) -> str:
    summary = view.summary
    if not summary.verdict.is_interrupted:
        return ""
    ok, planned, n_cut = (summary.counts.get(name, 0) for name in ("ok", "planned", Outcome.CANCELLED))
    n_late = int(view.counted.having("outcome", [Outcome.CANCELLED]).sum())
    late = f"; it cut off {n_cut:,} (counted as infinitely late: {n_late:,})" if n_cut else ""
    return f"The run was interrupted after {ok:,} of {planned:,} requests{late}."


def failures(view: View) -> str:
    text = _failed(view.summary)
    if not text:
        return ""
    words = next((f" The first error: {error.rstrip('.')}." for error in view.words("error") if error), "")
    return f"{text.rstrip('.')}; their latency counts as infinite.{words}"


def _failed(summary: Summary) -> str:
    kinds = Counter(failed(summary.counts, interrupted=summary.verdict.is_interrupted))
    if not kinds:
        return ""
    listed = in_words(dict(kinds.most_common(3)))
    return f"{kinds.total():,} of {counted(summary.counts['planned'], 'request')} failed ({listed})."


def tail(summary: Summary, manifest: Manifest) -> str:
    """Where the slowest requests stand out: p99 at least three times the median, or the end of a burst."""
    median, most, slow = (summary.figure("metrics", "e2e", p) for p in ("p50", "p95", "p99"))
    end = known(summary.window.end_s)
    is_burst = manifest.asked.kind == "burst"
    if is_burst and isinstance(most, Estimate) and end and most.point < STRAGGLERS * end:
        return say("tail.burst", end=duration(end), most=with_unit(most))
    if not isinstance(median, Estimate) or not isinstance(slow, Estimate) or slow.point < 3 * median.point:
        return ""
    times = number(slow.point / median.point)
    return f"The slowest 1% take at least {with_unit(slow)}, {times} times the median ({with_unit(median)})."


def counted_apart(summary: Summary) -> str:
    """Why the printed rates differ from each other's product, where a reader can see that they do."""
    rate, output = known(summary.throughput.requests_per_s), known(summary.throughput.output_tok_per_s)
    tokens = known(summary.lengths.output_tok.served_mean)
    if not rate or not output or not tokens or abs(rate * tokens / output - 1) <= VISIBLY:
        return ""
    return say("rates.apart", tokens=number(tokens), by=changed(output / (rate * tokens) - 1))


def _of_cases(comparison: Comparison) -> Answer:
    swept = sweeps_in(comparison.cases)
    lines = []
    for sweep, cases in swept:
        of = f"{sweep.name}: " if len(swept) > 1 else ""
        of_each = limits_at_the_top(sweep, cases)
        parts = (best_loads(sweep), limits(sweep), *of_each, next_of_sweep(sweep, cases))
        lines += [f"{of}{words}" for words in parts if words]
    apart = [case for case in comparison.cases if not any(case in cases for _, cases in swept)]
    if len(apart) == 1 and not lines:
        first, *others = _sentences(apart[0])
        others += filter(None, (*limits_of(apart), next_step(apart)))
        return Answer(first, tuple(others))
    common = limits_of(apart)
    for case in apart:
        own = limits_of([case], brief=True) if len(common) > 1 else ()
        of = f"{case.name}: " if case.name else ""
        lines.append(" ".join((f"{of}{sentence(case)}", *own)))
    if not lines:
        return Answer(say("nothing"))
    overall = "" if swept else _overall(comparison.cases)
    if not overall:
        return Answer(lines[0], tuple(lines[1:]))
    details = [
        *(lines if len(lines) <= MOST_LISTED else ()),
        *(common if len(common) == 1 else (not_why(apart),)),
        next_step(apart),
    ]
    return Answer(overall, tuple(filter(None, details)))


def _overall(cases: Sequence[Case]) -> str:
    """Who has the lowest E2E p50 in most cases, and in how many for certain; "" where nothing is ranked."""
    ranked = [case for case in cases if case.gate.comparable and len(case.contenders) > 1]
    leaders = [min(case.contenders, key=lambda each: each.e2e_s).label for case in ranked]
    if not leaders:
        return ""
    first = max(dict.fromkeys(leaders), key=leaders.count)
    n, n_sure = leaders.count(first), sum(case.best(E2E) == first for case in ranked)
    if n_sure < n:
        close = dict.fromkeys(
            pair[1]
            for case in ranked
            for pair, contrasts in case.pairs()
            if pair[0] == first and better(contrasts.get(E2E.path), E2E.better) is None
        )
        sure = say("lead", n=n_sure) if n_sure else say("no-lead", others=listed(list(close)))
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


def sentence(case: Case) -> str:
    """`vllm is 1.48x faster than tgi (E2E p50), 99.2% CI [1.29, 1.69].`"""
    pairs = case.pairs()
    if not pairs or not case.gate.comparable:
        return _sentences(case)[0]
    return f"{pair_words(*pairs[0], others=False)}."


def _sentences(case: Case) -> list[str]:
    """The fastest against the runner-up, then against each other contender.

    `vllm is 1.48x faster than tgi (E2E p50), 99.2% CI [1.29, 1.69]; output 1.31x as high; GPU memory equal.`
    """
    first, *others = case.contenders
    if not others:
        return [f"{first.label}: {served(first)}"]
    if not case.gate.comparable:
        why = next((reason.text for reason in case.gate.reasons), case.gate.state)
        return [
            say("not-compared", why=why.partition(". ")[0].rstrip(".")),
            f"{'; '.join(map(_own, case.contenders))}.",
        ]
    return [f"{pair_words(pair, contrasts)}." for pair, contrasts in case.pairs()]


def _own(contender: Contender) -> str:
    figure = contender.figure(*E2E.path)
    if isinstance(figure, Absent):
        return say("no-e2e", label=contender.label)
    return f"{contender.label}: {with_unit(figure)} (E2E p50)"


def pair_words(pair: Pair, contrasts: Contrasts, *, others: bool = True) -> str:
    """How much faster the first is, and in what it is worse; with the `others`: output and memory."""
    memory = next((own for own in MEMORY if isinstance(contrasts.get(own[1]), Contrast)), MEMORY[0])
    against = contrary(contrasts)
    also = (("output throughput", OUTPUT.path), memory) if others else ()
    parts = (_also(name, path, contrasts.get(path)) for name, path in also if path not in against)
    text = "; ".join(filter(None, (_faster(pair, contrasts), _but(pair, contrasts), *parts)))
    e2e = contrasts.get(E2E.path)
    if not isinstance(e2e, Contrast) or e2e.noise is not None:
        return text
    return f"{text}; {say('open.one-run')}"


def contrary(contrasts: Contrasts) -> list[Path]:
    """In which of OTHERS the first is worse; where E2E decides nothing, also in which latency better."""
    undecided = _is_better(contrasts, E2E.path) is None
    ways = {path: _is_better(contrasts, path) for path in OTHERS}
    return [
        path
        for path, is_better in ways.items()
        if is_better is False or (is_better and undecided and path != OUTPUT.path)
    ]


def _is_better(contrasts: Contrasts, path: Path) -> bool | None:
    """Whether the first is better; None where that is open, but not only because each ran once."""
    contrast = contrasts.get(path)
    if not isinstance(contrast, Contrast) or is_same(contrast, times_of(contrast, *TITLES[path])):
        return None
    if contrast.noise is None:
        contrast = replace(contrast, answer=Decided.DIFFERENT)
    return better(contrast, TITLES[path][1])


def _but(pair: Pair, contrasts: Contrasts) -> str:
    """`but TPOT p50 is 3.17x slower with vllm`, "" where nothing is."""
    found = ((path, contrasts[path]) for path in contrary(contrasts))
    names = {OUTPUT.path: "output throughput"}
    parts = [
        f"{names.get(path, TITLES[path][0])} is {times_of(each, *TITLES[path]).text}"
        for path, each in found
        if isinstance(each, Contrast)
    ]
    return say("contrary", parts=listed(parts), one=pair[0]) if parts else ""


def _also(name: str, path: Path, contrast: Contrast | Absent | None) -> str:
    """`output 1.31x as high`; "" where it is not known."""
    if not isinstance(contrast, Contrast):
        return ""
    times = times_of(contrast, *TITLES[path])
    if is_same(contrast, times):
        return f"{name} {'equal' if times.text == '1.00x' else f'the same within {_percent(times)}%'}"
    is_open = contrast.answer == Decided.INCONCLUSIVE and contrast.noise is not None
    open_still = f" ({say('open')})" if is_open else ""
    return f"{name} {times.text}{open_still}"


def _percent(times: Times) -> str:
    return f"{max(round(100 * (times.ratio.point - 1), 1), 0.1):g}"


def _faster(pair: Pair, contrasts: Contrasts) -> str:
    """How much faster the first is by E2E p50; where that is open, what would have been shown."""
    one, other = pair
    contrast = contrasts.get(E2E.path)
    if not isinstance(contrast, Contrast):
        return say("no-e2e-ratio", one=one, other=other)
    times = times_of(contrast, E2E.title, E2E.better)
    ends = f", {times.interval}" if times.interval else ""
    if contrast.answer == Decided.INCONCLUSIVE and contrast.noise is not None:
        least = detectable(contrast.detectable or 0.0)
        return say("undecided", one=one, other=other, times=times.text, ends=times.interval, least=least)
    if is_same(contrast, times):
        return say("equal", one=one, other=other, percent=_percent(times), ends=ends)
    return say("faster", one=one, times=times.text, other=other, ends=ends)
