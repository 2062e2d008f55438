"""Engine, stepped by hand: same tokens however they are scheduled, and a step log that adds up."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from burstline.servers.reference.engine import InferenceEngine
from burstline.servers.reference.model import Transformer
from burstline.servers.reference.scheduler import Sequence
from burstline.servers.reference.steplog import StepLog, load_steps
from burstline.workloads.prompts import rng
from burstline.workloads.request import Sampling

PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(1, 300, n)] for n in (3, 9, 17, 30, 5)]


def generate(
    engine: InferenceEngine, n_tok: int = 20, prompts: list[list[int]] = PROMPTS, **more
) -> list[list[int]]:
    sequences = [Sequence(list(p), n_tok, ignore_eos=True, **more) for p in prompts]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
    return [sequence.ids[sequence.n_prompt :] for sequence in sequences]


def test_preemption_changes_no_greedy_token(make_engine: Callable[..., InferenceEngine]) -> None:
    roomy, tight = make_engine(n_blocks=100), make_engine(n_blocks=16)
    assert generate(roomy) == generate(tight)
    assert roomy.scheduler.n_preemptions == 0
    assert tight.scheduler.n_preemptions > 0
    assert tight.scheduler.pool.n_free == 16


def test_preemption_changes_no_sampled_token(make_engine: Callable[..., InferenceEngine]) -> None:
    def sampled(engine: InferenceEngine) -> list[list[int]]:
        sequences = [
            Sequence(list(p), 20, ignore_eos=True, sampling=Sampling(1.0), rng=rng(i, "request"))
            for i, p in enumerate(PROMPTS)
        ]
        for sequence in sequences:
            engine.scheduler.add(sequence)
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.step()
        return [sequence.ids for sequence in sequences]

    tight = make_engine(n_blocks=16)
    assert sampled(make_engine(n_blocks=100)) == sampled(tight)
    assert tight.scheduler.n_preemptions > 0


def test_a_small_budget_changes_no_greedy_token(make_engine: Callable[..., InferenceEngine]) -> None:
    assert generate(make_engine(budget=1000)) == generate(make_engine(budget=7, seqs=2))


def test_eos_ends_a_sequence_unless_ignored(
    make_engine: Callable[..., InferenceEngine], model: Transformer
) -> None:
    free = generate(make_engine(), prompts=PROMPTS[:1])[0]
    engine = make_engine()
    engine.model = Transformer(replace(model.config, eos_ids=(free[2],)), model.weights)
    stopped, patient = Sequence(list(PROMPTS[0]), 20), Sequence(list(PROMPTS[0]), 20, ignore_eos=True)
    for sequence in (stopped, patient):
        engine.scheduler.add(sequence)
    reasons = [reason for _ in range(20) for _, _, reason in engine.step() if reason]
    assert stopped.ids[stopped.n_prompt :] == free[: free.index(free[2]) + 1]
    assert patient.n_output == 20
    assert reasons[0] == "stop"


def test_counts_add_up(make_engine: Callable[..., InferenceEngine]) -> None:
    engine = make_engine(n_blocks=16)
    generate(engine)
    assert engine.n_tok == {"prompt": sum(map(len, PROMPTS)), "generation": 20 * len(PROMPTS)}
    assert engine.n_finished == {"length": len(PROMPTS)}


def test_a_failing_step_ends_every_request_with_error_and_is_told(
    make_engine: Callable[..., InferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, delivered = make_engine(), SimpleQueue[list[tuple]]()
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    engine.submit(Sequence([1, 2], 5, sink="first"))
    engine.start(delivered.put)
    assert delivered.get(timeout=10) == [("first", None, "error")]
    assert engine.failure is not None
    assert "ZeroDivisionError" in engine.failure
    engine.submit(Sequence([1, 2], 5, sink="late"))
    assert delivered.get(timeout=10) == [("late", None, "error")]


def test_the_step_log_accounts_for_every_token_and_nanosecond(
    make_engine: Callable[..., InferenceEngine], tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, {"engine": "reference"})
    generate(make_engine(step_log=log))
    log.close()
    header, steps = load_steps(path)
    assert (header["schema"], header["engine"]) == (1, "reference")
    assert len({len(column) for column in steps.values()}) == 1
    assert sum(steps["prefill_tok"]) == sum(map(len, PROMPTS))
    assert sum(steps["decode_tok"]) == 19 * len(PROMPTS)
    assert sum(steps["n_logits"]) == 20 * len(PROMPTS)
    assert steps["step"] == list(range(len(steps["step"])))
    gemms = ("qkv_proj_ns", "o_proj_ns", "gate_up_proj_ns", "down_proj_ns", "lm_head_ns")
    for i, (start, end) in enumerate(zip(steps["start_ns"], steps["end_ns"], strict=True)):
        parts = [steps[name][i] for name in (*gemms, "attention_ns", "rest_ns")]
        assert sum(parts) == end - start
        assert min(parts) >= 0
        assert sum(steps["new_tok"][i]) == steps["prefill_tok"][i] + steps["decode_tok"][i]
        assert all(
            0 < new <= seen for new, seen in zip(steps["new_tok"][i], steps["context_tok"][i], strict=True)
        )


def test_a_torn_step_log_is_read_up_to_its_last_whole_line(
    make_engine: Callable[..., InferenceEngine], tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, {})
    generate(make_engine(step_log=log))
    log.close()
    n_steps = len(load_steps(path)[1]["step"])
    path.write_bytes(path.read_bytes()[:-25])
    assert len(load_steps(path)[1]["step"]) == n_steps - 1


@pytest.mark.parametrize(("text", "said"), [("", "empty"), ('{"schema": 99}\n', "schema 99")])
def test_a_log_that_is_no_step_log_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_steps(path)
