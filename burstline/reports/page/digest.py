"""A run or a comparison in short: its verdict and SLOs, blocks for a terminal and a pull request, JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from burstline.measure.metrics.slo import SHARES
from burstline.measure.record.record import in_words
from burstline.measure.record.summary import Instrument, Summary
from burstline.measure.record.verdict import Reason, SloResult, State
from burstline.measure.stats.figure import Absent, Estimate, Result, known
from burstline.measure.verdict.comparable import ALONE, COMPARABLE, OF_LOAD
from burstline.reports.blocks import (
    MARKS,
    Banner,
    Block,
    Command,
    Findings,
    Heading,
    Note,
    Table,
    TargetLine,
    table,
)  # fmt: skip
from burstline.reports.model.comparison import HEADLINES, Case, Comparison, View
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.number_format import count, duration, error, number, with_interval
from burstline.reports.page.answer import answer
from burstline.reports.page.estimate_tables import headline_latencies, score_line, session_tables, whole_run
from burstline.reports.page.side_by_side import beside_others, contrast_json, side_by_side
from burstline.reports.page.sweep_words import all_loads, remarks, sweep_json
from burstline.reports.sentences import COMPARED, MEANT_BY, REPEATS, STATES, SWEEP, UNPROVEN, say, say_next
from burstline.roofline.predict.forecast import Score
from burstline.wording import counted

NOTABLE_CPU: Final = 0.1
"""A reader should know of more, though the verdict allows it."""
FAILURES: Final = frozenset({"too-many-failures", "mostly-failed", "no-success"})
"""Reasons that count the failed requests: a warning that does so too says nothing more."""


def banner(comparison: Comparison) -> Banner:
    if comparison.run is not None:
        return run_banner(comparison.run.summary)
    found = _of_cases(comparison)
    if not comparison.others:
        return found
    tone, mark, _ = COMPARED[State.NOT_COMPARABLE]
    unknown = tuple(
        Reason("other-tool", say("unknown-error", name=each.name, tool=each.tool), "")
        for each in comparison.others
    )
    return Banner(State.NOT_COMPARABLE, tone, mark, say("others-are-read"), (*unknown, *found.reasons))


def run_banner(summary: Summary) -> Banner:
    verdict = summary.verdict
    state: str = verdict.state
    refused = {reason.code for reason in verdict.reasons}
    steps = (
        replace(r, text=r.advice or r.text, advice="")  # the page's first sentence says what happened
        if r.code == "no-start"
        else replace(r, advice=say_next(r.advice))
        for r in verdict.reasons
    )
    warnings = (w for w in verdict.warnings if not (w.code == "failures" and refused & FAILURES))
    reasons = (*steps, *warnings)
    for code, instead in UNPROVEN.items():
        if state == State.VALID and any(reason.code == code for reason in reasons):
            state = instead
            reasons = tuple(reason for reason in reasons if reason.code != code)
    warned = (f"warned.{warning.code}" for warning in verdict.warnings if state == State.VALID)
    own = (*(reason.code for reason in verdict.reasons[:1]), *warned)  # the state's own reason comes first
    meant = next((MEANT_BY[code] for code in own if code in MEANT_BY), "")
    tone, mark, sentence = *STATES[state][:2], meant or STATES[state][2]
    if state == State.VALID:
        others = summary.instrument.others_cpu_fraction
        results = [target.result for target in summary.targets]
        if {*results} - {Result.PASS}:
            state = f"{state}, SLO {'MISSED' if Result.FAIL in results else 'INCONCLUSIVE'}"
            words = {Result.PASS: "met", Result.FAIL: "missed", Result.INCONCLUSIVE: "inconclusive"}
            of_each = ", ".join(f"{results.count(r)} {word}" for r, word in words.items() if r in results)
            tone, mark, sentence = "warn", "!", f"{meant or 'The numbers can be used.'} SLOs: {of_each}."
        if isinstance(others, Estimate) and others.point >= NOTABLE_CPU:
            used = f"{others.point:.0%} of this machine's CPU"
            sentence = f"{sentence} Processes that Burstline did not start used {used}."
    if not summary.targets and not summary.goodput.criteria and summary.counts.get("ok"):
        sentence = f"{sentence} {say('no-slo')}"
    targets = (*map(_target_line, summary.targets), *_goodput_line(summary))
    return Banner(state, tone, mark, sentence, reasons, targets)


def case_banner(case: Case) -> Banner:
    reasons = (*case.gate.reasons, *case.gate.warnings)
    shown = _banner(case_state(case), reasons, [case], name=f"{case.name}: " if case.name else "")
    return replace(shown, targets=_over_runs([case]))


def case_state(case: Case) -> str:
    """The gate's; of one contender that ran several times that these are repeats."""
    return REPEATS if case.is_alone and len(case.views) > 1 else case.gate.state


