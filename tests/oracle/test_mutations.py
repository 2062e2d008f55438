"""Streams of which one event in twenty says more than it should: no headline figure moves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from burstline.measure.record.record import Record, record_of
from burstline.measure.record.tables import record_table
from burstline.servers.messages import Read
from tests.measure.making import DONE, MS, capture, chunk, request, summarized
from tests.seeds import SEED
from tests.servers.golden import decode_completion
from tests.servers.test_odd_streams import NOISE, Payload, as_event, said, use

SHARE = 0.05
N_REQUESTS = 60
HABITS = ("usage at the end", "usage in each event", "no usage", "reasoning first", "a tool's call")

UNKNOWN: tuple[dict[str, Any], ...] = (
    {"x": "words that no server should say here"},
    {"nvext": {"timing": {"text": "1 ms"}}, "provider": "p"},
    {"obfuscation": "aaaaaaaaaaaaaa", "system_fingerprint": None},
)
USAGES: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    use(0),
    use(None),
    {"prompt_tokens": 4, "total_tokens": 4},
)


def stream(random: np.random.Generator, habit: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a reply and when they come, in ms: as many tokens as events with text."""
    n, at_ms = int(random.integers(4, 40)), int(random.integers(20, 200))
    yield at_ms - 10, said({"role": "assistant", "content": ""})
    for k in range(n):
        delta: dict[str, Any] = {"content": "x"}
        if habit == "reasoning first" and k < n // 2:
            delta = {"reasoning_content": "hm"}
        elif habit == "a tool's call":
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
        each = {"usage": use(k + 1)} if habit == "usage in each event" else {}
        yield at_ms, said(delta, "length" if k == n - 1 else None, **each)
        at_ms += int(random.integers(5, 30))
    if habit not in ("no usage", "usage in each event"):
        yield at_ms, {"choices": [], "usage": use(n)}


def mutated(
    random: np.random.Generator, events: list[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[int, Payload]]:
    for at_ms, event in events:
        if random.random() >= SHARE:
            yield at_ms, event
            continue
        kind = int(random.integers(3))
        if kind == 0:
            yield at_ms - 1, NOISE[int(random.integers(len(NOISE)))]
        own = copy.deepcopy(event)
        if kind == 1:
            more = UNKNOWN[int(random.integers(len(UNKNOWN)))]
            own |= more
            for choice in own["choices"]:
                choice |= more
                choice["delta"] |= more if choice["delta"].get("content") else {}
        if kind == 2 and not own.get("usage"):
            own["usage"] = USAGES[int(random.integers(len(USAGES)))]
        yield at_ms, own


def record_of_stream(index: int, events: list[tuple[int, Payload]], n_tok: int, *, counted: bool) -> Record:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    reads = [Read(MS, None, head)]
    reads += [Read(at_ms * MS, None, chunk(as_event(payload))) for at_ms, payload in events]
    reads.append(Read(events[-1][0] * MS, None, chunk(DONE) + b"0\r\n\r\n"))
    recounts = () if counted else [("tokenizer", n_tok)]
    record = record_of(request(n_tok), capture(reads), decode_completion, recounts)
    return replace(record, index=index)


def headlines(records: list[Record]) -> dict[str, Any]:
    summary = summarized(record_table(records))
    metrics = {
        f"{name}.{statistic}": summary["metrics"][name][statistic]["point"]
        for name in ("ttft", "tpot", "itl", "e2e")
        for statistic in ("p50", "p90", "p99", "mean")
    }
    rates = {name: figure["point"] for name, figure in summary["throughput"].items() if "point" in figure}
    return metrics | rates | summary["counts"]


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("k", range(3))
def test_no_headline_moves_with_one_event_in_twenty_mutated(habit: str, k: int) -> None:
    random = np.random.default_rng([SEED, k, HABITS.index(habit)])
    plain, odd, n_mutated = [], [], 0
    for index in range(N_REQUESTS):
        events = list(stream(random, habit))
        n_tok = sum(bool(each["choices"]) for _, each in events) - 1
        others = list(mutated(random, events))
        n_mutated += others != events
        plain.append(record_of_stream(index, [*events], n_tok, counted=habit != "no usage"))
        odd.append(record_of_stream(index, others, n_tok, counted=habit != "no usage"))
    assert n_mutated > N_REQUESTS / 4
    assert headlines(odd) == headlines(plain)
    assert headlines(plain)["ok"] == N_REQUESTS
