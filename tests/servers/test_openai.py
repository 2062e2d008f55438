from array import array
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.servers.messages import Event, HttpReply, Kind, Reply, Target
from burstline.servers.openai import count_in, encode_completion, tokenize_call
from burstline.workloads.request import Request, Sampling
from tests.servers.golden import decode_completion, golden_reply

REQUEST = Request(0, array("I", [5, 6, 7]), None, 3, 16)
TARGET = Target("http://127.0.0.1:8000", "m")


def stream(*events: object, done: bool = True) -> HttpReply:
    lines = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events]
    return HttpReply(200, {"content-type": "text/event-stream"}, b"".join(lines) + b"data: [DONE]\n\n" * done)


def piece(text: str = "x", finish: str | None = None, **more: object) -> dict[str, object]:
    usage = {"usage": more.pop("usage")} if "usage" in more else {}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}], **usage}


def usage(n_prompt: int, n_output: int) -> dict[str, int]:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_output, "total_tokens": n_prompt + n_output}


def counts(reply: Reply) -> list[tuple[Kind, int | None]]:
    return [(event.kind, event.n_tok) for event in reply.events]


def test_encoding_asks_for_exactly_the_request() -> None:
    call = encode_completion(REQUEST, TARGET)
    assert (call.method, call.path) == ("POST", "/v1/completions")
    assert orjson.loads(call.body) == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_text_sampling_and_extra_fields_reach_the_body() -> None:
    request = Request(0, None, "hello", 1, 4, ignore_eos=False, sampling=Sampling(0.7, 0.9, 3))
    fields = orjson.loads(encode_completion(request, TARGET, extra={"priority": 1}).body)
    assert fields["prompt"] == "hello"
    assert (fields["temperature"], fields["top_p"], fields["seed"]) == (0.7, 0.9, 3)
    assert fields["priority"] == 1
    assert "ignore_eos" not in fields


def test_what_was_said_is_kept_where_nobody_counted_it() -> None:
    assert decode_completion(stream(piece("a b"), piece(" c", "length"))).text == "a b c"
    assert decode_completion(stream(piece("a"), piece("b", "length", usage=usage(3, 2)))).text is None
    assert decode_completion(stream(piece("a", token_ids=[7]), piece("b", token_ids=[8]))).text is None
    assert decode_completion(stream(piece(""), piece("", "length"))).text is None


def test_of_a_chat_reasoning_and_answer_are_kept_once_and_a_tools_call_is_not_text() -> None:
    def chat(**delta: object) -> dict[str, object]:
        return {"choices": [{"index": 0, "delta": delta}]}

    thought = chat(reasoning="hm", reasoning_content="hm")
    assert decode_completion(stream(chat(role="assistant"), thought, chat(content=" yes"))).text == "hm yes"
    assert decode_completion(stream(chat(content="a"), chat(tool_calls=[{"index": 0}]))).text is None


@pytest.mark.parametrize(
    ("status", "answer", "count"),
    [
        (200, {"count": 3, "max_model_len": 9, "tokens": [1, 2, 3], "token_strs": None}, 3),
        (404, {"detail": "Not Found"}, None),
        (200, {"tokens": [1, 2, 3]}, None),
        (200, [1, 2, 3], None),
    ],
)
def test_a_servers_own_tokenizer_is_asked_without_special_tokens(
    status: int, answer: object, count: int | None
) -> None:
    call = tokenize_call("a b c", TARGET)
    asked = {"model": "m", "prompt": "a b c", "add_special_tokens": False}
    assert (call.method, call.path, orjson.loads(call.body)) == ("POST", "/tokenize", asked)
    assert count_in(HttpReply(status, {}, orjson.dumps(answer))) == count


def test_a_base_url_with_v1_gets_no_second_v1() -> None:
    call = encode_completion(REQUEST, Target("https://host/openai/v1/", "m"))
    assert call.path == "/completions"


