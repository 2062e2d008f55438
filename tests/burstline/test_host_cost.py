"""The host's cost out of a step log: found as it was put in, or said to be unknown."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from burstline.bench.fire import Load
from burstline.bench.wish import Wish
from burstline.machine import host_overhead
from burstline.machine.host_overhead import add_host, fit_of, host_fit
from roofline.calibrate.calibrate import device_toml
from roofline.device.calibration import HostFit, load_calibration
from roofline.device.device import load_device
from roofline.model.step import Step
from servers.engine import EngineError

STEP_NS, TOKEN_NS, PROMPT_TOK_NS = 200_000, 37_000, 900
KERNEL_TOKEN_NS, KERNEL_PROMPT_NS = 9_000, 1_200


def log(*, cpu=1.0, wall=1.0, lumps=False, n_decodes=80):
    """4 prompts of 512 a step until 128 requests run, then they end one by one; the costs as above.

    `cpu`, `wall`: how many times as long a step seems by that clock. With `lumps` kernels are interrupted by
    what is delivered, in nine steps of ten.
    """
    prefills = [(2048, 4 * k, 4 * k + 4) for k in range(32)]
    decodes = [(0, n, n) for n in np.linspace(128, 1, n_decodes).astype(int).tolist()]
    rows, at = [], {"start_ns": 0.0, "cpu_ns": 5e9}
    for i, (prompt_tok, decode_tok, n_logits) in enumerate([*prefills, *decodes]):
        host_ns = STEP_NS + TOKEN_NS * n_logits + PROMPT_TOK_NS * prompt_tok
        own = n_logits if prompt_tok == 0 else decode_tok
        kernel_ns = KERNEL_TOKEN_NS * own + KERNEL_PROMPT_NS * prompt_tok
        seen_ns = kernel_ns + (0.6 * host_ns if lumps and i % 10 else 0)
        counts = {"prefill_tok": prompt_tok, "decode_tok": decode_tok, "n_logits": n_logits}
        gemms = {"qkv_proj_ns": 0.2 * seen_ns, "lm_head_ns": 0.3 * seen_ns}
        rows.append({**at, **counts, **gemms, "attention_ns": 0.5 * seen_ns, "rest_ns": 1.0})
        spent_ns = kernel_ns + host_ns
        at = {"start_ns": at["start_ns"] + wall * spent_ns, "cpu_ns": at["cpu_ns"] + cpu * spent_ns}
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize(
    "seen",
    [log(), log(lumps=True), log(wall=2.5), log(cpu=1.9)],
    ids=["quiet", "kernels-interrupted", "neighbours", "two-cores"],
)
def test_a_log_of_known_costs_gives_them_back(seen):
    found = fit_of(seen)
    assert found.token_s == pytest.approx(TOKEN_NS / 1e9, rel=0.02)
    assert found.step_s == pytest.approx(STEP_NS / 1e9, rel=0.02)
    assert found.prompt_tok_s == pytest.approx(PROMPT_TOK_NS / 1e9, rel=0.05)
    assert found.engine == "reference"


@pytest.mark.parametrize("n_steps", [0, 32, 40], ids=["empty", "prompts-only", "too-few"])
def test_a_log_that_ends_too_early_says_nothing(n_steps):
    assert fit_of({name: column[:n_steps] for name, column in log().items()}) is None


def test_a_step_is_charged_for_itself_its_tokens_and_its_prompts():
    host = HostFit("reference", 1.0, 0.1, 0.001, "")
    step = Step.of([(1, 100, 1), (1, 200, 1), (500, 500, 1), (300, 300, 0)])
    assert host.seconds(step, 100, 1.0) == pytest.approx(1.0 + 3 * 0.1 + 800 * 0.001)


def test_a_server_that_does_not_start_leaves_the_device_without_a_host(tmp_path, monkeypatch):
    def fails(*_):
        raise EngineError("it ended")

    monkeypatch.setattr(host_overhead, "serving", fails)
    before = device_file(tmp_path).read_text()
    assert add_host(tmp_path / "device.toml", 512, 1) is None
    assert (tmp_path / "device.toml").read_text() == before


def test_a_server_that_computed_nothing_says_nothing(monkeypatch):
    faked = {
        "serving": lambda *_: nullcontext(SimpleNamespace(target=None)),
        "job_of": lambda *_, **__: None,
        "fire": lambda *_: Load([SimpleNamespace(t0_ns=0)], False),
        "load_steps": lambda _: ({}, {}),
    }
    for name, fake in faked.items():
        monkeypatch.setattr(host_overhead, name, fake)
    assert host_fit(512, 1) is None


def test_what_was_measured_is_kept_in_the_devices_file_with_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(host_overhead, "_burst_log", lambda *_: log())
    found = add_host(device_file(tmp_path), 512, 1)
    kept = load_calibration(str(tmp_path / "device.toml")).host
    assert kept.token_s == pytest.approx(found.token_s, rel=1e-3)
    assert (kept.engine, kept.source) == (found.engine, found.source)
    assert "burst" in kept.source


def device_file(folder):
    device = load_device("h100")
    path = folder / "device.toml"
    path.write_text(device_toml(device, load_calibration(device)))
    return path


@pytest.mark.slow
def test_a_burst_that_is_not_answered_in_time_says_nothing():
    burst = Wish(requests=32, prompt_tokens="512", output_tokens="64", deadline_s=0.1)
    assert host_fit(512, 1, burst) is None


@pytest.mark.slow
def test_a_real_burst_measures_what_a_python_server_can_cost():
    found = host_fit(512, 1, Wish(requests=64, prompt_tokens="128", output_tokens="8..64", deadline_s=30.0))
    assert 1e-6 < found.token_s < 1e-3
    assert 0 <= found.step_s < 0.1
    assert 0 <= found.prompt_tok_s < 1e-3
