import re
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.servers.messages import HttpReply
from burstline.servers.replies import server_sent_events
from burstline.servers.truth.replies import STAMP, Replies, TimedReply
from burstline.servers.truth.replies import Script as ProductScript
from burstline.servers.truth.replies import Wanted as ProductWanted
from tests.servers.golden import decode_completion
from tests.truth.dialects import DIALECTS, Wanted
from tests.truth.replies import ScriptedReplies
from tests.truth.script import Script
from tests.truth.writes import CutWrite

GOLDEN = Path(__file__).parents[1] / "golden"


def wanted_of(dialect, model, stream=True, n_prompt_tok=3, n_output_tok=5, details=False):
    chat = dialect == "chat"
    return Wanted(model, n_prompt_tok, n_output_tok, details, stream, chat, dialect=dialect)


ASKED = wanted_of("completions", "m", stream=True, n_prompt_tok=3, n_output_tok=5)


def make(script: Script, wanted: Wanted = ASKED) -> TimedReply:
    return ScriptedReplies().make(script, wanted)


def wire(made: TimedReply) -> bytes:
    """The bytes of a reply, every stamp reading 7 in the first part of a write and 8 in none."""
    out = b""
    for write in made.writes:
        data = (STAMP % 7).join(write.pieces)
        out += data[slice(*write.cut)] if isinstance(write, CutWrite) else data
    return out


def body(made: TimedReply) -> bytes:
    whole = wire(made).partition(b"\r\n\r\n")[2]
    if not any(b"chunked" in piece for write in made.writes for piece in write.pieces):
        return whole
    out = b""
    while whole:
        size, _, rest = whole.partition(b"\r\n")
        out += rest[: int(size, 16)]
        whole = rest[int(size, 16) + 2 :]
    return out


def reply(made: TimedReply) -> HttpReply:
    return HttpReply(made.status, {"content-type": "text/event-stream"}, body(made))


def payloads(made: TimedReply) -> list[dict]:
    return [orjson.loads(data) for data in server_sent_events(body(made))[0] if data != b"[DONE]"]


def due_ms(made: TimedReply, kind: str = "token") -> list[float]:
    rows = zip(made.writes, made.offsets_ns, strict=True)
    return [at_ns / 1e6 for write, at_ns in rows for mark in write.marks if mark.kind == kind]


def test_the_first_event_is_due_at_ttft_and_each_next_after_its_gap():
    made = make(Script(headers_s=0.01, ttft_s=0.1, gaps_s=(0.02, 0.03)))
    assert due_ms(made, "headers") == [10]
    assert due_ms(made) == [100, 120, 150, 180, 210]
    assert due_ms(made, "usage") == due_ms(made, "done") == [210]


@given(
    tok_per_event=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    n_output=st.integers(1, 60),
    n_reasoning=st.integers(0, 70),
    dialect=st.sampled_from(list(DIALECTS)),
    role=st.booleans(),
)
def test_every_token_is_said_once_and_events_are_numbered(
    tok_per_event, n_output, n_reasoning, dialect, role
):
    script = Script(
        tok_per_event=tuple(tok_per_event), n_reasoning_tok=n_reasoning, role_s=0.1 if role else None
    )
    made = make(script, wanted_of(dialect, "m", stream=True, n_prompt_tok=3, n_output_tok=n_output))
    assert sum(mark.n_tok for write in made.writes for mark in write.marks) == n_output
    seqs = [payload["seq"] for payload in payloads(made)]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    assert {payload["sent_ns"] for payload in payloads(made)} == {7}


def test_what_replies_share_does_not_mix_them_up():
    replies = ScriptedReplies()
    for n_output, n_prompt in [(5, 3), (2, 9), (8, 1), (5, 3)]:
        wanted = wanted_of("completions", "m", True, n_prompt, n_output, details=True)
        decoded = decode_completion(reply(replies.make(Script(), wanted)))
        assert (decoded.n_prompt_tok, decoded.n_output_usage) == (n_prompt, n_output)
        assert decoded.n_output_ids == n_output
        assert decoded.finish_reason == "length"