def test_a_recorded_vllm_stream_decodes_to_the_byte() -> None:
    recorded = golden_reply("vllm/completions_stream.http")
    reply = decode_completion(recorded)
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.n_output_ids) == (512, 64, None)
    assert (reply.finish_reason, reply.terminated, reply.error) == ("length", True, None)
    assert counts(reply) == [(Kind.ANSWER, None)] * 64 + [(Kind.USAGE, None)]
    begin = 0
    for event in reply.events:
        chunk = recorded.body[begin : event.end]
        assert chunk.startswith(b"data: {")
        assert chunk.endswith(b"}\n\n")
        assert chunk.count(b"data: ") == 1
        begin = event.end
    assert recorded.body[begin:] == b"data: [DONE]\n\n"


def test_a_recorded_plain_reply_is_one_event_with_all_its_tokens() -> None:
    recorded = golden_reply("vllm/completions_plain.http")
    reply = decode_completion(recorded)
    assert reply.events == [Event(728, Kind.ANSWER, 64)]
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.finish_reason) == (512, 64, "length")


def test_token_ids_count_an_event_before_any_usage() -> None:
    reply = decode_completion(
        stream(
            piece("", token_ids=[1], prompt_token_ids=[5, 6, 7]),
            piece("abc", token_ids=[1, 2, 3]),
            piece("", "stop", token_ids=[]),
        )
    )
    assert counts(reply) == [(Kind.ANSWER, 1), (Kind.ANSWER, 3), (Kind.FINISH, 0)]
    assert (reply.n_output_ids, reply.n_output_usage, reply.n_prompt_tok) == (4, None, 3)


def test_usage_in_every_event_counts_tokens_by_its_growth() -> None:
    reply = decode_completion(
        stream(
            piece("a", usage=usage(3, 1)),
            piece("", usage=usage(3, 2)),
            piece("bcd", "length", usage=usage(3, 9)),
            {"choices": [], "usage": usage(3, 9)},
        )
    )
    assert counts(reply) == [(Kind.ANSWER, 1), (Kind.ANSWER, 1), (Kind.ANSWER, 7), (Kind.USAGE, None)]
    assert (reply.n_prompt_tok, reply.n_output_usage) == (3, 9)


def test_usage_that_comes_once_at_the_end_counts_no_single_event() -> None:
    reply = decode_completion(stream(piece("a"), piece("b", "length", usage=usage(3, 2))))
    assert counts(reply) == [(Kind.ANSWER, None), (Kind.ANSWER, None)]
    assert reply.n_output_usage == 2


def test_no_usage_at_all_leaves_the_counts_open() -> None:
    reply = decode_completion(stream({"choices": [{"text": "a"}], "usage": None}, piece("b", "stop")))
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.n_output_ids) == (None, None, None)


def test_cached_prompt_tokens_are_kept() -> None:
    last = {"choices": [], "usage": usage(512, 1) | {"prompt_tokens_details": {"cached_tokens": 384}}}
    assert decode_completion(stream(piece("a", "length"), last)).n_cached_tok == 384


def test_done_or_a_finish_reason_terminates_a_reply_and_nothing_else_does() -> None:
    assert decode_completion(stream(piece("a", "length"), done=False)).terminated
    assert decode_completion(stream(piece("a"), done=True)).terminated
    assert not decode_completion(stream(piece("a"), done=False)).terminated


def test_a_chat_stream_tells_role_reasoning_tools_and_answer_apart() -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0}]},
        {"content": "yes"},
        {"content": ""},
    ]
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    reply = decode_completion(stream(*events, {"choices": [{"delta": {}, "finish_reason": "stop"}]}))
    assert [event.kind for event in reply.events] == [
        Kind.ROLE,
        Kind.ROLE,
        Kind.REASONING,
        Kind.REASONING,
        Kind.TOOL,
        Kind.ANSWER,
        Kind.EMPTY,
        Kind.FINISH,
    ]


