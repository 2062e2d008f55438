"""A run or a comparison in short: as blocks for the terminal and a pull request, as JSON for machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from burstline.measure.record.record import in_words
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import Reason
from burstline.measure.stats.figure import known
from burstline.reports.blocks import Banner, Block, Command, Findings, Heading, Note, Table, table
from burstline.reports.model.comparison import HEADLINES, Case, Comparison, View
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.page.answer import answer
from burstline.reports.page.banner import banner, case_banner, case_state, run_banner
from burstline.reports.page.estimate_tables import headline_latencies, score_line, session_tables, whole_run
from burstline.reports.page.side_by_side import beside_others, contrast_json, side_by_side
from burstline.reports.page.sweep_words import all_loads, remarks, sweep_json
from burstline.reports.sentences import say
from burstline.roofline.predict.forecast import Score
from burstline.wording import counted


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
    kept = [each for k, each in enumerate(shown.reasons) if not k or each.code not in FOLLOWING]
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


FOLLOWING: Final = "workload", "prompt-tokens", "output-tokens", "finish-reasons", "sampling", "unchecked"
SHORT: Final = "TTFT", "TPOT", "E2E", "Latency", "Unit", "p50", "p90", "p99", "n"


def in_short(comparison: Comparison, view: View) -> list[Block]:
    """Some ten lines for an issue: answer, verdict, a few percentiles, versions, the command."""
    whole = _of_run(comparison, view)
    numbers = next((block for block in whole if isinstance(block, Table)), None)
    if numbers is None:
        return whole
    kept = [k for k, column in enumerate(numbers.columns) if column.title in SHORT]
    rows = [row.cells for row in numbers.rows if row.cells[0].text.partition("\xa0")[0] in SHORT]
    cells = [[replace(row[k], note=None) for k in kept] for row in rows]
    numbers = table("", [numbers.columns[k].title for k in kept], cells, text=(0, 1))
    facts = Note(" · ".join((f"Burstline {view.manifest.version or '?'}", *comparison.facts)))
    said = replace(answer(comparison), details=())
    return [whole[0], said, verdict_line(view.summary), numbers, facts, *whole[-1:]]


def verdict_line(summary: Summary) -> Banner:
    return replace(run_banner(summary), reasons=())


def _outcomes(summary: Summary) -> Block:
    counts = {name: n for name, n in summary.counts.items() if n and name != "planned"}
    planned = summary.counts.get("planned", sum(counts.values()))
    n = known(summary.window.n_warm_up)  # until the load is as full as it gets: no latency counts it
    left_out = f"; no latency counts the first {n:,.0f}, due while the load filled up" if n else ""
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
        "reasons": [reason.to_json() for reason in case.gate.reasons],
        "warnings": [reason.to_json() for reason in case.gate.warnings],
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
