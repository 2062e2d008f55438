from dataclasses import replace
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstline.loadgen.capture.capture import NO_STAMP, Capture, Reads
from burstline.measure.record.record import record_of, record_without_capture
from burstline.servers.messages import Event, Kind, Read, Reply
from burstline.servers.registry import ENGINES
from tests.measure.making import DONE, HEAD, MS, capture, chat, chunk, event, recorded, request, usage, wire
from tests.servers.golden import decode_completion

THREE = [(10, event()), (20, event()), (30, event(finish="length"))]

OUTCOMES = {
    "three tokens as asked": (request(3), [*THREE, (30, usage(3)), (30, DONE)], None, "ok"),
    "a stop though eos was to be ignored": (
        request(9),
        [(10, event()), (20, event(finish="stop")), (20, usage(2)), (20, DONE)],
        None,
        "short",
    ),
    "a stop that was allowed": (
        request(9, ignore_eos=False),
        [(10, event()), (20, event(finish="stop")), (20, usage(2)), (20, DONE)],
        None,
        "ok",
    ),
    "TGI's word for a stop": (request(9), [(10, event(2, finish="eos_token"))], None, "short"),
    "a stop at the very length asked": (request(2), [(10, event(2, finish="stop"))], None, "ok"),
    "length, but fewer than asked": (request(9), [*THREE, (30, usage(3)), (30, DONE)], None, "clamped"),
    "length, but fewer, though free to stop": (
        request(9, ignore_eos=False),
        [*THREE, (30, usage(3)), (30, DONE)],
        None,
        "clamped",
    ),
    "a prompt that was cut": (
        request(3),
        [*THREE, (30, usage(3, n_prompt_tok=3)), (30, DONE)],
        None,
        "clamped",
    ),
    "a prompt with a token added": (
        request(3),
        [*THREE, (30, usage(3, n_prompt_tok=5)), (30, DONE)],
        None,
        "ok",
    ),
    "more tokens than asked": (request(2), [*THREE, (30, usage(3)), (30, DONE)], None, "long"),
    "nothing but the end": (request(3), [(10, DONE)], None, "empty"),
    "usage and no token": (request(3), [(10, usage(0)), (10, DONE)], None, "empty"),
    "no end of the stream": (request(3), [(10, event()), (20, event())], None, "truncated"),
    "a body of nothing": (request(3), [], None, "empty"),
    "the server gave up": (
        request(3),
        [(10, event()), (20, event(finish="abort")), (20, DONE)],
        None,
        "aborted",
    ),
    "an error after 200": (
        request(3),
        [(10, event()), (20, b'data: {"error": {"message": "out of memory"}}\n\n'), (20, DONE)],
        None,
        "error_event",
    ),
    "reset before the end": (request(3), [(10, event())], "reset", "reset"),
    "reset after heartbeats alone": (request(3), [(10, b"data: {}\n\n")], "reset", "reset"),
    "nothing but heartbeats": (request(3), [(10, b"data: {}\n\n")], None, "error_event"),
    "reset after the end": (request(3), [*THREE, (30, usage(3)), (30, DONE)], "reset", "ok"),
    "out of time amid the stream": (request(3), [(10, event())], "timeout", "timeout"),
    "cancelled amid the stream": (request(3), [(10, event())], "cancelled", "cancelled"),
}


@pytest.mark.parametrize(("asked", "events", "failure", "outcome"), OUTCOMES.values(), ids=OUTCOMES)
def test_every_way_to_end_has_its_outcome(asked, events, failure, outcome):
    assert recorded(asked, *events, failure=failure).outcome == outcome


@pytest.mark.parametrize(
    ("failure", "closed_ms", "is_cut"),
    [
        ("timeout", 30.1, False),
        ("timeout", 42, False),
        ("timeout", 43, True),
        ("cancelled", 30.1, False),
        ("cancelled", 43, True),
        ("reset", 30.1, True),
        ("truncated", 30.1, True),
        (None, 30.1, False),
        ("hung_up", 43, False),
    ],
)
def test_an_end_that_the_client_did_not_await_is_not_missing(failure, closed_ms, is_cut):
    """A deadline 0.07 ms after the last token was put down to a proxy. The tokens are up to 12 ms apart."""
    reads = wire((10, event()), (18, event()), (30, event(finish="length")), end=b"")
    ended = replace(capture(reads, failure, "why it ended"), closed_ns=round(closed_ms * MS))
    record = record_of(request(3), ended, decode_completion)
    assert record.outcome == "ok"
    assert (record.error is not None) == is_cut