ERRORS = [
    ({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, "no"),
    ({"error": {"code": 7}}, '{"code":7}'),
    ({"error": "no"}, "no"),
    ({"error": "no", "error_type": "overloaded"}, "no"),
    ({"object": "error", "message": "no", "code": 400}, "no"),
    ({"detail": "no"}, "no"),
    ({"detail": [{"msg": "no"}]}, '[{"msg":"no"}]'),
]


@pytest.mark.parametrize(("answer", "said"), ERRORS)
def test_every_shape_of_error_is_understood_as_a_refusal_and_inside_a_stream(
    answer: object, said: str
) -> None:
    refusal = decode_completion(HttpReply(400, {"content-type": "application/json"}, orjson.dumps(answer)))
    assert (refusal.error, counts(refusal)) == (said, [(Kind.ERROR, None)])
    inside = decode_completion(stream(piece("a"), answer))
    assert (inside.error, counts(inside)) == (said, [(Kind.ANSWER, None), (Kind.ERROR, None)])
    instead = decode_completion(HttpReply(200, {}, orjson.dumps(answer)))
    assert (instead.error, instead.finish_reason) == (said, None)


def test_a_refusal_without_json_keeps_its_words_and_one_without_body_its_status() -> None:
    assert decode_completion(HttpReply(502, {}, b"<html>Bad gateway")).error == "<html>Bad gateway"
    page = b"<!DOCTYPE html><html><head>\n<Title>502 Bad\n Gateway</title></head><body>nginx"
    assert decode_completion(HttpReply(502, {}, page)).error == "HTTP 502 and a web page, '502 Bad Gateway'"
    assert decode_completion(HttpReply(503, {}, b"")).error == "HTTP 503 without a body"


def test_an_empty_200_has_no_events_and_no_error() -> None:
    for content_type in ("text/event-stream", "application/json"):
        reply = decode_completion(HttpReply(200, {"content-type": content_type}, b""))
        assert reply == Reply([])


def test_an_event_that_is_no_json_is_an_error_and_the_others_stay() -> None:
    whole = stream(piece("a"), piece("b", "length"))
    broken = replace(whole, body=b"data: {oops\n\n" + whole.body)
    reply = decode_completion(broken)
    assert [event.kind for event in reply.events] == [Kind.ERROR, Kind.ANSWER, Kind.ANSWER]
    assert reply.error is not None
    assert "{oops" in reply.error


def test_bytes_that_are_no_utf8_spoil_neither_their_event_nor_the_others() -> None:
    whole = stream(piece("a"), piece("QQ"), piece("c", "length"))
    reply = decode_completion(replace(whole, body=whole.body.replace(b"QQ", b"\xff\xfe")))
    assert (len(reply.events), reply.error) == (3, None)


@given(st.integers(0, 15_158))
def test_a_stream_cut_anywhere_keeps_exactly_the_events_that_had_come(cut: int) -> None:
    whole = golden_reply("vllm/completions_stream.http")
    every = decode_completion(whole).events
    reply = decode_completion(replace(whole, body=whole.body[:cut], complete=False))
    had_come = [event for event in every if event.end <= cut]
    assert reply.events[: len(had_come)] == had_come
    assert len(reply.events) - len(had_come) in (0, 1)  # one more where only its blank line is missing
    assert reply.error is None


@given(st.data())
def test_framing_changes_when_an_event_ends_and_nothing_else(data: st.DataObject) -> None:
    whole = golden_reply("vllm/completions_stream.http")
    plain = decode_completion(whole)
    newline = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    space = data.draw(st.sampled_from([b"", b" "]))
    noise = st.sampled_from([b"", b": ping" + newline, b": ping" + newline * 2, b"event: message" + newline])
    body = b""
    for payload in whole.body.removesuffix(b"\n\n").split(b"\n\n"):
        body += data.draw(noise) + b"data:" + space + payload.removeprefix(b"data: ") + newline * 2
    mutated = decode_completion(replace(whole, body=body))
    assert counts(mutated) == counts(plain)
    assert replace(mutated, events=[]) == replace(plain, events=[])


@given(st.binary(max_size=200), st.sampled_from([200, 400, 500]), st.sampled_from(["text/event-stream", "x"]))
def test_no_bytes_at_all_make_it_raise(body: bytes, status: int, content_type: str) -> None:
    decode_completion(HttpReply(status, {"content-type": content_type}, body))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "usage", "completion_tokens", "error", "text", "token_ids", "delta", "detail"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(st.lists(JSON, max_size=3))
def test_no_json_at_all_makes_it_raise(values: list[object]) -> None:
    decode_completion(stream(*values))
    decode_completion(HttpReply(200, {}, orjson.dumps(values[:1] and values[0])))
