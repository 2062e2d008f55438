"""Whatever is sent to a server before the load leaves it unhurt: it may be somebody else's."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from burstline.bench import plan_for_server as vocabulary
from burstline.bench.server_session import Site
from burstline.servers.host.ready import Startup
from burstline.servers.identity import Identity
from burstline.servers.messages import Call, EngineError, HttpReply, Target
from burstline.servers.openai import tokenize_call
from burstline.servers.registry import ENGINES, engine_at
from burstline.workloads.request import WorkloadError

SMALLEST_VOCABULARY = 256
"""Of bytes alone; no published model has a smaller one."""
MOST_BYTES = 8192
MOST_TOKENS = 16
TARGET = Target("http://x", "m")


def ids_in(value: Any) -> list[int]:
    """Every list of numbers in a JSON value, as one list."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in ids_in(each)]
    if isinstance(value, list):
        return [n for each in value for n in ([each] if isinstance(each, int) else ids_in(each))]
    return []


def outputs_in(value: Any) -> list[int]:
    """Every length that is asked for."""
    names = ("max_tokens", "max_new_tokens", "n_predict")
    if not isinstance(value, dict):
        return []
    own = [value[name] for name in names if name in value]
    return own + [n for each in value.values() for n in outputs_in(each)]


def everything_sent(name: str, reply: HttpReply, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """All calls of one attach, whatever they are answered."""
    sent: list[Call] = []

    def ask(call: Call) -> HttpReply:
        sent.append(call)
        return reply

    engine = ENGINES[name]
    engine_at(lambda path: ask(Call("GET", path, headers=())))
    with suppress(EngineError, KeyError, IndexError, ValueError):
        engine.identify(lambda path: ask(Call("GET", path, headers=())), "")
    ask(engine.ready_call(TARGET))
    target, _ = engine.probe(ask, TARGET)
    site = Site(engine, target, Identity(name), None, None, Startup(0.0), engine.capabilities_of(target))
    monkeypatch.setattr(vocabulary, "send", lambda target, call, timeout_s: ask(call))
    with suppress(WorkloadError):
        vocabulary.vocabulary_for(None, None, None, site)
    if engine.tokenizes:
        ask(tokenize_call("Hello", target))
    return sent


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "reply",
    [
        HttpReply(404, {}, b"{}"),
        HttpReply(200, {}, b'{"choices":[{"text":"x"}],"usage":{"completion_tokens":8,"prompt_tokens":3}}'),
    ],
)
def test_before_a_load_only_short_texts_few_tokens_and_ids_of_every_vocabulary_are_sent(
    name: str, reply: HttpReply, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = everything_sent(name, reply, monkeypatch)
    assert sent
    for call in sent:
        assert len(call.body) <= MOST_BYTES
        if call.method == "GET":
            assert not call.body
            continue
        body = json.loads(call.body)
        assert all(0 <= token_id < SMALLEST_VOCABULARY for token_id in ids_in(body))
        assert all(1 <= n <= MOST_TOKENS for n in outputs_in(body))