@pytest.mark.parametrize(
    ("usage", "n_usage", "n_usage_events"),
    [
        ("final", 5, 1),
        ("last", 5, 0),
        ("cumulative", 5, 0),
        ("lagging", 5, 0),
        ("null", None, 0),
        ("off", None, 0),
    ],
)
def test_usage_stands_where_the_script_says(usage, n_usage, n_usage_events):
    made = make(Script(usage=usage, tok_per_event=(2,)))
    decoded = decode_completion(reply(made))
    assert decoded.n_output_usage == n_usage
    assert len(due_ms(made, "usage")) == n_usage_events
    counts = [payload["usage"]["completion_tokens"] for payload in payloads(made) if payload.get("usage")]
    assert counts == {"cumulative": [2, 4, 5], "lagging": [0, 2, 5]}.get(usage, [5] if n_usage else [])


def test_without_stamps_an_event_has_the_fields_of_a_recorded_one_in_their_order():
    recorded = (GOLDEN / "vllm" / "completions_stream.http").read_bytes()
    theirs = [orjson.loads(line) for line in re.findall(rb"data: (\{.*\})\n", recorded)]
    ours = payloads(make(Script(stamp=False)))
    assert list(ours[0]) == list(theirs[0])
    assert list(ours[0]["choices"][0]) == list(theirs[0]["choices"][0])
    assert list(ours[-1]["usage"])[:3] == list(theirs[-1]["usage"])


