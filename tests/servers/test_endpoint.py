import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from burstline.servers.engines import endpoint
from burstline.servers.engines.endpoint import IDS, IGNORE_EOS, USAGE, USAGE_EACH
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import Call, EngineError, HttpReply, Target
from burstline.servers.redact import Secret
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request, Sampling
from tests.servers import documented as said
from tests.servers.golden import http_reply

ENGINE, CHAT = ENGINES["openai"], ENGINES["openai-chat"]
TARGET = Target("https://host/v1", "m", Secret("key"))
TEXT = Request(0, None, "seven", 1, 9)


def fields_of(call: Call) -> dict[str, Any]:
    return dict(orjson.loads(call.body))


def test_only_fields_of_openais_own_schema_are_sent_until_more_is_known() -> None:
    call = ENGINE.encode(TEXT, TARGET)
    assert set(fields_of(call)) == {"model", "prompt", "max_tokens", "temperature", "stream"}
    assert (fields_of(call)["prompt"], call.path) == ("seven", "/completions")
    chat = CHAT.encode(TEXT, TARGET)
    assert set(fields_of(chat)) == {"model", "messages", "max_tokens", "temperature", "stream"}
    assert fields_of(chat)["messages"] == [{"role": "user", "content": "seven"}]
    assert chat.path == "/chat/completions"


def test_what_a_server_was_seen_to_take_is_sent() -> None:
    target = replace(TARGET, takes=(USAGE, USAGE_EACH, IGNORE_EOS, IDS))
    fields = fields_of(ENGINE.encode(Request(0, array("I", [7]), None, 1, 9), target))
    assert fields["prompt"] == [7]
    assert fields["ignore_eos"] is True
    assert fields["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    free = fields_of(ENGINE.encode(replace(TEXT, ignore_eos=False), target))
    assert "ignore_eos" not in free


def test_sampling_is_sent_where_something_is_sampled() -> None:
    warm = replace(TEXT, sampling=Sampling(0.7, 0.9, 3))
    fields = fields_of(ENGINE.encode(warm, TARGET))
    assert (fields["temperature"], fields["top_p"], fields["seed"]) == (0.7, 0.9, 3)


def test_ids_for_a_server_that_takes_text_only_are_our_mistake_and_say_so() -> None:
    with pytest.raises(EngineError, match="accepts only text"):
        ENGINE.encode(Request(0, array("I", [7]), None, 1, 9), TARGET)


def server(
    refuses: tuple[str, ...] = (), drops: tuple[str, ...] = (), n_own_tok: int = 3
) -> Callable[[Call], HttpReply]:
    """A server that refuses some fields, silently drops others, and stops by itself after `n_own_tok`."""

    def answer(call: Call) -> HttpReply:
        asked = fields_of(call)
        asked["ids"] = isinstance(asked.get("prompt"), list) or None
        asked = {name: value for name, value in asked.items() if value is not None and name not in drops}
        if refused := [name for name in refuses if name in asked]:
            return http_reply(said.plain(400, {"error": {"message": f"unknown {refused}"}}))
        n = asked["max_tokens"] if asked.get("ignore_eos") else min(n_own_tok, asked["max_tokens"])
        options = asked.get("stream_options", {})
        events = [said.completion_event("a") for _ in range(n)]
        if options.get("continuous_usage_stats"):
            for i, event in enumerate(events):
                event["usage"] = {"prompt_tokens": 3, "completion_tokens": i + 1}
        last = [said.usage_event(n, n_prompt=3)] if options else []
        return http_reply(said.stream(*events, said.completion_event("", "length"), *last, said.DONE))

    return answer


@pytest.mark.parametrize(
    ("ask", "takes", "lacks"),
    [
        (server(), (USAGE, USAGE_EACH, IGNORE_EOS, IDS), ()),
        (server(refuses=("ids", "ignore_eos")), (USAGE, USAGE_EACH), (IDS, IGNORE_EOS)),
        (server(drops=("ignore_eos",)), (USAGE, USAGE_EACH, IDS), (IGNORE_EOS,)),
        (server(refuses=("stream_options",)), (IDS,), (IGNORE_EOS, USAGE)),
        (server(refuses=("stream_options", "ids", "ignore_eos")), (), (IDS, IGNORE_EOS, USAGE)),
    ],
)
def test_each_extra_is_tried_and_left_out_where_it_is_refused_or_does_nothing(
    ask: Callable[[Call], HttpReply], takes: tuple[str, ...], lacks: tuple[str, ...]
) -> None:
    target, notes = ENGINE.probe(ask, TARGET)
    assert target.takes == takes
    assert all(extra in notes[0] for extra in lacks)
    assert len(notes) == bool(lacks)
    capabilities = ENGINE.capabilities_of(target)
    assert capabilities.token_id_prompts == (IDS in takes)
    assert capabilities.forced_output_length == (IGNORE_EOS in takes)
    assert capabilities.per_event_tok == ("usage" if USAGE_EACH in takes else "no")


@pytest.mark.parametrize("has_usage", [True, False])
@pytest.mark.parametrize(("n", "is_said"), [(8, False), (9, True), (64, True)])
def test_a_server_that_ignores_the_limit_is_named_before_the_load(
    n: int, is_said: bool, has_usage: bool
) -> None:
    def answer(call: Call) -> HttpReply:
        n_sent = min(n, fields_of(call)["max_tokens"]) if n == 8 else n
        use = [said.usage_event(n_sent, n_prompt=3)] if has_usage else []
        return http_reply(said.stream(*[said.completion_event("a")] * n_sent, *use, said.DONE))

    _, notes = ENGINE.probe(answer, TARGET)
    assert any(f"sent {n} tokens where at most 8" in note for note in notes) == is_said


def test_a_server_of_one_stream_is_asked_one_thing_at_a_time() -> None:
    """llama-cpp-python in its defaults ends a stream when a second one begins."""
    answer, asking, most = server(), [0], [0]

    def one_slot(call: Call) -> HttpReply:
        asking[0] += 1
        most[0] = max(most[0], asking[0])
        time.sleep(0.01)
        reply = answer(call)
        asking[0] -= 1
        return reply

    assert ENGINE.probe(one_slot, TARGET)[0].takes == (USAGE, USAGE_EACH, IGNORE_EOS, IDS)
    assert most == [1]


def test_chat_is_never_sent_token_ids() -> None:
    target, _ = CHAT.probe(server(), TARGET)
    assert IDS not in target.takes


def test_it_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="attach to it by its URL"):
        ENGINE.launch(LaunchOptions("m", "127.0.0.1", 1, "m", tmp_path))


