"""Which rates are called impossible: those of no set-up that agrees with what is known, and no others."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.ops import Step, ops
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import Clock, Deployment, ceilings
from burstline.roofline.predict.simulate import Asked, Limits, simulate
from burstline.roofline.reconcile.impossible import judged, run_checks
from burstline.roofline.reconcile.inputs import Known, MeasuredRun, Setup, StepSeen

H100 = load_device("h100")
LIMITS = Limits(64, 2048, 400_000)
UNKNOWN = Known(devices=False, weights=False, kv=False, speculation=False, at_most=None, one_request=8)


def deployed(model="llama-2-7b", quant="bf16", device=H100, **parallel):
    return Deployment(load_model(model)[0], QUANTS[quant], Parallel(**parallel), device)


def served(on, requests=None, limits=LIMITS, faster=1.0, logged=False):
    """A run at the very ceiling of a deployment, or so many times faster."""
    steps, clock = [], Clock(on, None)

    def timed(step):
        steps.append(StepSeen(step, clock(step) / faster))
        return steps[-1].seconds

    requests = requests or [Asked(0.0, 512, 64)] * 120
    result = simulate(requests, limits, timed)
    due = np.array([request.due_s for request in requests])
    first, last = due + result.ttft_s, due + result.e2e_s
    return MeasuredRun(requests, result.makespan_s, limits, steps if logged else None, logged, first, last)


def condemned(run, setup):
    return {each.what for each in judged(run_checks(run), setup)[0]}


ASSUMED = Setup(deployed(), None, UNKNOWN)


@pytest.mark.parametrize("logged", [False, True])
def test_the_ceiling_itself_is_possible_and_twice_as_fast_is_not(logged):
    known = Setup(deployed(), None)
    assert not condemned(served(deployed(), logged=logged), known)
    found = condemned(served(deployed(), faster=2.0, logged=logged), known)
    assert "prefill" in found
    assert ("prefill steps" in found) == logged


def test_a_recorded_run_is_possible_and_three_times_as_fast_is_not():
    """vLLM 0.19 on an RTX 4090, as its own log has it, all of its set-up known."""
    path = Path(__file__).parents[1] / "data" / "serving" / "rtx4090_replay" / "requests.jsonl"
    log = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    queued, first, last = (
        np.array([row[name] for row in log]) for name in ("queued_ts", "first_token_ts", "last_token_ts")
    )

    def recorded(faster):
        due, *ends = ((times - queued.min()) / faster for times in (queued, first, last))
        asked = [Asked(at, row["input_toks"], row["output_toks"]) for at, row in zip(due, log, strict=True)]
        return MeasuredRun(asked, ends[1].max(), Limits(256, 2048, 41_408), None, False, *ends)

    known = Setup(deployed("llama-3.1-8b", device=load_device("rtx4090")), None)
    assert not condemned(recorded(1), known)
    assert condemned(recorded(3), known)


@pytest.mark.parametrize(
    "really",
    [
        deployed(tp=8),
        deployed(dp=8, tp=8),
        deployed(quant="fp8"),
        deployed(quant="fp8-kv8", tp=4),
        deployed(quant="int4"),
    ],
    ids=["TP 8", "DP 8 of TP 8", "fp8", "fp8 on four", "int4"],
)
def test_an_unstated_set_up_is_never_condemned_and_what_would_explain_it_is_named(really):
    runs = [served(really), served(really, [Asked(0.0, 512, 64)])]
    found = [judged(run_checks(run), ASSUMED) for run in runs]
    assert not any(impossible for impossible, _ in found)
    assert all(each.by for _, explained in found for each in explained)
    assert any(explained for _, explained in found)
    assert any(condemned(run, Setup(deployed(), None)) for run in runs), "stated otherwise it is impossible"


def test_speculative_decoding_explains_several_tokens_in_the_time_of_one_pass():
    one_pass_s = sum(b.seconds for b in ceilings(deployed().ops(Step.decode(1, 600)), H100))
    request = Asked(0.0, 512, 65)
    prefill_s = served(deployed(), [Asked(0.0, 512, 1)]).makespan_s
    last = np.array([prefill_s + 16 * one_pass_s * 1.05])  # four tokens a step
    run = MeasuredRun([request], float(last[0]), LIMITS, None, False, np.array([prefill_s]), last)
    known = Setup(deployed(), None)
    assert "a request from end to end" in condemned(run, known)
    assert not condemned(run, replace(known, draft_tok=3))
    assert not condemned(run, replace(known, known=Known(speculation=False)))


def test_experts_chosen_alike_are_possible_whatever_is_expected():
    mixtral = deployed("mixtral-8x7b", device=load_device("h200"), quant="fp8")
    skewed = replace(mixtral, expert_share=0.5)
    run = served(mixtral, [Asked(0.0, 256, 64)] * 40, faster=1.0, logged=True)
    assert not condemned(run, Setup(mixtral, None))
    step = Step.decode(8, 300)
    bytes_ = [sum(op.count * op.bytes for op in on.ops(step)) for on in (mixtral, skewed)]
    least = [
        sum(op.count * (op.bytes - op.avoidable_bytes) for op in on.ops(step)) for on in (mixtral, skewed)
    ]
    assert bytes_[0] > bytes_[1]
    assert least[0] == pytest.approx(least[1])
    one = [op for op in ops(mixtral.model, mixtral.quant, Parallel(), Step.decode(1, 300)) if op.groups > 1]
    assert all(op.avoidable_bytes == pytest.approx(0, abs=1) for op in one if op.kind == "matmul")


@pytest.mark.parametrize("budget", [512, 8192, 1 << 20])
def test_no_verdict_rests_on_the_token_budget(budget):
    run = served(deployed(), limits=replace(LIMITS, max_num_batched_tokens=budget, max_num_seqs=512))
    assert not condemned(replace(run, limits=LIMITS), Setup(deployed(), None))


def test_cached_prompts_are_condemned_unless_the_server_reports_them():
    setup = Setup(deployed(), None)
    cached = [Asked(0.0, 512, 8, 496)] * 100
    run = served(deployed(), [Asked(0.0, 16, 8)] * 100, faster=0.5)
    claimed = replace(run, requests=[Asked(0.0, 512, 8)] * 100)
    assert "prefill" in condemned(claimed, setup)
    assert not condemned(replace(run, requests=cached), setup)


def test_tokens_that_nobody_computed_are_condemned_even_where_nothing_is_stated():
    """One request's answer cannot be spread over more devices than links join."""
    n = 50
    due = np.arange(n) * 0.01
    run = MeasuredRun(
        [Asked(at, 512, 64) for at in due.tolist()], 1.0, LIMITS, None, False, due + 1e-4, due + 2e-4
    )
    assert {"a first token", "a request from end to end"} <= condemned(run, ASSUMED)


def test_a_delay_before_the_first_token_arrives_makes_nothing_impossible():
    """Bytes held back on the way arrive together: the time between tokens shrinks, the whole does not."""
    run = served(deployed(), [Asked(0.0, 512, 64)] * 4)
    assert not condemned(replace(run, first_s=run.last_s - 1e-6), Setup(deployed(), None))


def test_a_cpu_measured_on_one_core_condemns_nobody_who_may_use_more():
    cpu = replace(H100, arch="measured", peaks={"fp32": 1e11}, n_units=1, links=())
    on = deployed(quant="fp32", device=cpu)
    known = Known(devices=False, weights=False, kv=False, speculation=False, at_most=8, one_request=8)
    faster = served(replace(on, parallel=Parallel(dp=8)), faster=8.0)
    assert not condemned(faster, Setup(on, None, known))
