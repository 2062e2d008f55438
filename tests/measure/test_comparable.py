"""Engines are compared only where they did the same work; each difference is named for what it is."""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.measure.record import tables
from burstline.measure.record.columns import columns_of
from burstline.measure.record.record import Outcome, Record
from burstline.measure.record.verdict import Reason
from burstline.measure.stats.estimates import Absent, Estimate
from burstline.measure.verdict.comparable import (
    ALONE,
    COMPARABLE,
    ServedWork,
    comparability,
    quantization_of,
    settings_of,
)
from burstline.measure.verdict.factors import differing
from burstline.servers.identity import Identity
from burstline.workloads.plan import Plan, expected_hit_fraction, fingerprint, hits
from burstline.workloads.request import Request, Sampling
from tests.measure.making import failed, ok, percentile

SETTINGS = {
    "concurrency": "open loop",
    "sampling": "greedy",
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "quantization": "none",
    "max_num_seqs": "256",
    "max_num_batched_tokens": "8,192",
    "tensor_parallel_size": "1",
}


def served(n: int = 100, n_tok: int = 8, asked: int = 8, step_s: float = 0.01, **fields: Any) -> list[Record]:
    """`n` replies of `n_tok` tokens where `asked` were asked for."""
    finish = "length" if n_tok == asked else "stop"
    common = {"planned_output_tok": asked, "planned_prompt_tok": 512, "prompt_tok": 512}
    common |= {"finish_reason": finish, "outcome": "ok" if n_tok == asked else "short"}
    return [replace(ok(k, 0.1 + k * 0.001, [step_s] * (n_tok - 1)), **{**common, **fields}) for k in range(n)]


WARM = Reason("prefix-more", "The prefix cache served 40%.", "Pass a new --salt.")


def refused(n: int, first: int) -> list[Record]:
    return [replace(failed(first + k, "http_503", 8), planned_prompt_tok=512) for k in range(n)]


def work(label: str, records: list[Record], **changes: Any) -> ServedWork:
    columns = columns_of(tables.record_table(records))
    settings = {**SETTINGS, **changes.pop("settings", {})}
    fields = {"verdict": "VALID", "cached_fraction": 0.0}
    return ServedWork(
        label=label, planned=columns, columns=columns, settings=settings, **{**fields, **changes}
    )


def codes(gate) -> list[str]:
    return [reason.code for reason in gate.reasons]


def test_the_same_work_under_the_same_settings_is_comparable():
    gate = comparability([work("A", served()), work("B", served(step_s=0.02)), work("A", served())])
    assert (gate.state, gate.reasons, gate.warnings) == (COMPARABLE, (), ())
    assert all(fact.agrees for fact in gate.facts)


@pytest.mark.parametrize(
    ("other", "code", "words"),
    [
        (work("B", served(prompt_tok=500)), "prompt-tokens", "500.0 at B, 512.0 at A"),
        (work("B", served(n_tok=6)), "output-tokens", "6.0 at B, 8.0 at A"),
        (work("B", served(finish_reason="eos_token")), "finish-reasons", "100.0% at B"),
        (work("B", served(70) + refused(30, 70)), "failures", "B: 30 of 100 requests, 30 got HTTP 503"),
        (
            work("B", served(), settings={"abandoned": "20.0% after 8 tokens"}),
            "workload",
            "Requests abandoned: none at A, 20.0% after 8 tokens at B",
        ),
        (work("B", served(), cached_fraction=0.5), "prefix-cache", "50.0% at B"),
        (work("B", served(), settings={"dtype": "float16"}), "precision", "float16 at B"),
        (work("B", served(), settings={"kv_cache_dtype": "fp8"}), "precision", "KV cache"),
        (work("B", served(), settings={"quantization": "awq"}), "precision", "awq at B"),
        (work("B", served(), settings={"sampling": "temperature 1, top_p 1"}), "sampling", "greedy at A"),
        (work("B", served(), settings={"max_num_seqs": "128"}), "batch-limits", "128 at B"),
        (work("B", served(), settings={"max_num_batched_tokens": "2,048"}), "batch-limits", "Most tokens"),
        (work("B", served(), settings={"tensor_parallel_size": "2"}), "parallelism", "2 at B"),
        (work("B", served(), settings={"concurrency": "8"}), "workload", "8 at B"),
        (work("B", served(99)), "workload", "99 for B"),
        (work("B", served(planned_prompt_tok=256, prompt_tok=512)), "workload", "different lengths"),
        (work("B", served(due_ns=5_000_000)), "workload", "different times"),
        (work("B", served(), cache_warnings=(WARM,)), "cache-truth", "B: The prefix cache served 40%."),
        (work("B", served(), verdict="NO SUMMARY"), "verdict", "FAILED"),
    ],
)
def test_each_difference_is_a_reason_in_its_own_words(other, code, words):
    gate = comparability([work("A", served()), other])
    assert not gate.comparable
    assert code in codes(gate)
    assert any(words in reason.text for reason in gate.reasons if reason.code == code)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ("A", "The run is DISTURBED. Others used 40%."),
        ("AA", "2 of 2 runs are DISTURBED (A). The first: Others used 40%."),
        ("AB", "2 of 2 runs are DISTURBED (A, B). The first (A): Others used 40%."),
    ],
)
def test_a_cause_that_several_runs_share_is_told_of_the_first(labels, text):
    causes = (Reason("busy-machine", f"Others used {share}%.", "") for share in (40, 58))
    works = [
        work(label, served(), verdict="DISTURBED", reasons=(cause,))
        for label, cause in zip(labels, causes, strict=False)
    ]
    assert [each.text for each in comparability(works).reasons if each.code == "verdict"] == [text]