def test_it_is_whatever_model_it_names_and_nothing_else_is_known() -> None:
    reply = HttpReply(200, {}, b'{"data":[{"id":"gpt","object":"model"}]}')
    identity = ENGINE.identify(lambda path: reply, "")
    assert (identity.model, identity.version, identity.max_model_len) == ("gpt", None, None)
    assert ENGINE.gauges("").running is None


def test_a_chat_goes_to_the_chat_endpoint_message_by_message_in_either_style() -> None:
    said_so = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text"}]}]
    asked = Request(0, None, None, 0, 9, messages=orjson.dumps(said_so).decode())
    for engine in (ENGINE, CHAT):
        call = engine.encode(asked, TARGET)
        assert call.path == "/chat/completions"
        assert fields_of(call)["messages"] == said_so


def test_a_server_that_is_busy_for_a_moment_has_refused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RETRY_S", 0.0)
    answer, asked = server(), list[Call]()

    def busy_at_first(call: Call) -> HttpReply:
        asked.append(call)
        return HttpReply(503, {}, b"") if len(asked) <= 5 else answer(call)

    target, notes = ENGINE.probe(busy_at_first, TARGET)
    assert target.takes == (USAGE, USAGE_EACH, IGNORE_EOS, IDS)
    assert notes == ()


def test_what_fails_each_time_is_not_called_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RETRY_S", 0.0)
    answer = server(refuses=("ignore_eos",))

    def fails_on_ids(call: Call) -> HttpReply:
        return HttpReply(500, {}, b"") if isinstance(fields_of(call)["prompt"], list) else answer(call)

    target, notes = ENGINE.probe(fails_on_ids, TARGET)
    assert target.takes == (USAGE, USAGE_EACH)
    refused, failed = notes
    assert refused.endswith(f"does not take: {IGNORE_EOS}")
    assert f"failed each time it was asked for: {IDS}" in failed
