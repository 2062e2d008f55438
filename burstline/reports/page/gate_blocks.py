"""The result of `burstline gate`: its page, blocks for a terminal and a pull request, test cases, JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import geometric_mean
from typing import Any
from xml.etree import ElementTree as ET

from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import Reason
from burstline.measure.stats import significance
from burstline.measure.stats.estimates import Estimate
from burstline.measure.stats.significance import FALSE_ALARMS, LASTING, Look
from burstline.reports.blocks import Banner, Block, Command, Note, Plot, Table, Tile, table
from burstline.reports.figures.contenders import RunDot, history
from burstline.reports.model.comparison import Case, view_of
from burstline.reports.model.contenders import differing_factors
from burstline.reports.model.gated import BASELINE, CANDIDATE, GateOutcome, Judged, Number
from burstline.reports.number_format import point, scale_of
from burstline.reports.page.first_screen import next_tile
from burstline.reports.page.page import Page, PageSection, beside, case_sections, common_facts
from burstline.reports.page.side_by_side import side_by_side
from burstline.reports.sentences import GATE, say
from burstline.wording import counted


def gate_page(judged: Judged, made: Sequence[Block], case: Case | None) -> str:
    """The page of what `gate_blocks` made: verdict, numbers and pairs, then both contenders of `case`."""
    verdict, *blocks, reproduce = made
    assert isinstance(verdict, Banner)
    shown: list[Block] = [each for each in blocks if not isinstance(each, Plot)]
    views = [view_of(run) for run in judged.runs] if case is None else case.views
    loads = dict.fromkeys(view.manifest.title or "" for view in views)
    facts = [f"{counted(len(views), 'run')} of one series"] if case is None else []
    facts += [*_who(case), *filter(None, list(loads)[: len(loads) == 1]), *common_facts(views)]
    sections = [PageSection("numbers", "", "What was measured?", shown)]
    if case is not None:
        shown += [side_by_side(replace(case, contrasts={}))]  # the gate alone says which is better
        sections += list(case_sections(case))[1:]
    sections += [PageSection("again", "", "Reproduce", [reproduce])]
    who = f"{BASELINE} and {CANDIDATE}" if case is not None else "the newest run of a series"
    return Page(
        title=f"Gate: {who}",
        facts=facts,
        verdict=verdict,
        tiles=_tiles(judged),
        pictures=beside([each for each in blocks if isinstance(each, Plot)]),
        sections=[replace(section, folded=True) for section in sections],
        summary=gate_json(judged),
        digest=made,
    ).html()


def _who(case: Case | None) -> Iterator[str]:
    """`max-num-seqs: baseline 2, candidate 8`, for each factor in which the two differ, else their URLs."""
    if case is None:
        return
    runs = [contender.views[0].run for contender in case.contenders]
    urls = [str(run.manifest.server and run.manifest.server.url) for run in runs]
    factors = differing_factors(runs) or ({"URL": urls} if len({*urls}) > 1 else {})
    for name, values in factors.items():
        yield f"{name}: {', '.join(map(' '.join, zip((BASELINE, CANDIDATE), values, strict=True)))}"
    if not factors:
        yield say("gate.alike")


def _tiles(judged: Judged) -> list[Tile]:
    both = "{}: newest run {}" if judged.runs else f"{{}}: {BASELINE} {{}}, {CANDIDATE} {{}}"
    changes, told = [], []
    for number, look in judged.known:
        change, _, interval = _change(look).partition(" ")
        changes.append(f"{number.headline.title} {change}")
        ends = f", 95% interval {interval}" if interval else ""
        told.append(f"{both.format(number.headline.title, *_speeds(judged, number))}{ends}")
    notes = [str(look.ratio.note) for _, look in judged.known]
    runs, of, rest = next(iter(notes), "None counts").partition(" of runs")
    if judged.runs:
        runs, of, rest = counted(len(judged.runs), "run"), "of the series", ""
    advice = next((each.advice for each in (*_advice(judged), *judged.reasons) if each.advice), "")
    tiles = [
        Tile("What changed?", ", ".join(changes), ". ".join(told)),
        Tile("From what runs?", runs, f"{of}{rest}".strip().capitalize()),
        Tile("What counts as the same?", f"Within {100 * judged.rule.margin:g}%", _meant(judged)),
        next_tile(GATE[judged.outcome][4 if judged.runs else 3] or advice),
    ]
    return [tile for tile in tiles if tile.value]


def _meant(judged: Judged) -> str:
    return say("gate.meant", alarms=f"{FALSE_ALARMS:.0%}", margin=f"{100 * judged.rule.margin:g}%")


def gate_blocks(judged: Judged, command: str) -> list[Block]:
    """The verdict with its reasons, the numbers, how they are meant, and the command."""
    tone, mark, *_ = GATE[judged.outcome]
    shown = Banner(judged.outcome, tone, mark, sentence(judged), (*judged.reasons, *_advice(judged)))
    tables = [_table(judged)] if judged.known else []
    plots = [figure(number, judged.runs) for number in judged.numbers if judged.runs]
    plots += [_pairs(judged, number) for number in judged.numbers if len(number.ratios) > 1]
    return [shown, *tables, *plots, Note(_meant(judged)), Command("Reproduce this result", command)]


def sentence(judged: Judged) -> str:
    """Each number's difference, and from how many runs that is known."""
    if not judged.known:
        failed = judged.outcome == GateOutcome.WORSE
        return "Requests of the candidate failed." if failed else "No runs can be compared."
    told = "; ".join(_told(judged, number, look) for number, look in judged.known)
    return f"{told}, in {judged.known[0][1].ratio.note}."