def test_a_loop_by_time_is_judged_by_what_both_servers_needed_of_the_plan():
    """The faster one sends more of a plan whose later requests are longer."""

    def loop(label: str, n_sent: int) -> ServedWork:
        records = [
            replace(row, planned_output_tok=n_tok, output_tok=n_tok)
            for row, n_tok in zip(served(), np.linspace(4, 40, 100).astype(int).tolist(), strict=True)
        ]
        records[n_sent:] = [
            replace(failed(row.index, "not_sent", row.planned_output_tok), planned_prompt_tok=512)
            for row in records[n_sent:]
        ]
        whole = work(label, records, settings={"concurrency": "8"})
        return replace(whole, columns=whole.planned.without(Outcome.NOT_SENT))

    assert comparability([loop("A", 60), loop("B", 30)]).reasons == ()
    assert "workload" in codes(
        comparability([loop("A", 60), work("B", served(), settings={"concurrency": "8"})])
    )


def test_one_repeat_that_differs_is_enough():
    gate = comparability([work("A", served()), work("B", served()), work("B", served(n_tok=4))])
    assert "output-tokens" in codes(gate)


def test_a_special_token_in_front_is_within_the_tolerance():
    assert comparability([work("A", served()), work("B", served(prompt_tok=513))]).comparable


def test_what_an_engine_does_not_say_is_a_warning_and_not_a_difference():
    gate = comparability(
        [work("A", served()), work("B", served(), cached_fraction=None, settings={"dtype": None})]
    )
    assert gate.comparable
    (warning,) = gate.warnings
    assert "B does not report: prompt tokens from the prefix cache, precision of the weights" in warning.text


def test_an_engine_whose_lengths_cannot_be_forced_is_named_even_where_they_agree():
    gate = comparability([work("A", served()), work("TGI", served(), lengths_forced=False)])
    assert gate.comparable
    assert "TGI did not force" in gate.warnings[0].text


def test_a_run_that_cannot_be_believed_makes_the_comparison_so():
    gate = comparability([work("A", served()), work("B", served(), verdict="DISTURBED")])
    assert gate.state == "DISTURBED"
    assert "1 of 2 runs is DISTURBED (B)" in gate.reasons[0].text


def test_a_run_whose_client_was_late_is_compared_for_its_grades_withhold_what_is_unreliable():
    assert comparability([work("A", served()), work("B", served(), verdict="CLIENT-BOUND")]).comparable


def test_cache_hits_that_the_prompts_explain_are_no_reason():
    works = [work(label, served(), cached_fraction=0.5) for label in "AB"]
    assert comparability(works).comparable


def test_one_contender_alone_is_no_comparison():
    assert comparability([work("A", served()), work("A", served())]).state == ALONE


def test_differences_found_elsewhere_come_first():
    other_model = Reason("model", "Other models.", "Compare the same one.")
    gate = comparability([work("A", served()), work("B", served(n_tok=4))], [other_model])
    assert codes(gate)[:2] == ["model", "output-tokens"]


# ---- matched work


# ---- the prompts' own prefix tree


def test_a_prefix_tree_counts_whole_blocks_that_stood_before_and_never_a_whole_prompt():
    a, b = list(range(64)), list(range(40)) + [99] * 24
    assert hits([a, b, a, a[:32], [7] * 64], block_tok=16) == [0, 32, 48, 16, 0]


def plan_of(prompts: list[list[int]]) -> Plan:
    requests = tuple(Request(k, array("I", ids), None, len(ids), 4) for k, ids in enumerate(prompts))
    due_ns = array("q", [0] * len(prompts))
    return Plan(requests, due_ns, 0, fingerprint(requests, due_ns))


