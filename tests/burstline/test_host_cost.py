"""The host's cost out of a step log: found as it was put in, or said to be unknown."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from burstline.bench import host_overhead as measuring
from burstline.bench.fire import DriveOutcome
from burstline.bench.host_overhead import BURST, _slowness, fit_of, host_fit, host_of
from burstline.measure.record.manifest import HardwareFacts
from burstline.roofline.device.calibration import HostFit, interval_factors, load_calibration
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import read_config
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import Deployment
from burstline.roofline.reconcile.inputs import Setup, StepSeen
from burstline.servers.messages import EngineError
from burstline.workloads.spec import LoadSpec

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
STEP_NS, TOKEN_NS, PROMPT_TOK_NS = 200_000, 37_000, 900
KERNEL_TOKEN_NS = 9_000


def log(*, cpu=1.0, wall=1.0, n_decodes=80):
    """4 prompts of 512 a step until 128 requests run, then they end one by one; the costs as above.

    `cpu`, `wall`: how many times as long a step seems by that clock.
    """
    prefills = [([1] * 4 * k + [512] * 4, 2048) for k in range(32)]
    decodes = [([1] * n, 0) for n in np.linspace(128, 1, n_decodes).astype(int).tolist()]
    rows, at = [], {"start_ns": 0.0, "cpu_ns": 5e9}
    for new_tok, prompt_tok in [*prefills, *decodes]:
        n = len(new_tok)
        counts = {"prefill_tok": prompt_tok, "n_logits": n, "new_tok": new_tok, "context_tok": [600] * n}
        counts |= {"attention_ns": 1000, "lm_head_ns": 1000}
        rows.append({**at, **counts})
        spent_ns = 1e9 * kernels_s(Step.of([(new, 600, 1) for new in new_tok]))
        spent_ns += STEP_NS + TOKEN_NS * n + PROMPT_TOK_NS * prompt_tok
        at = {"start_ns": at["start_ns"] + wall * spent_ns, "cpu_ns": at["cpu_ns"] + cpu * spent_ns}
    return {name: [row[name] for row in rows] for name in rows[0]}


def kernels_s(step):
    return KERNEL_TOKEN_NS / 1e9 * step.n_tok


@pytest.mark.parametrize(
    "seen",
    [log(), log(wall=2.5), log(cpu=1.9)],
    ids=["quiet", "neighbours", "two-cores"],
)
def test_a_log_of_known_costs_gives_them_back(seen):
    found = fit_of(seen, kernels_s)
    assert found.token_s == pytest.approx(TOKEN_NS / 1e9, rel=0.02)
    assert found.step_s == pytest.approx(STEP_NS / 1e9, rel=0.02)
    assert found.prompt_tok_s == pytest.approx(PROMPT_TOK_NS / 1e9, rel=0.05)
    assert found.engine == "reference"


def test_a_burst_on_a_machine_that_is_slower_than_when_it_was_calibrated_gives_the_same_host():
    """Its own products tell how much slower; that attention takes longer than alone is the host's."""
    slow = log(cpu=1.7, wall=1.7)
    each = [
        SimpleNamespace(op=SimpleNamespace(name="norm"), seconds=9.0),
        *(SimpleNamespace(op=SimpleNamespace(name=name), seconds=1e-6) for name in ("attention", "lm_head")),
    ]
    logged = slow | {"attention_ns": [9000] * 112, "lm_head_ns": [1700] * 112}
    found = _slowness(logged, SimpleNamespace(predict=lambda *_: SimpleNamespace(predictions=each)), None)
    assert found == pytest.approx(1.7)
    assert fit_of(slow, kernels_s, found).token_s == pytest.approx(TOKEN_NS / 1e9, rel=0.02)


@pytest.mark.parametrize("n_steps", [0, 32, 40], ids=["empty", "prompts-only", "too-few"])
def test_a_log_that_ends_too_early_says_nothing(n_steps):
    assert fit_of({name: column[:n_steps] for name, column in log().items()}, kernels_s) is None