def _told(judged: Judged, number: Number, look: Look) -> str:
    within = f" within {100 * judged.rule.margin:g}%"
    word = f"the same{within}" if number.outcome == GateOutcome.SAME else number.outcome.lower()
    return f"{number.headline.title} {word}: {_change(look)}"


def _change(look: Look) -> str:
    """`+9.8% [6.1%, 13.6%]`: the candidate's number against the baseline's."""
    values = look.ratio.point, look.ratio.low, look.ratio.high
    middle, *ends = (f"{100 * (value - 1):+.3g}%" for value in values if value is not None)
    return f"{middle} [{', '.join(ends)}]" if len(set(ends)) > 1 else middle


def _advice(judged: Judged) -> Iterator[Reason]:
    if judged.outcome != GateOutcome.UNDECIDED or not judged.known:
        return
    where = "the runs of this series" if judged.runs else "runs"
    advice = say("gate.in-turn" if judged.runs else "gate.more-runs")
    yield Reason("undecided", say("gate.undecided", where=where), advice)


def _table(judged: Judged) -> Table:
    rows = [
        [number.headline.title, *_speeds(judged, number), _change(look), number.outcome.lower()]
        for number, look in judged.known
    ]
    both = [BASELINE.title(), CANDIDATE.title()] if judged.case is not None else ["Newest run"]
    columns = ["Number", *both, "Change [95% CI]", "Verdict"]
    remark = say("gate.pairs") * (judged.is_paired and judged.case is not None)
    return table("", columns, rows, text=(0, len(columns) - 1), remark=remark)


def _speeds(judged: Judged, number: Number) -> list[str]:
    """The number of the baseline and of the candidate, or of the newest run of a series, with units."""
    path = number.headline.path
    figures = [view_of(run).summary.figure(*path) for run in judged.runs[-1:]]
    if judged.case is not None:
        figures = [judged.case.named(label).figure(*path) for label in (BASELINE, CANDIDATE)]
    scale = scale_of(figures)
    return [f"{point(each, scale)} {scale.unit}" for each in figures]


def figure(number: Number, runs: Sequence[Run]) -> Plot:
    """The number in all runs of the series as a figure, which names the first bad one."""
    headline, bad = number.headline, number.first_bad
    finding = f"No run of {len(runs)} is worse than those before it."
    if bad is not None and (look := number.series[bad]):
        finding = f"The first bad run is {runs[bad].name} ({_change(look)})."
    figures = [view_of(run).summary.figure(*headline.path) for run in runs]
    scale = scale_of(figures)
    values = [each.point / scale.divisor for each in figures if isinstance(each, Estimate)]
    dots = []
    for k, (run, value, look) in enumerate(zip(runs, values, number.series, strict=True)):
        low = high = None
        if look is not None and look.ratio.low and look.ratio.high:
            # The ratio is that of this and the next runs to the forecast.
            expected = geometric_mean(values[k : k + LASTING]) / look.ratio.point
            reach = math.sqrt(look.ratio.high / look.ratio.low)
            low, high = expected / reach, expected * reach
        is_off = look is not None and look.answer == significance.Answer.DIFFERENT
        dots.append(RunDot(run.name, value, low, high, is_off))
    return history(f"history-{'-'.join(headline.path[1:])}", headline.title, scale.unit, dots, finding)


def _pairs(judged: Judged, number: Number) -> Plot:
    """The number's ratio in each pair, or of each run to the stored baselines, with the margin."""
    of = "pair" if judged.is_paired else "run"
    most, title = 1 + judged.rule.margin, f"{number.headline.title}, candidate against baseline"
    dots = [RunDot(str(k), ratio, 1 / most, most, False) for k, ratio in enumerate(number.ratios, 1)]
    n_out = sum(not 1 / most <= ratio <= most for ratio in number.ratios)
    finding = f"{n_out} of {counted(len(dots), of)} {'lies' if n_out == 1 else 'lie'} outside the margin."
    name = f"{of}s-{'-'.join(number.headline.path[1:])}"
    return history(name, title, "ratio", dots, finding, of=of, explained="figure.pairs")


def gate_junit(judged: Judged, lasted_s: float) -> str:
    """JUnit XML: a test case for each number that is judged; worse is a failure, undecided an error."""
    reasons = "\n".join(f"{each.text} {each.advice}".strip() for each in judged.reasons)
    suite = ET.Element("testsuite", name="burstline gate", skipped="0", time=f"{lasted_s:.3f}", timestamp="")
    for number in judged.numbers:
        outcome, told = judged.outcome, reasons or judged.outcome
        if number.look is not None:
            outcome, told = number.outcome, _told(judged, number, number.look)
        case = ET.SubElement(suite, "testcase", classname="burstline.gate", name=number.headline.title)
        kind = GATE[outcome][2]
        why = {"message": str(outcome), "type": str(outcome)} if kind else {}
        ET.SubElement(case, kind or "system-out", why).text = told
    for kind in ("failure", "error"):
        suite.set(f"{kind}s", str(len(suite.findall(f"testcase/{kind}"))))
    suite.set("tests", str(len(suite)))
    ET.indent(suite)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suite, encoding="unicode")}\n'


def gate_json(judged: Judged) -> dict[str, Any]:
    return {
        "outcome": judged.outcome,
        "sentence": sentence(judged),
        "margin": judged.rule.margin,
        "false_alarms": round(FALSE_ALARMS, 6),
        "n": judged.n_values,
        "numbers": {
            number.headline.title: {"outcome": number.outcome, "ratio": look.ratio.to_json()}
            for number, look in judged.known
        },
        "reasons": [asdict(reason) for reason in judged.reasons],
        "first_bad": {
            number.headline.title: None if number.first_bad is None else judged.runs[number.first_bad].name
            for number in judged.numbers
            if judged.runs
        },
    }