def _banner(state: str, reasons: tuple[Reason, ...], cases: Sequence[Case], name: str = "") -> Banner:
    """Green only where every run is valid."""
    tone, mark, sentence = COMPARED.get(state, ("warn", "!", "See the reasons."))
    if state == COMPARABLE and any(reason.code == "workload" for reason in reasons):
        sentence = say("compared-loads")
    doubtful = Counter(view.summary.verdict.state for case in cases for view in case.views)
    n, n_valid = doubtful.total(), doubtful.pop(State.VALID, 0)
    if tone == "good" and doubtful:
        states = ", ".join(f"{many} {each}" for each, many in doubtful.items())
        state, tone, mark = ("NOT VALID" if state == COMPARABLE else state), "warn", "!"
        sentence = say("not-all-valid", n=n - n_valid, of=n, states=states)
    return Banner(state, tone, mark, sentence, reasons, name=name)


def _of_cases(comparison: Comparison) -> Banner:
    """The worst state of all cases, with the reasons of each."""
    cases = comparison.cases
    refused = [case.name for case in cases if not case.gate.comparable and not case.is_alone]
    # Where a contender is missing, the one that is left is no set of repeats, but alone.
    states = (case.gate.state if comparison.missing else case_state(case) for case in cases)
    worst = min(states, key=_WORST_FIRST.index, default=ALONE)
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
    return replace(_banner(worst, reasons, cases), targets=_over_runs(cases))


_WORST_FIRST: Final[tuple[str, ...]] = (
    State.NOT_COMPARABLE,  # no repeated run would help
    *(state for state in State if state != State.NOT_COMPARABLE),
    ALONE,
    REPEATS,
    COMPARABLE,
)


def _target_line(row: SloResult) -> TargetLine:
    why = "" if row.result == Result.PASS else row.reason
    value = with_interval(row.measured) if isinstance(row.measured, Estimate) or not why else ""
    return TargetLine(MARKS[row.result], row.result, row.target, value, why)


def _over_runs(cases: Sequence[Case]) -> tuple[TargetLine, ...]:
    """The SLOs of one contender that ran several times, judged by its figures over all runs."""
    if len(cases) != 1 or len(cases[0].contenders) != 1:
        return ()
    return tuple(map(_target_line, cases[0].contenders[0].slos))


def _goodput_line(summary: Summary) -> Iterator[TargetLine]:
    goodput, is_open = summary.goodput, not any(row.target.startswith(SHARES) for row in summary.targets)
    share, rate = goodput.attainment, goodput.requests_per_s
    if isinstance(share, Absent):
        return
    per_s = f", {with_interval(rate)}" if isinstance(rate, Estimate) else ""
    n, percent = count(share.point * share.n), number(share.point * 100)
    met = f"met by {n} of {share.n:,} measured requests ({percent}%){per_s}"
    yield TargetLine("→", "goodput", " and ".join(goodput.criteria), met, say("no-target") * is_open)


def instrument_error(instrument: Instrument) -> str:
    """How late the client was, in a sentence; "" where it is not known."""
    late, read_p99 = instrument.send_lag_p99_s, instrument.read_error_p99_s
    if isinstance(late, Absent) or isinstance(read_p99, Absent):
        return ""
    exact = say("client.exact", error=error(read_p99.point))
    read = exact if read_p99.point > 0 else say("client.stamped")
    also = {"canary": _canary(instrument), "network": _network(instrument)}
    return say("client.late", late=duration(late.point), read=read, **also)


def _canary(instrument: Instrument) -> str:
    """How this run's canary checked these bounds, in a sentence; "" where there was no canary."""
    p99, beyond = instrument.canary_p99_s, instrument.canary_beyond_p99_s
    if isinstance(p99, Absent) or isinstance(beyond, Absent):
        return say("client.no-canary") if isinstance(p99, Absent) and p99.code == "too-short" else ""
    within = "within these bounds" if not beyond.point else f"at most {error(beyond.point)} outside them"
    return say("client.canary", n=p99.n, within=within, error=error(p99.point))


def _network(instrument: Instrument) -> str:
    """What the network holds of every TTFT, in a sentence; "" where the server is on this host."""
    rtt, again = instrument.network_rtt_s, instrument.network_retransmits
    if not isinstance(rtt, Estimate) or not isinstance(again, Estimate):
        return ""
    lost = f"; {again.point:,.0f} TCP segments were sent again" if again.point else ""
    return say("client.network", rtt=duration(rtt.point), lost=lost)


def headline(comparison: Comparison, view: View) -> list[Block]:
    """What a terminal shows at the end of a run: the answer, the verdict and SLOs, the percentiles."""
    numbers = [*headline_latencies(view, ""), *session_tables(view)]
    forecast = [score_line(score)] if isinstance(score := view.summary.forecast, Score) else []
    return [answer(comparison), run_banner(view.summary), *numbers, *forecast, _outcomes(view.summary)]