def test_the_native_dialects_say_what_their_engines_say():
    def said(dialect: str) -> list[dict]:
        return payloads(make(Script(stamp=False), wanted_of(dialect, "m", True, 3, 2, details=True)))

    tgi = said("tgi")
    assert tgi[0] == {
        "index": 1,
        "token": {"id": 0, "text": " tok", "logprob": -0.5, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert tgi[1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": None,
        "input_length": 3,
    }
    lightllm = said("lightllm")
    assert [event["token"]["count_output_tokens"] for event in lightllm] == [1, 2]
    assert [event["finished"] for event in lightllm] == [False, True]
    sglang = said("sglang")
    assert [event["output_ids"] for event in sglang] == [[0], [0, 1]]
    assert [event["text"] for event in sglang] == [" tok", " tok tok"]
    assert sglang[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


@pytest.mark.parametrize(
    ("dialect", "prefix", "done"),
    [
        ("completions", b"data: ", True),
        ("chat", b"data: ", True),
        ("tgi", b"data: ", False),
        ("lightllm", b"data:{", False),
        ("sglang", b"data: ", True),
    ],
)
def test_each_dialect_is_framed_as_its_engine_frames_it(dialect, prefix, done):
    whole = body(make(Script(), wanted_of(dialect, "m", stream=True, n_prompt_tok=3, n_output_tok=2)))
    assert whole.startswith(prefix)
    assert (b"[DONE]" in whole) == done


def test_chat_opens_with_the_role_and_splits_reasoning_from_the_answer():
    script = Script(role_s=0.0, n_reasoning_tok=3, tok_per_event=(2,))
    events = payloads(make(script, wanted_of("chat", "m", stream=True, n_prompt_tok=3, n_output_tok=5)))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": " tok tok"},
        {"reasoning_content": " tok"},
        {"content": " tok tok"},
    ]


FRAMINGS = [
    Script(crlf=True),
    Script(space=False),
    Script(chunked=False),
    Script(comments_s=(0.0, 0.1, 0.21, 9.0)),
    Script(events_per_write=3),
    Script(drip_bytes=7),
    Script(split_at=(1, 30, -1)),
    Script(crlf=True, space=False, comments_s=(0.2,), events_per_write=2, split_at=(5,), drip_bytes=100),
]


@pytest.mark.parametrize("script", FRAMINGS)
def test_no_framing_changes_what_is_said(script):
    made = make(script)
    assert payloads(made) == payloads(make(Script()))
    assert list(made.offsets_ns) == sorted(made.offsets_ns)


@given(at=st.integers(-400, 400), drip=st.integers(0, 50), held=st.integers(1, 4))
def test_however_the_bytes_are_cut_they_are_the_same_bytes(at, drip, held):
    script = Script(split_at=(at,), drip_bytes=drip, events_per_write=held, text=" é🙂")
    assert wire(make(script)) == wire(make(Script(text=" é🙂")))


def test_a_cut_event_keeps_one_stamp_and_is_marked_with_its_last_part():
    made = make(Script(split_at=(10,)))
    cut = [write for write in made.writes if isinstance(write, CutWrite)]
    firsts = [write for write in cut if write.cut[0] == 0]
    rests = [write for write in cut if write.cut[0] > 0]
    assert all(write.fresh and not write.marks for write in firsts)
    assert all(not write.fresh and write.marks for write in rests)


def test_comments_come_at_their_times_and_never_after_the_end():
    made = make(Script(comments_s=(0.05, 0.25, 9.0)))
    assert due_ms(made, "comment") == [50, 250]


def test_held_back_events_leave_together_with_the_last_of_them():
    assert due_ms(make(Script(events_per_write=2))) == [220, 220, 260, 260, 280]


@pytest.mark.parametrize(
    ("fault", "after", "n_tok"),
    [("close", 2, 2), ("reset", 0, 0), ("stall", 5, 5), ("half_close", 9, 5), ("close", -1, 0)],
)
def test_a_fault_comes_after_its_tokens_when_the_next_was_due(fault, after, n_tok):
    made = make(Script(fault=fault, fault_after_tok=after))
    assert made.end == fault
    assert sum(mark.n_tok for write in made.writes for mark in write.marks) == n_tok
    expected_ns = 0 if after < 0 else round((0.2 + 0.02 * min(n_tok, 4)) * 1e9)
    assert made.offsets_ns[-1] == expected_ns
    assert (b"HTTP/1.1 200" in wire(made)) == (after >= 0)


def test_an_error_inside_the_stream_ends_it_in_the_dialects_words():
    decoded = decode_completion(reply(make(Script(fault="error", fault_after_tok=2, message="lost"))))
    assert decoded.error == "lost"
    assert decoded.finish_reason is None
    tgi = wanted_of("tgi", "m", stream=True, n_prompt_tok=3, n_output_tok=5)
    last = payloads(make(Script(fault="error", message="lost", stamp=False), tgi))[-1]
    assert last == {"error": "lost", "error_type": "generation"}


def test_a_status_refuses_with_its_message():
    made = make(Script(status=429, message="no"))
    assert made.status == 429
    assert wire(made).startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert decode_completion(HttpReply(429, {}, wire(made).partition(b"\r\n\r\n")[2])).error == "no"


def test_an_empty_stream_is_a_200_without_tokens():
    decoded = decode_completion(reply(make(Script(n_tok=0, usage="off"))))
    assert decoded.events == []
    assert decoded.terminated


GENERATING = [dialect for dialect in DIALECTS if dialect not in ("embeddings", "rerank")]


@pytest.mark.parametrize("dialect", GENERATING)
def test_a_plain_reply_comes_whole_with_the_last_token(dialect):
    made = make(Script(), wanted_of(dialect, "m", stream=False, n_prompt_tok=3, n_output_tok=5))
    head, _, whole = wire(made).partition(b"\r\n\r\n")
    assert f"content-length: {len(whole)}".encode() in head
    assert b" tok tok tok tok tok" in whole
    assert due_ms(made, "plain") == [280]


@given(
    tok_per_event=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    n_output=st.integers(1, 60),
    n_tok=st.sampled_from([None, 0, 1, 9]),
    details=st.booleans(),
)
def test_the_products_server_and_the_tests_server_send_the_same_bytes_at_the_same_times(
    tok_per_event, n_output, n_tok, details
):
    fields = {"headers_s": 0.01, "ttft_s": 0.1, "gaps_s": (0.03, 0.02), "n_tok": n_tok}
    fields["tok_per_event"] = tuple(tok_per_event)
    product = Replies().make(ProductScript(**fields), ProductWanted("m", 3, n_output, details))
    ours = make(Script(**fields), Wanted("m", 3, n_output, details))
    assert wire(product) == wire(ours)
    assert list(product.offsets_ns) == list(ours.offsets_ns)
    assert [write.marks for write in product.writes] == [write.marks for write in ours.writes]
