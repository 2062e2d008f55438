"""What is sent before the load counts for nothing, and is kept."""

import pyarrow.parquet as pq
import pytest

from loadgen.record.rundir import open_run
from tests.burstline.test_run import finished, the_run
from workloads.lengths import Lengths
from workloads.plan import Shape, make_plan
from workloads.prompts import vocabulary_from_size
from workloads.warm_up import HANDOVER, WarmUp, with_warm_up

VOCABULARY = vocabulary_from_size(32_000, "test")


def plan(due_s: list[float], warm_up: WarmUp):
    made = make_plan(Shape(Lengths(20, 40), Lengths(50, 90)), due_s, VOCABULARY, 0)
    return made, with_warm_up(made, warm_up, VOCABULARY)


def test_a_warm_up_has_the_loads_lengths_other_prompts_and_changes_nothing_of_the_load():
    before, after = plan([0.1 * k for k in range(20)], WarmUp(n=30))
    (stage,) = after.stages
    assert after.sha256 == before.sha256
    assert after.requests == before.requests
    assert {r.index for r in stage.requests} == set(range(20, 50))
    lengths = {(r.n_prompt_tok, r.n_output_tok) for r in before.requests}
    assert {(r.n_prompt_tok, r.n_output_tok) for r in stage.requests} <= lengths
    heads = {bytes(r.prompt_ids[:8]) for r in [*before.requests, *stage.requests]}
    assert len(heads) == 50


@pytest.mark.parametrize("warm_up", [WarmUp(n=15, handover=True), WarmUp(seconds=1.0, handover=True)])
def test_a_handover_ends_where_the_load_begins(warm_up):
    _, after = plan([0.1 * k for k in range(20)], warm_up)
    (stage,) = after.stages
    assert stage.name == HANDOVER
    assert list(stage.due_ns) == sorted(stage.due_ns)
    assert -200_000_000 <= stage.due_ns[-1] < 0


def test_an_automatic_warm_up_is_bounded_and_its_bursts_are_the_same_work():
    _, after = plan([0.0] * 20, WarmUp())
    asked = [[(r.n_prompt_tok, r.n_output_tok) for r in stage.requests] for stage in after.stages]
    assert 2 < len(asked) < 10
    assert all(burst == asked[0] for burst in asked)


@pytest.mark.slow
def test_slow_first_replies_are_met_by_the_warm_up_and_by_nothing_that_counts(tmp_path):
    import json

    scripts = [{"ttft_s": 1.0, "gaps_s": 0.01}] * 10 + [{"ttft_s": 0.1, "gaps_s": 0.01}]
    (tmp_path / "scripts.json").write_text(json.dumps(scripts))
    flags = ("--engine", "truth", "--requests", "200", "--rate", "100", "--output-tokens", "4")
    script = ("--", "--script", f"@{tmp_path / 'scripts.json'}")
    code, output = finished(tmp_path / "runs", *flags, "--warmup", "10", *script)
    assert code in (0, 4), output
    path = the_run(tmp_path / "runs")
    summary = json.loads((path / "summary.json").read_text())
    assert summary["counts"]["planned"] == 200
    assert summary["metrics"]["ttft"]["p90"]["point"] < 0.2
    assert "cold" not in {warning["code"] for warning in summary["verdict"]["warnings"]}
    warm = pq.read_table(path / "warmup.parquet").to_pylist()
    assert [row["outcome"] for row in warm] == ["ok"] * 10
    assert all(row["closed_ns"] < 0 for row in warm)
    assert open_run(path).manifest.load.stages[0].e2e_p50_s > 1


@pytest.mark.slow
def test_without_a_warm_up_slow_first_replies_are_called_cold_with_their_size(tmp_path):
    import json

    scripts = [{"ttft_s": 1.0, "gaps_s": 0.01}] * 10 + [{"ttft_s": 0.1, "gaps_s": 0.01}]
    (tmp_path / "scripts.json").write_text(json.dumps(scripts))
    flags = ("--engine", "truth", "--requests", "200", "--rate", "100", "--output-tokens", "4")
    finished(tmp_path / "runs", *flags, "--", "--script", f"@{tmp_path / 'scripts.json'}")
    summary = json.loads((the_run(tmp_path / "runs") / "summary.json").read_text())
    cold = next(w for w in summary["verdict"]["warnings"] if w["code"] == "cold")
    assert "the first 10 requests waited 0.9" in cold["text"]
