"""Sessions: no turn before its predecessors end, live replies in the next prompt, failures kept apart."""

import json
from array import array

import pytest

from burstline.loadgen.driver import drive
from burstline.loadgen.driver.conversations import Conversations
from burstline.measure.record.record import in_words
from burstline.servers.messages import ReplyContent
from burstline.workloads.lengths import Lengths
from burstline.workloads.request import Request, Turn
from burstline.workloads.works import SessionShape, drawn_sessions
from tests.pitfalls.chain import VOCABULARY, fired
from tests.truth.rig import truth_server
from tests.truth.script import Script


def shape(turns: int = 3, **more) -> SessionShape:
    return SessionShape(
        Lengths(turns, turns), Lengths(30, 50), Lengths(5, 9), Lengths(3, 6), Lengths(10, 30), **more
    )


def ids(text: str) -> array:
    return array("I", map(int, text.split()))


def turn(index: int, new: str, *after: int, pause_ns: int = 0) -> Request:
    return Request(index, ids(new), None, 0, 2, turn=Turn(0, index, after, pause_ns))


REPLY = ReplyContent("x", (7, 8))


def test_a_turn_is_due_after_its_pause_and_begins_with_all_that_was_said():
    sessions = Conversations([turn(0, "1 2"), turn(1, "3", 0, pause_ns=50)], [0, 0], None)
    (first,) = sessions.opening()
    assert first == (turn(0, "1 2"), 0)
    ((second, due_ns),), skipped = sessions.ended(0, 1000, REPLY)
    assert (list(second.prompt_ids), due_ns, skipped) == ([1, 2, 7, 8, 3], 1050, [])
    assert [sessions.is_followed(index) for index in (0, 1)] == [True, False]


def test_what_follows_a_failed_turn_is_never_sent_and_its_slot_is_free_again():
    requests = [turn(0, "1"), turn(1, "2", 0), turn(2, "3", 1)]
    other = Request(3, ids("9"), None, 1, 1, turn=Turn(1, 0))
    sessions = Conversations([*requests, other], [0] * 4, concurrency=1)
    assert [request.index for request, _ in sessions.opening()] == [0]
    due, skipped = sessions.ended(0, 40, None)
    assert [request.index for request, _ in skipped] == [1, 2]
    assert due == [(other, 40)]


def test_a_long_session_whose_first_turn_fails_ends_whole():
    n = 3000
    requests = [turn(0, "1"), *(turn(k, "2", k - 1) for k in range(1, n))]
    sessions = Conversations(requests, [0] * n, None)
    assert [request.index for request, _ in sessions.opening()] == [0]
    due, skipped = sessions.ended(0, 40, None)
    assert due == []
    assert [request.index for request, _ in skipped] == list(range(1, n))


def test_a_chat_goes_on_with_the_assistants_own_words():
    def chat(index: int, text: str, *after: int) -> Request:
        messages = json.dumps([{"role": "user", "content": text}])
        return Request(index, None, None, 0, 2, messages=messages, turn=Turn(0, index, after))

    sessions = Conversations([chat(0, "a"), chat(1, "b", 0)], [0, 0], None)
    list(sessions.opening())
    ((second, _),), _ = sessions.ended(0, 1, ReplyContent("hello"))
    said = [(message["role"], message["content"]) for message in json.loads(second.messages)]
    assert said == [("user", "a"), ("assistant", "hello"), ("user", "b")]


def test_at_a_real_server_every_turn_follows_its_predecessors_by_its_pause():
    requests, _, _ = drawn_sessions(shape(4), 5, VOCABULARY, 0)
    with truth_server(Script(ttft_s=0.01, gaps_s=(0.002,)), thread=True) as truth:
        played = fired(truth, requests, due_s=[0.0] * len(requests))
    records = {record.index: record for record in played.records}
    assert {record.outcome for record in records.values()} == {"ok"}
    for request in requests:
        record = records[request.index]
        assert record.prompt_tok == request.n_prompt_tok
        for index in request.turn.after:
            assert record.sent_ns >= records[index].closed_ns + request.turn.pause_ns
        if request.turn.after:
            last_ns = max(records[index].closed_ns for index in request.turn.after)
            assert record.due_ns == last_ns + request.turn.pause_ns


def test_turns_after_a_refused_one_have_an_outcome_of_their_own():
    requests, _, _ = drawn_sessions(shape(3), 1, VOCABULARY, 0)
    with truth_server([Script(), Script(status=500)], thread=True) as truth:
        played = fired(truth, requests, due_s=[0.0] * 3)
    assert [record.outcome for record in played.records] == ["ok", "http_500", "predecessor"]


@pytest.mark.parametrize(
    ("content", "outcome"), [(ReplyContent("a reply as text"), "no_ids"), (None, "predecessor")]
)
def test_turns_after_a_reply_that_cannot_be_continued_say_so(monkeypatch, content, outcome):
    """A completions server that returns no token ids: the first turn is good, the outcome has the cause."""
    monkeypatch.setattr(drive, "reply_content", lambda reply: content)
    requests, _, _ = drawn_sessions(shape(3), 1, VOCABULARY, 0)
    with truth_server(Script(), thread=True) as truth:
        played = fired(truth, requests, due_s=[0.0] * 3)
    assert [record.outcome for record in played.records] == ["ok", outcome, outcome]
    assert "try --endpoint chat" in in_words({"no_ids": 2})


@pytest.mark.slow
def test_later_turns_do_not_wait_until_every_session_has_begun(monkeypatch):
    monkeypatch.setattr(drive, "_LOOK_AHEAD", 10)
    requests, of, _ = drawn_sessions(shape(2), 60, VOCABULARY, 0)
    with truth_server(Script(ttft_s=0.01, gaps_s=(0.001,)), thread=True) as truth:
        played = fired(truth, requests, due_s=[k / 30 for k in of])
    records = {record.index: record for record in played.records}
    late_ns = [records[r.index].sent_ns - records[r.index].due_ns for r in requests if r.turn.after]
    assert max(late_ns) < 0.5e9, "if they waited for the last session's first turn, it would be 2 s"