@pytest.mark.parametrize("failure", ["connect", "reset", "truncated", "timeout", "cancelled", "not_sent"])
def test_a_request_without_a_reply_is_called_what_its_wire_says(failure):
    record = record_of(request(), capture((), failure, "so it was"), decode_completion)
    assert (record.outcome, record.error, record.output_tok) == (failure, "so it was", None)


@pytest.mark.parametrize("status", [400, 429, 503])
def test_a_refusal_is_named_by_its_status_and_keeps_the_servers_words(status):
    head = f"HTTP/1.1 {status} No\r\ncontent-length: 22\r\n\r\n".encode()
    reads = (Read(5 * MS, None, head + b'{"error": "go away!!"}'),)
    record = record_of(request(), capture(reads), decode_completion)
    assert (record.outcome, record.http_status, record.error) == (f"http_{status}", status, "go away!!")


def test_bytes_that_are_no_http_are_an_error_and_not_an_exception():
    record = record_of(request(), capture((Read(1, None, b"SSH-2.0-OpenSSH\r\n"),)), decode_completion)
    assert record.outcome == "error_event"
    assert "SSH-2.0" in (record.error or "")


def test_a_prompt_sent_as_text_may_be_tokenized_to_fewer_tokens():
    asked = replace(request(3), prompt_ids=None, prompt_text="four of them")
    assert recorded(asked, *THREE, (30, usage(3, n_prompt_tok=3)), (30, DONE)).outcome == "ok"


def test_token_ids_are_trusted_before_usage_and_what_usage_says_more_is_kept():
    record = recorded(request(3), (10, event(1)), (20, event(2, finish="length")), (20, usage(5)), (20, DONE))
    assert (record.output_tok, record.output_source, record.output_gap_tok) == (3, "ids", 2)
    assert (record.split, record.token_n) == ("counted", [1, 2])


def test_as_many_events_as_tokens_are_one_each():
    record = recorded(request(3), *THREE, (30, usage(3)), (30, DONE))
    assert (record.split, record.token_n, record.output_source) == ("one-each", [1, 1, 1], "usage")


def test_fewer_events_than_tokens_are_spread_and_say_so():
    record = recorded(request(8), *THREE, (30, usage(8)), (30, DONE))
    assert (record.split, sum(record.token_n), len(record.token_n)) == ("spread", 8, 3)


def test_more_events_than_tokens_leave_a_token_with_the_first():
    record = recorded(request(2), *THREE, (30, usage(2)), (30, DONE))
    assert (record.split, record.token_ns[0], sum(record.token_n)) == ("spread", 10 * MS, 2)


def test_without_any_count_chunks_are_not_taken_for_tokens():
    record = recorded(request(3), *THREE, (30, DONE))
    assert (record.output_tok, record.output_source, record.split) == (None, None, "unknown")
    assert record.token_ns == [10 * MS, 20 * MS, 30 * MS]


def test_text_that_was_tokenized_again_is_trusted_after_whatever_the_server_said():
    again = [("tokenize", 7), ("tokenizer", 6)]
    said = record_of(request(3), capture(wire(*THREE, (30, usage(3)), (30, DONE))), decode_completion, again)
    assert (said.output_tok, said.output_source, said.output_gap_tok) == (3, "usage", 4)
    free = [(10, event()), (20, event()), (30, event(finish="stop"))]
    silent = record_of(request(9), capture(wire(*free, (30, DONE))), decode_completion, again)
    assert (silent.output_tok, silent.output_source, silent.output_gap_tok) == (7, "tokenize", -1)
    assert (silent.split, sum(silent.token_n)) == ("spread", 7)


def test_a_token_more_or_less_in_text_that_was_tokenized_again_is_no_failure():
    for n in (2, 3, 4):
        reads = wire(*THREE, (30, DONE))
        record = record_of(request(3), capture(reads), decode_completion, [("tokenizer", n)])
        assert (record.outcome, record.output_tok, record.output_source) == ("ok", 3, "tokenizer")


