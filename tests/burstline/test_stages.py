"""What is sent before the load counts for nothing, and is kept."""

import json
import random

import pytest

from burstline.measure.record.rundir import open_run
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Shape, make_plan, with_warm_up
from burstline.workloads.prompts import vocabulary_from_size
from tests.burstline.inside import ran
from tests.burstline.test_run import the_run
from tests.truth.rig import truth_server
from tests.truth.script import script_from
from tests.verdicts import done

VOCABULARY = vocabulary_from_size(32_000)


def plan(due_s: list[float], warm_up):
    made = make_plan(Shape(Lengths(20, 40), Lengths(50, 90)), due_s, VOCABULARY, 0)
    return made, with_warm_up(made, warm_up, VOCABULARY)


def test_a_warm_up_has_the_loads_lengths_other_prompts_and_changes_nothing_of_the_load():
    before, after = plan([0.1 * k for k in range(20)], 30)
    (stage,) = after.stages
    assert after.sha256 == before.sha256
    assert after.requests == before.requests
    assert {r.index for r in stage.requests} == set(range(20, 50))
    lengths = {(r.n_prompt_tok, r.n_output_tok) for r in before.requests}
    assert {(r.n_prompt_tok, r.n_output_tok) for r in stage.requests} <= lengths
    heads = {bytes(r.prompt_ids[:8]) for r in [*before.requests, *stage.requests]}
    assert len(heads) == 50


def test_an_automatic_warm_up_is_bounded_and_its_bursts_are_the_same_work():
    _, after = plan([0.0] * 20, "auto")
    asked = [[(r.n_prompt_tok, r.n_output_tok) for r in stage.requests] for stage in after.stages]
    assert 2 < len(asked) < 10
    assert all(burst == asked[0] for burst in asked)


STEADY_S, COLD_S = 0.4, 1.5
SCRIPTS = [{"ttft_s": COLD_S, "gaps_s": 0.01}] * 10 + [{"ttft_s": STEADY_S, "gaps_s": 0.01}]
"""Ten slow first replies; p99 needs 662 requests, and ten of 700 move it."""


def varied_scripts():
    """The same with steady replies that vary by a tenth: the machine's noise then decides nothing."""
    draw = random.Random(0)
    steady = [
        {"ttft_s": draw.gauss(STEADY_S, STEADY_S / 10), "gaps_s": draw.gauss(0.01, 0.001)} for _ in range(700)
    ]
    return [*SCRIPTS[:-1], *steady]


def cold_run(out, *flags: str, server=SCRIPTS):
    """Where a run of 700 requests at 200 a second lies, at a server that begins with ten slow replies."""
    load = ("--engine", "truth", "--output-tokens", "4", "--prompt-tokens", "32", *flags)
    with truth_server(list(map(script_from, server))) as truth:
        code, output = ran(out, *load, "--url", truth.url)
    assert done(code, out), output
    return the_run(out), output


def coded(code, reasons):
    """The one with this code; none is a failed assertion, which a busy machine leaves undecided."""
    found = [reason for reason in reasons if reason["code"] == code]
    assert found
    return found[0]


@pytest.mark.slow
@pytest.mark.measures
def test_with_a_warm_up_p99_is_the_servers_steady_value(tmp_path):
    path, _ = cold_run(tmp_path, "--arrival", "steps:200x3.5", "--warmup", "10")
    summary = json.loads((path / "summary.json").read_text())
    assert summary["counts"]["planned"] == 700
    assert summary["metrics"]["ttft"]["p99"]["point"] == pytest.approx(STEADY_S, rel=0.05)
    reasons = (*summary["verdict"]["reasons"], *summary["verdict"]["warnings"])
    assert "cold" not in {reason["code"] for reason in reasons}
    warm = open_run(path).manifest.load.stages[0]
    assert warm.ok == 10
    assert warm.e2e_p50_s > COLD_S


@pytest.mark.slow
@pytest.mark.measures("COLD")
def test_without_a_warm_up_the_run_is_cold_and_says_by_how_much(tmp_path):
    path, output = cold_run(tmp_path, "--arrival", "steps:200x3.5")
    summary = json.loads((path / "summary.json").read_text())
    assert summary["metrics"]["ttft"]["p99"]["point"] > 1
    cold = coded("cold", summary["verdict"]["reasons"])
    assert summary["verdict"]["state"] == "COLD"
    assert "The first 10 requests waited 1.1 s longer" in cold["text"]
    assert "They move TTFT p99 from 40" in cold["text"]
    assert cold["text"] in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.measures
def test_a_run_that_counts_from_its_steady_state_is_not_cold_but_says_what_it_left_out(tmp_path):
    path, _ = cold_run(tmp_path, "--rate", "200", "--requests", "700", server=varied_scripts())
    summary = json.loads((path / "summary.json").read_text())
    assert summary["window"]["n_warm_up"]["point"] >= 10
    assert "cold" not in {reason["code"] for reason in summary["verdict"]["reasons"]}
    cold = coded("cold", summary["verdict"]["warnings"])
    assert "COLD: The first 10 requests waited 1.1 s longer" in cold["text"]