def test_equal_prompts_are_expected_to_hit_unless_they_are_salted():
    plan = plan_of([list(range(65))] * 2)
    assert expected_hit_fraction(plan.requests, None) == pytest.approx(64 / 130)
    assert expected_hit_fraction(plan.requests, "5eed") == 0.0


def test_texts_share_words():
    text = " ".join(f"w{k}" for k in range(33))
    plan = Plan(tuple(Request(k, None, text, 33, 4) for k in range(2)), array("q", [0, 0]), 0, "")
    assert expected_hit_fraction(plan.requests, "5eed") == pytest.approx(32 / 66)


def test_sessions_are_compared_by_when_they_begin():
    """When a later turn is due, the replies before it decide."""
    opens = np.array([True, False] * 50)
    late = [
        replace(row, due_ns=row.due_ns + 50_000_000 * (k % 2), sent_ns=row.due_ns + 50_000_000)
        for k, row in enumerate(served())
    ]
    assert codes(comparability([work("a", served(), opens=opens), work("b", late, opens=opens)])) == []
    assert codes(comparability([work("a", served()), work("b", late)])) == ["workload"]


# ---- settings


def test_a_setting_that_differs_is_named():
    runs = [{"engine": "vllm", "max-num-seqs": n, "block-size": "16"} for n in ("8", "64")]
    assert differing(runs) == {"max-num-seqs": ["8", "64"]}
    assert differing(runs, most_in_flight=8) == {}, "neither limit was reached"
    assert differing([runs[0], {**runs[0], "block-size": "32"}]) == {"block-size": ["16", "32"]}


AWQ = {"quantization_config": {"quant_method": "awq"}}


@pytest.mark.parametrize(
    ("server", "argv", "config", "told"),
    [
        (None, None, {}, None),
        (None, ["vllm", "serve", "m"], {}, "none"),
        (None, ["vllm", "serve", "m", "-q", "awq"], {}, "awq"),
        (None, ["text-generation-launcher", "--quantize", "gptq"], {}, "gptq"),
        (None, ["vllm", "serve", "m", "--quantization=fp8"], {}, "fp8"),
        ("Q4_K - Medium", ["llama-server", "-m", "q4.gguf"], {}, "q4_k - medium"),
        ("BF16", ["llama-server", "-m", "bf16.gguf"], {}, "none"),
        ("all F32", None, {}, "none"),
        ("awq_marlin", ["vllm", "serve", "m"], AWQ, "awq"),
        (None, ["sglang", "serve", "--model-path", "m"], AWQ, "awq"),
    ],
)
def test_quantisation_is_the_servers_word_else_that_of_its_command_line_or_model(server, argv, config, told):
    assert quantization_of(Identity("e", quantization=server), argv, config) == told


def test_a_file_of_four_bits_is_not_compared_with_bfloat16():
    file = Identity("llamacpp", quantization="Q4_K - Medium")
    settings = {"quantization": quantization_of(file, ["llama-server", "-m", "q4.gguf"])}
    gate = comparability([work("A", served()), work("B", served(), settings=settings)])
    assert codes(gate) == ["precision"]
    assert "q4_k - medium at B" in gate.reasons[0].text


def test_one_dtype_has_one_name_and_greedy_is_told_from_sampling():
    warm = Sampling(temperature=0.7, top_p=0.9)
    plan = Plan((Request(0, None, "x", 1, 1, sampling=warm),), array("q", [0]), 0, "")
    settings = settings_of(Identity("e", dtype="torch.bfloat16", kv_cache_dtype="fp16"), None, plan.requests)
    assert (settings["dtype"], settings["kv_cache_dtype"]) == ("bfloat16", "float16")
    assert settings["sampling"] == "temperature 0.7, top_p 0.9"
    assert settings["max_num_seqs"] is None


# ---- shedding


@given(
    st.lists(st.floats(0.001, 100), min_size=20, max_size=120),
    st.sets(st.integers(0, 119)),
    st.sampled_from([0.5, 0.9, 0.95]),
)
def test_shedding_load_never_improves_a_percentile(latencies_s, shed, p):
    kept = np.array(latencies_s)
    lossy = kept.copy()
    lossy[[k for k in shed if k < len(kept)]] = np.inf
    before, after = percentile(kept, p, "s"), percentile(lossy, p, "s")
    if isinstance(before, Estimate) and isinstance(after, Estimate):
        assert after.point >= before.point
        if before.high is None:
            assert after.high is None
        else:
            assert after.high is None or after.high >= before.high
    assert isinstance(after, Absent) or isinstance(before, Estimate)