def digest(comparison: Comparison) -> list[Block]:
    if comparison.run is not None:
        return _of_run(comparison, comparison.run)
    blocks: list[Block] = [Heading(comparison.title), answer(comparison)]
    swept = sweeps_in(comparison.cases)
    for sweep, _ in swept:
        blocks += [Findings(tuple(remarks(sweep))), all_loads(sweep, {})]
    for case in comparison.cases:
        # All that a lone contender's case holds is in its sweep.
        if not (case.is_alone and any(case in cases for _, cases in swept)):
            blocks += [_decisive(case_banner(case)), side_by_side(case)]
    if comparison.others:
        blocks += [banner(comparison), *beside_others(comparison)]
    return [*blocks, *(Note(say("missing", what=what)) for what in comparison.missing)]


def _decisive(shown: Banner) -> Banner:
    """Where the loads differ, without the reasons that mostly follow from that: the page has all."""
    kept = [each for k, each in enumerate(shown.reasons) if not k or each.code not in {*OF_LOAD, "unchecked"}]
    n = len(shown.reasons) - len(kept)
    if n < 2 or kept[0].code != "workload":
        return shown
    return replace(shown, reasons=(*kept, Reason("more", say("reasons.more", n=n), "")))


def _of_run(comparison: Comparison, view: View) -> list[Block]:
    """The answer, verdict, SLOs, numbers, and the command that repeats the run."""
    first, shown, *numbers, outcomes = headline(comparison, view)
    return [
        Heading(comparison.title, level=3),
        first,
        shown,
        Note(" · ".join(comparison.facts)),
        *((*numbers, whole_run(view.summary)) if view.has_served else ()),
        outcomes,
        *([Command("Reproduce this run", view.manifest.repeat)] if view.manifest.repeat else []),
    ]


SHORT: Final = "TTFT", "TPOT", "E2E", "Latency", "Unit", "p50", "p90", "p99", "n"


def in_short(comparison: Comparison, view: View) -> list[Block]:
    """Some ten lines for an issue: answer, verdict and why, a few percentiles, versions, the command."""
    whole = _of_run(comparison, view)
    numbers = next((block for block in whole if isinstance(block, Table)), None)
    if numbers is None:
        return whole
    kept = [k for k, column in enumerate(numbers.columns) if column.title in SHORT]
    rows = [row.cells for row in numbers.rows if row.cells[0].text.partition("\xa0")[0] in SHORT]
    cells = [[replace(row[k], note=None) for k in kept] for row in rows]
    numbers = table("", [numbers.columns[k].title for k in kept], cells, text=(0, 1))
    facts = Note(" · ".join((f"Burstline {view.manifest.version or '?'}", *comparison.facts)))
    return [whole[0], replace(answer(comparison), details=()), whole[2], numbers, facts, *whole[-1:]]


def _outcomes(summary: Summary) -> Block:
    counts = {name: n for name, n in summary.counts.items() if n and name != "planned"}
    planned = summary.counts.get("planned", sum(counts.values()))
    least, n_first = summary.figure("metrics", "e2e", "min"), known(summary.window.n_warm_up) or 0
    of = least.n if n_first and isinstance(least, Estimate) else 0
    drifts = State.NOT_STATIONARY in (summary.verdict.state, *(summary.verdict.also or ()))
    due = f"after the first {n_first:,.0f}" if drifts else "while the load was full and steady"
    left_out = f"; latencies are of {of:,}, due {due}" if of else ""
    return Note(f"Of {counted(planned, 'request')}: {in_words(counts)}{left_out}")


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Each case's state, reasons, facts and figures, and every sweep."""
    return {
        "title": comparison.title,
        "comparable": comparison.comparable,
        "cells": [_case(case) for case in comparison.cases],
        "sweeps": [sweep_json(sweep) for sweep, _ in sweeps_in(comparison.cases)],
        "missing": list(comparison.missing),
        "others": [{"name": o.name, "tool": o.tool, "numbers": dict(o.numbers)} for o in comparison.others],
    }


def _case(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "state": case_state(case),
        "reasons": [asdict(reason) for reason in case.gate.reasons],
        "warnings": [asdict(reason) for reason in case.gate.warnings],
        "facts": [
            {"name": f.name, "values": dict(f.values), "agrees": f.agrees, "tolerance": f.tolerance}
            for f in case.gate.facts
        ],
        "numbers": {
            headline.title: {each.label: each.figure(*headline.path).to_json() for each in case.contenders}
            for headline in HEADLINES
        },
        "contrasts": [contrast_json(pair, contrasts) for pair, contrasts in case.contrasts.items()],
        "best": {headline.title: case.best(headline) for headline in HEADLINES},
        "runs": {each.label: [view.name for view in each.views] for each in case.contenders},
    }
