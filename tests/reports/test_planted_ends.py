"""Sixty planted ends of a gate and of a search: the terminal, the page and the exit code say the same."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from html import unescape

import pytest

from burstline.bench import limit
from burstline.measure.record.verdict import Reason
from burstline.measure.stats.estimates import Estimate
from burstline.measure.stats.figure import Result
from burstline.measure.stats.limit_search import LateShare, LoadProbe, ProbeLook, Purpose
from burstline.measure.stats.significance import Answer, Look
from burstline.reports.formats.text import text
from burstline.reports.model.comparison import Member
from burstline.reports.model.gated import (
    BASELINE,
    CANDIDATE,
    NUMBERS,
    GateOutcome,
    Judged,
    Number,
    Rule,
    _worst,
    compared,
)
from burstline.reports.page.gate_blocks import _change, gate_blocks, gate_page
from burstline.reports.page.limit_page import LimitResult, limit_blocks, limit_page
from burstline.suites import gate
from tests.burstline.test_limit import BOUNDS, FOUND, LOST
from tests.reports.synthetic_sweep import finished_run

MARGIN = 0.05
EXITS = {"SAME": 0, "BETTER": 0, "WORSE": 3, "UNDECIDED": 4, "confirmed": 0, "none": 3, "open": 4, "lost": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return [finished_run(tmp_path_factory.mktemp("run"), "vllm", 60, rate=20, seed=k) for k in range(2)]


def header(page: str) -> tuple[str, str]:
    """The state that the page shows, and all words of its top."""
    top = unescape(re.sub(r"<[^>]+>", "", page[page.index("<header>") : page.index("</header>")]))
    (state,) = re.findall(r'<p class="state"><span[^>]*>.</span> (.*?)</p>', page)
    return state, " ".join(top.split())


def planted_look(rng: random.Random) -> Look:
    """A ratio with an interval, and what the rule makes of it."""
    point, width = rng.choice([0.8, 0.97, 1.0, 1.02, 1.2]), rng.choice([0.005, 0.04, 0.3])
    low, high = point * (1 - width), point * (1 + width)
    inside = low > 1 / (1 + MARGIN) and high < 1 + MARGIN
    answer = Answer.SAME if inside else Answer.DIFFERENT if not low < 1 < high else Answer.INCONCLUSIVE
    return Look(answer, Estimate(point, low, high, 0.95, 6, "1", "6 pairs of runs"))


@pytest.mark.parametrize("seed", range(30))
def test_a_gate_says_the_same_in_the_terminal_on_its_page_and_by_its_code(runs, seed):
    rng = random.Random(seed)
    rule = Rule(
        tuple(rng.sample(sorted(NUMBERS.values(), key=lambda h: h.title), rng.choice([1, 2]))), MARGIN, 20
    )
    members = [Member(who, run, "", 0) for who, run in zip((BASELINE, CANDIDATE), runs, strict=True)]
    numbers = [Number(headline, planted_look(rng), ratios=(1.0, 1.1)) for headline in rule.numbers]
    reasons = (Reason("left-out", "1 of 8 runs does not count.", "Look at it."),) * rng.choice([0, 1])
    case = compared(members, replace(rule, anyway=True))
    judged = Judged(rule, _worst(numbers), tuple(numbers), reasons, 6, case)
    if rng.random() < 0.1:  # nothing is known
        judged = replace(judged, outcome=GateOutcome.UNDECIDED, numbers=tuple(map(Number, rule.numbers)))
    blocks = gate_blocks(judged, "burstline gate 'run a' 'run b'")
    state, top = header(gate_page(judged, blocks, case))
    said = text(blocks[:-1])
    assert said.startswith(f"{state}: ")
    assert gate.CODES[judged.outcome] == EXITS[state]
    for outcome in {*GateOutcome} - {judged.outcome}:
        assert outcome not in top
        assert outcome not in said
    for number, look in judged.known:
        assert _change(look) in said
        assert _change(look) in top
        _, _, interval = _change(look).partition(" ")
        own = rf"{number.headline.title}: baseline [^:]*?, candidate [^:]*?"
        assert re.search(own + re.escape(f", 95% interval {interval}") * bool(interval), top)
    for reason in reasons:
        assert reason.text in said
        assert reason.text in top
    assert ("Keep the baseline" in top) == (state == "WORSE")
    assert ("Take" in top) == (state in ("SAME", "BETTER"))


def planted_search(rng: random.Random) -> LimitResult:
    """A search that ended in one of its four ways, with other probes each time."""
    state = rng.choice(["confirmed", "open", "lost", "none"])
    late = [LateShare(rng.uniform(0.6, 0.9), 200.0), LateShare(rng.uniform(0.1, 0.3), 150.0)]
    good = [LateShare(rng.uniform(0, 0.05), 400.0)] * 2
    low, high = rng.choice([1.0, 2.0]), rng.choice([4.0, 8.0])
    missed = LoadProbe(1, high, Purpose.SCOUT, ProbeLook(Result.FAIL, 300, tuple(late)))
    held = LoadProbe(2, low, Purpose.HOLDS, ProbeLook(Result.PASS, 600, tuple(good)))
    probes = {"none": (missed,), "lost": (missed, held, *LOST)}.get(state, (missed, held))
    ends = {"confirmed": (low, high), "none": (None, high)}.get(state, (None, None))
    found = replace(FOUND, low=ends[0], high=ends[1], probes=probes, more_requests=500)
    why = "The last 3 probes could not decide." if state == "lost" else ""
    names = tuple(f"run-{k}" for k in range(len(probes)))
    targets = tuple(bound.text for bound in BOUNDS)
    return LimitResult("vllm", "rate", targets, 600.0, found, None if why else 90.0, names, why=why)


@pytest.mark.parametrize("seed", range(30))
def test_a_search_says_the_same_in_the_terminal_on_its_page_and_by_its_code(runs, seed):
    result = planted_search(random.Random(seed))
    own = [runs[k % 2] for k in range(len(result.runs))]
    state, top = header(limit_page(result, own))
    said = text(limit_blocks(result, own))
    code = limit.CODES[result.state]
    assert code == EXITS[result.state]
    assert state == {0: "CONFIRMED", 3: "NO LOAD HOLDS", 4: "NOT CONFIRMED"}[code]
    sentence = said.splitlines()[0]
    assert sentence in top
    assert ("not confirmed" in sentence) == (code == 4)
    assert ("the chance that this is wrong" in sentence) == (code == 0)
    assert ("no load meets all SLOs" in sentence) == (code == 3)