def test_an_empty_first_chunk_with_no_ids_does_not_open_the_stream():
    record = recorded(request(1), (10, event(0, text="")), (200, event(1, text="", finish="length")))
    assert record.token_ns == [200 * MS]


def test_an_empty_event_before_the_first_text_opens_nothing():
    """A generic endpoint sends one at 5 ms, uncounted; its first token comes at 200 ms."""
    end = event(finish="length")
    for empty in (event(text=""), chat(content=""), chat()):
        record = recorded(request(2), (5, empty), (200, event()), (210, end), (210, usage(2)), (210, DONE))
        assert (record.token_ns, record.split) == ([200 * MS, 210 * MS], "one-each")


def test_tokens_beyond_the_events_with_text_are_spread_and_say_so():
    end = event(finish="length")
    record = recorded(request(5), (5, event(text="")), (200, event()), (210, end), (210, usage(5)))
    assert (record.token_ns, record.token_n, record.split) == ([200 * MS, 210 * MS], [3, 2], "spread")


def test_a_character_that_takes_three_tokens_is_three_tokens():
    """Its first two bring no text yet; the server's total says that each event is one token."""
    events = [(100, event()), (110, event(text="")), (120, event(text="")), (130, event(finish="length"))]
    record = recorded(request(4), *events, (130, usage(4)), (130, DONE))
    assert record.token_ns == [100 * MS, 110 * MS, 120 * MS, 130 * MS]
    assert record.split == "one-each"


def test_a_server_that_says_it_generated_nothing_is_quoted():
    record = recorded(request(1), (10, event(0, text="")), (10, usage(0)), (10, DONE))
    assert (record.outcome, record.output_tok, record.output_source, record.split) == (
        "empty",
        0,
        "ids",
        None,
    )
    assert recorded(request(1), (10, DONE)).output_tok is None


def test_the_role_opens_nothing_and_reasoning_is_a_token_but_no_answer():
    events = [
        (0, chat(role="assistant")),
        (100, chat(reasoning_content="hm")),
        (900, chat(content="yes")),
        (900, usage(2)),
        (900, DONE),
    ]
    record = recorded(request(2), *events)
    assert (record.token_ns, record.answer_ns) == ([100 * MS, 900 * MS], 900 * MS)
    assert record.first_event_ns == 0, "what instrumentation calls the first token"


@pytest.mark.parametrize(
    ("before", "first_ms"),
    [
        ((), 100),
        ((b": beat\n\n",), 100),
        ((b"event: ping\r\ndata: {}\r\n\r\n",), 50),
        ((chat(role="assistant"),), 50),
    ],
)
def test_the_first_event_of_any_kind_is_no_comment(before, first_ms):
    events = [*((50, each) for each in before), (100, chat(content="yes")), (900, usage(1)), (900, DONE)]
    record = recorded(request(1), *events)
    assert (record.first_event_ns, record.token_ns) == (first_ms * MS, [100 * MS])


def test_an_event_has_the_kernels_stamp_and_how_much_later_we_had_it():
    reads = wire((10, event(1)), (20, event(2, finish="length")), (20, DONE))
    stamped = (replace(reads[0], kernel_ns=9 * MS), *reads[1:])
    record = record_of(request(3), capture(stamped), decode_completion)
    assert (record.token_ns, record.read_lag_ns) == ([9 * MS, 20 * MS], [1 * MS, -1])


def test_an_event_that_is_not_the_last_of_its_read_may_have_come_earlier():
    """Also where only usage or [DONE] follows; alone, it has the kernel's own time."""
    last = event(1, finish="length")
    together = (
        Read(10 * MS, 9 * MS, HEAD + chunk(event(1))),
        Read(30 * MS, 29 * MS, chunk(event(1)) + chunk(event(1))),
        Read(50 * MS, 49 * MS, chunk(last) + chunk(DONE) + b"0\r\n\r\n"),
    )
    reads = replace(Reads.of(together), since_ns=np.array([4, 6, 7]) * MS)
    record = record_of(request(4), capture(reads), decode_completion)
    assert record.read_error_ns == [0, 5 * MS, 0, 6 * MS]
    unstamped = replace(reads, kernel_ns=np.full(3, NO_STAMP))
    again = record_of(request(4), capture(unstamped), decode_completion)
    assert again.read_error_ns == [4 * MS, 6 * MS, 6 * MS, 7 * MS]