def test_the_steps_of_a_run_give_the_cost_of_its_engines_host(monkeypatch):
    calibration = replace(load_calibration(load_device("h100")), measured_spread=0.0)
    model = read_config(CONFIG, "tiny")
    setup = Setup(Deployment(model, QUANTS["fp32"], Parallel(), load_device("a100-sxm4-80g")), calibration)
    clock, put_in = setup.clock(), HostFit("vllm", 2e-3, 5e-5, 1e-6, "")
    steps = [Step.of([(1, 300, 1)] * n) for n in range(1, 33)] + [Step.of([(200, 200, 1), (1, 300, 1)])] * 9
    seen = [StepSeen(step, clock(step) + put_in.seconds(step, 0, 0.0)) for step in steps]
    run = SimpleNamespace(name="r", manifest=SimpleNamespace(engine="vllm", hardware=HardwareFacts()))
    monkeypatch.setattr(measuring, "setup_of", lambda _: (setup, []))
    monkeypatch.setattr(measuring, "seen_in", lambda *_: SimpleNamespace(steps=seen))
    found = host_of(run)
    costs = found.step_s, found.token_s, found.prompt_tok_s
    assert costs == pytest.approx((put_in.step_s, put_in.token_s, put_in.prompt_tok_s), rel=0.01)
    assert found.engine == "vllm"


def test_a_step_is_charged_for_itself_its_tokens_and_its_prompts():
    host = HostFit("reference", 1.0, 0.1, 0.001, "")
    step = Step.of([(1, 100, 1), (1, 200, 1), (500, 500, 1), (300, 300, 0)])
    assert host.seconds(step, 100, 0.0) == pytest.approx(1.0 + 3 * 0.1 + 800 * 0.001)


def test_a_server_that_does_not_start_leaves_the_device_without_a_host(monkeypatch):
    def fails(*_):
        raise EngineError("it ended")

    monkeypatch.setattr(measuring, "serving", fails)
    assert measured_host() is None


def test_a_server_that_computed_nothing_says_nothing(monkeypatch):
    faked = {
        "serving": lambda *_: nullcontext(SimpleNamespace(target=None)),
        "job_of": lambda *_, **__: None,
        "fire": lambda *_: DriveOutcome([SimpleNamespace(t0_ns=0)], False),
        "load_steps": lambda _: ({}, {}),
    }
    for name, fake in faked.items():
        monkeypatch.setattr(measuring, name, fake)
    assert measured_host() is None


def test_what_was_measured_names_its_source(monkeypatch):
    monkeypatch.setattr(measuring, "_burst_log", lambda *_: log())
    found = measured_host()
    assert found.engine == "reference"
    assert "burst" in found.source


def test_a_model_whose_steps_hide_the_host_is_not_started_and_counts_as_measured(monkeypatch):
    monkeypatch.setattr(measuring, "LONGEST_PROMPTS_S", 0.0)
    monkeypatch.setattr(measuring, "serving", lambda *_: pytest.fail("an engine was started"))
    lost = measured_host()
    assert lost.seconds(Step.decode(8, 512), 100, 1.0) == 0.0
    of_cpu = replace(load_calibration(load_device("h100")), measured_spread=0.05)
    factors = [
        interval_factors(load_device("h100"), replace(of_cpu, host=h), dense=True)[0] for h in (lost, None)
    ]
    assert all(factors[0][name] < factors[1][name] for name in factors[0])


def measured_host(burst=BURST):
    device = load_device("h100")
    return host_fit(CONFIG, 1, device, load_calibration(device), burst)


@pytest.mark.slow
def test_a_burst_that_is_not_answered_in_time_says_nothing():
    burst = LoadSpec(requests=32, prompt_tokens="512", output_tokens="512", deadline_s=0.02)
    assert measured_host(burst) is None


@pytest.mark.slow
@pytest.mark.measures
def test_a_real_burst_measures_what_a_python_server_can_cost():
    found = measured_host(LoadSpec(requests=64, prompt_tokens="128", output_tokens="8..64", deadline_s=30.0))
    assert 1e-6 < found.token_s < 1e-3
    assert 0 <= found.step_s < 0.1
    assert 0 <= found.prompt_tok_s < 1e-3
