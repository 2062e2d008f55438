"""Figures of sessions: the makespan of each, and the latencies of its turns by their place."""

from dataclasses import replace

import pyarrow as pa
import pytest

from burstline.measure.metrics.sessions import Turns, session_figures
from burstline.measure.metrics.steady_state import cold_start
from burstline.measure.record.columns import columns_of
from burstline.measure.record.record import NO_TEXT
from burstline.measure.record.tables import record_table
from tests.measure.making import failed, ok

PAUSE_S = 0.5


def turns_of(sessions: list[list[tuple[int, ...]]]) -> Turns:
    """Each session as a list of what its turns follow, by index in the plan."""
    rows = [(s, after) for s, session in enumerate(sessions) for after in session]
    table = pa.table(
        {
            "session": [10 * s for s, _ in rows],
            "after": [list(after) for _, after in rows],
            "pause_ns": [round(PAUSE_S * 1e9) if after else 0 for _, after in rows],
        }
    )
    return Turns.of_plan(table)


def at(index: int, due_s: float, ttft_s: float, *, n_prompt_tok: int = 20, cached: int | None = None):
    """A reply that is sent when it is due, with two tokens a tenth of a second apart."""
    record, by_ns = ok(index, due_s + ttft_s, [0.1]), round(due_s * 1e9)
    return replace(record, due_ns=by_ns, sent_ns=by_ns, prompt_tok=n_prompt_tok, cached_tok=cached)


def lines(n: int, ttft_s=lambda turn: 0.2 + 0.1 * turn) -> tuple[list, Turns]:
    """n sessions of three turns, each begun 5 s after the one before."""
    records, sessions = [], []
    for session in range(n):
        due_s, rows = 5.0 * session, []
        for turn in range(3):
            index = len(records)
            records.append(at(index, due_s, ttft_s(turn), n_prompt_tok=20 * (turn + 1), cached=16 * turn))
            due_s = records[-1].closed_ns / 1e9 + PAUSE_S
            rows.append((index - 1,) if turn else ())
        sessions.append(rows)
    return records, turns_of(sessions)


def test_a_session_lasts_from_its_first_due_time_to_its_last_token():
    records, turns = lines(20)
    figures = session_figures(columns_of(record_table(records)), turns)
    assert figures.sessions.point == 20
    assert figures.completed.point == 1
    assert figures.makespan_p50_s.point == pytest.approx(0.2 + 0.3 + 0.4 + 3 * 0.1 + 2 * PAUSE_S)
    assert figures.early_turns.point == 0
    assert figures.pause_late_p99_s.point == pytest.approx(0, abs=1e-9)


def test_each_turn_has_its_own_latency_and_cached_share():
    records, turns = lines(20)
    figures = session_figures(columns_of(record_table(records)), turns)
    assert [(turn.turn, turn.requests, turn.ok) for turn in figures.by_turn] == [
        (k, 20, 20) for k in (1, 2, 3)
    ]
    assert [turn.ttft.p50.point for turn in figures.by_turn] == pytest.approx([0.2, 0.3, 0.4])
    assert [turn.cached_fraction.point for turn in figures.by_turn] == pytest.approx([0, 16 / 40, 32 / 60])
    assert [turn.earlier_fraction.point for turn in figures.by_turn] == pytest.approx([0, 22 / 40, 42 / 60])


def test_a_reply_without_text_brings_the_next_prompt_nothing():
    """A chat sends the text back, and there is none."""
    records, turns = lines(20)
    silent = [replace(each, split=NO_TEXT) if each.index % 3 == 0 else each for each in records]
    figures = session_figures(columns_of(record_table(silent)), turns)
    assert figures.by_turn[1].earlier_fraction.point == pytest.approx(20 / 40)


def test_a_turns_place_is_how_many_come_before_it():
    turns = turns_of([[(), (0,), (1,)], [()]])
    assert turns.depth.tolist() == [0, 1, 2, 0]
    assert turns.opens.tolist() == [True, False, False, True]


def test_a_session_with_a_failed_turn_never_ends_and_one_that_was_cut_off_does_not_count():
    records, turns = lines(20)
    records[4] = replace(failed(4), due_ns=records[4].due_ns)
    records[5] = replace(failed(5, "predecessor"), due_ns=records[5].due_ns)
    records[-1] = replace(failed(59, "cancelled"), due_ns=records[-1].due_ns)
    figures = session_figures(columns_of(record_table(records)), turns)
    assert (figures.sessions.point, figures.completed.point) == (19, pytest.approx(18 / 19))
    assert "requests failed" in figures.makespan_mean_s.reason
    assert [turn.ok for turn in figures.by_turn] == [19, 18, 18]


def test_a_turn_sent_before_its_pause_was_over_is_counted():
    records, turns = lines(20)
    records[1] = replace(records[1], sent_ns=records[1].sent_ns - 1_000_000)
    assert session_figures(columns_of(record_table(records)), turns).early_turns.point == 1


def test_first_turns_that_are_slower_than_later_ones_are_no_cold_start():
    records, turns = lines(100, lambda turn: 0.1 if turn else 1.0)
    c = columns_of(record_table(records))
    assert cold_start(c, None, turns.opens) is None
    records[0:30:3] = [at(k, records[k].due_ns / 1e9, 3.0) for k in range(0, 30, 3)]
    assert cold_start(columns_of(record_table(records)), None, turns.opens).n == 10