def test_times_ascend_even_where_two_clocks_cross():
    reads = wire((10, event(1)), (20, event(2, finish="length")), (20, DONE))
    crossed = (reads[0], replace(reads[1], kernel_ns=10 * MS - 5), *reads[2:])
    assert record_of(request(3), capture(crossed), decode_completion).token_ns == [10 * MS, 10 * MS]


def test_only_events_with_tokens_of_an_engine_that_counts_events_itself_are_kept():
    reply = Reply(
        [
            Event(1, Kind.ROLE, None),
            Event(2, Kind.ANSWER, 1),
            Event(3, Kind.ANSWER, 2),
            Event(4, Kind.FINISH, None),
        ],
        finish_reason="length",
        terminated=True,
    )
    reads = (Read(5, None, HEAD + chunk(b"abcd") + b"0\r\n\r\n"),)
    record = record_of(request(3), capture(reads), lambda _: reply)
    assert (record.outcome, record.output_tok, record.output_source, record.n_events) == (
        "ok",
        3,
        "events",
        4,
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_split_of_the_stream_changes_what_is_counted(data):
    whole = b"".join(read.data for read in wire(*THREE, (30, usage(3)), (30, DONE)))
    cuts = sorted(data.draw(st.lists(st.integers(1, len(whole) - 1), max_size=8, unique=True)))
    edges = [0, *cuts, len(whole)]
    reads = tuple(Read(k * MS, None, whole[a:b]) for k, (a, b) in enumerate(pairwise(edges), 1))
    record = record_of(request(3), capture(reads), decode_completion)
    assert (record.outcome, record.token_n, record.output_tok) == ("ok", [1, 1, 1], 3)
    body_edges = [whole.index(piece) + len(piece) for piece in (event(finish="length"),)]
    completes = next(k for k, edge in enumerate(edges[1:], 1) if edge >= body_edges[0])
    assert record.token_ns[-1] == completes * MS


def test_a_request_without_a_capture_was_cancelled():
    record = record_without_capture(request(), sent=True)
    assert (record.outcome, record.sent_ns, record.token_ns) == ("cancelled", None, ())


def test_a_reply_whose_head_never_came_whole_is_truncated():
    cut = Capture(0, 0, 0, 0, 1, 2, (Read(1, None, b"HTTP/1.1 200 O"),), None)
    assert record_of(request(), cut, decode_completion).outcome == "truncated"


def _llamacpp(text: str, total: int, last: bool = False) -> dict[str, object]:
    return {"content": text, "stop": last, "tokens_predicted": total, "tokens_evaluated": 4}


def _lightllm(text: str, total: int, last: bool = False) -> dict[str, object]:
    token = {"text": text, "count_output_tokens": total, "prompt_tokens": 4}
    return {"token": token, "finished": last, "finish_reason": "length" if last else None}


def _sglang(text: str, total: int, last: bool = False) -> dict[str, object]:
    finish = {"type": "length"} if last else None
    return {
        "text": text,
        "meta_info": {"completion_tokens": total, "prompt_tokens": 4, "finish_reason": finish},
    }


def _tgi(text: str, total: int, last: bool = False) -> dict[str, object]:
    """Each event with a token is one token, whatever its text."""
    token = {"id": 1, "text": text, "logprob": 0.0, "special": False} if total else None
    details = {"finish_reason": "length", "generated_tokens": total, "input_length": 4, "seed": None}
    return {"index": total, "token": token, "generated_text": None, "details": details if last else None}


@pytest.mark.parametrize(
    ("engine", "says"),
    [("llamacpp", _llamacpp), ("lightllm", _lightllm), ("sglang", _sglang), ("tgi", _tgi)],
)
def test_an_event_without_text_and_without_a_counted_token_opens_nothing_in_any_dialect(engine, says):
    answers = ((5, says("", 0)), (200, says("a", 1)), (220, says("b", 2, True)))
    events = [(at_ms, b"data: " + orjson.dumps(answer) + b"\n\n") for at_ms, answer in answers]
    record = record_of(request(2), capture(wire(*events)), ENGINES[engine].decode)
    assert (record.outcome, record.token_ns, record.output_tok) == ("ok", [200 * MS, 220 * MS], 2)
