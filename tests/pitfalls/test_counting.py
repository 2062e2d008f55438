"""Pitfalls 1, 2, 3, 5 and 15: what opens TTFT, and how tokens are counted."""

import pytest

from tests.pitfalls.chain import play
from tests.truth.script import Script

MS = 1_000_000


def test_01_a_role_chunk_does_not_open_ttft() -> None:
    played = play(Script(role_s=0.0, ttft_s=0.2, gaps_s=(0.005,)), engine="chat")
    (record,) = played.records
    assert record.outcome == "ok"
    assert record.token_ns[0] - record.due_ns >= 200 * MS
    # The server's own log says when: the stamp is of that event, and of none before or after.
    sent_ns = played.sent_ns(0)
    assert sent_ns[0] <= record.token_ns[0]
    assert len(record.token_ns) == len(sent_ns) == 8


@pytest.mark.bench
def test_01_02_and_03_strictly_scripted_times_are_reported_to_2_ms() -> None:
    """Role at 0 and token at 200 ms; reasoning at 100, answer at 900; four tokens every 80 ms."""
    scripts = [
        Script(role_s=0.0, ttft_s=0.2, gaps_s=(0.005,)),
        Script(ttft_s=0.1, n_reasoning_tok=4, gaps_s=(0.0, 0.0, 0.0, 0.8, 0.01)),
    ]
    role, reasoning = play(scripts, 2, engine="chat", process=True).records
    assert role.token_ns[0] - role.due_ns == pytest.approx(200 * MS, abs=2 * MS)
    assert reasoning.token_ns[0] - reasoning.due_ns == pytest.approx(100 * MS, abs=2 * MS)
    assert (reasoning.answer_ns or 0) - reasoning.due_ns == pytest.approx(900 * MS, abs=2 * MS)
    script = Script(ttft_s=0.02, gaps_s=(0.08,), tok_per_event=(4,))
    metrics = play(script, 12, n_output_tok=16, process=True).summary()["metrics"]
    points_s = [metrics[name]["p50"]["point"] for name in ("tpot", "itl", "icl")]
    assert points_s == pytest.approx([0.02, 0.02, 0.08], abs=5e-4)


def test_02_reasoning_opens_ttft_and_the_answer_opens_ttfa() -> None:
    script = Script(ttft_s=0.1, n_reasoning_tok=4, gaps_s=(0.01, 0.01, 0.01, 0.2, 0.01))
    (record,) = play(script, engine="chat").records
    assert 100 * MS <= record.token_ns[0] - record.due_ns < 300 * MS
    assert record.answer_ns is not None
    assert record.answer_ns == record.token_ns[4]
    assert record.answer_ns - record.token_ns[0] >= 200 * MS


@pytest.mark.parametrize("engine", ["truth", "plain"])
def test_03_four_tokens_a_chunk_every_80_ms_are_20_ms_a_token(engine: str) -> None:
    """By token ids, and where the server only says how many tokens there were in all."""
    played = play(Script(ttft_s=0.02, gaps_s=(0.08,), tok_per_event=(4,)), 12, n_output_tok=16, engine=engine)
    summary = played.summary()
    assert {(record.output_tok, len(record.token_n)) for record in played.records} == {(16, 4)}
    assert [list(record.token_n) for record in played.records] == [[4] * 4] * 12
    # Gaps are at least as long as scripted, whatever else the machine does.
    gap_s = summary["metrics"]["icl"]["p50"]["point"]
    assert gap_s == pytest.approx(0.08, rel=0.1)
    assert summary["metrics"]["itl"]["p50"]["point"] == pytest.approx(gap_s / 4, rel=0.01)
    assert summary["metrics"]["tpot"]["p50"]["point"] == pytest.approx(gap_s / 4, rel=0.05)


def test_03_five_tokens_in_the_first_chunk_are_not_gaps() -> None:
    played = play(Script(ttft_s=0.0, gaps_s=(0.04,), tok_per_event=(5, 1)), 12, n_output_tok=9)
    assert {tuple(record.token_n) for record in played.records} == {(5, 1, 1, 1, 1)}
    assert played.summary()["metrics"]["tpot"]["p50"]["point"] == pytest.approx(0.04, rel=0.1)


def test_03_a_gap_counts_as_often_as_tokens_came_at_its_end() -> None:
    """Four tokens after 40 ms each, then twelve after 60 ms: 5 ms is what the median token took."""
    script = Script(ttft_s=0.0, gaps_s=(0.04, 0.04, 0.04, 0.04, 0.06), tok_per_event=(1, 1, 1, 1, 1, 12))
    metrics = play(script, 12, n_output_tok=17).summary()["metrics"]
    assert metrics["itl"]["p50"]["point"] == pytest.approx(0.005, rel=0.2)
    assert metrics["icl"]["p50"]["point"] == pytest.approx(0.04, rel=0.2)
    assert metrics["itl_delivery"]["p50"]["point"] == 0


def test_05_six_ways_to_give_usage_are_one_number_of_tokens() -> None:
    ways = ("final", "last", "cumulative", "lagging", "null", "off")
    scripts = [Script(ttft_s=0.0, gaps_s=(0.001,), usage=way, tok_per_event=(3, 2)) for way in ways]
    for record in play(scripts, len(ways)).records:
        assert (record.output_tok, record.output_source) == (8, "ids")
        assert list(record.token_n) == [3, 2, 2, 1]
    said = [
        (record.outcome, record.output_tok, record.output_source)
        for record in play(scripts, len(ways), engine="plain").records
    ]
    assert said == [("ok", 8, "usage")] * 4 + [("ok", None, None)] * 2


def test_05_without_any_count_no_figure_is_made_of_chunks() -> None:
    summary = play(Script(ttft_s=0.0, gaps_s=(0.001,), usage="off"), 12, engine="plain").summary()
    assert summary["metrics"]["ttft"]["p50"]["point"] > 0
    assert summary["metrics"]["tpot"]["p50"]["point"] is None
    assert summary["metrics"]["itl"]["p50"]["point"] is None
    assert summary["throughput"]["output_tok_per_s"]["point"] is None


def test_15_the_server_counts_the_prompt_length_that_was_asked_for() -> None:
    played = play(Script(ttft_s=0.0, gaps_s=(0.0,)), 50, salt="5a17")
    assert {row.n_prompt_tok for row in played.served} == {24}
    assert played.summary()["lengths"]["prompt_mismatches"]["point"] == 0
