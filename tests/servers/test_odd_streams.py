"""Streams as servers and gateways really send them, with the right values: eight tokens, at 100 to 240 ms."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.measure.metrics.definitions import METRICS, latencies
from burstline.measure.metrics.slo import missed, parse_slo
from burstline.measure.record.columns import columns_of
from burstline.measure.record.record import Counts, Record, record_of
from burstline.measure.record.tables import record_table
from burstline.servers.messages import Read
from burstline.servers.registry import ENGINES
from tests.measure.making import DONE, MS, capture, chunk, request
from tests.servers.golden import decode_completion

N = 8
FIRST_MS, GAP_MS = 100, 20
TIMES_MS = tuple(FIRST_MS + GAP_MS * k for k in range(N))
END_MS = TIMES_MS[-1]

Payload = dict[str, Any] | bytes
Timed = tuple[int, Payload]


def said(delta: dict[str, Any], finish: str | None = None, **beside: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **beside}


def text(k: int, **beside: Any) -> dict[str, Any]:
    return said({"content": "x"}, "length" if k == N - 1 else None, **beside)


def use(n: int | None, n_prompt: int = 4, **beside: Any) -> dict[str, Any]:
    return {"prompt_tokens": n_prompt, "completion_tokens": n, **beside}


def last(n: int = N, **beside: Any) -> Timed:
    return END_MS, {"choices": [], "usage": use(n, **beside)}


def each(*before: Timed, after: Sequence[Timed] = (), usage: Sequence[int | None] = ()) -> list[Timed]:
    """Eight events with text, each with a usage block where `usage` has its count."""
    events = [
        (at_ms, text(k, **({"usage": use(usage[k])} if usage else {}))) for k, at_ms in enumerate(TIMES_MS)
    ]
    return [*before, *events, *after]


def of(*deltas: dict[str, Any]) -> list[Timed]:
    """One event for each delta at the eight times, and then the server's own count."""
    events = [
        (at_ms, said(delta, "length" if at_ms == END_MS else None))
        for at_ms, delta in zip(TIMES_MS, deltas, strict=True)
    ]
    return [*events, last()]


ROLE = (5, said({"role": "assistant", "content": ""}))


@dataclass(frozen=True)
class Case:
    """A stream, and what its record must say; `source` is who counted."""

    events: list[Timed]
    source: str | None = "usage"
    token_n: Sequence[int] = (1,) * N
    token_ms: Sequence[int] = TIMES_MS
    n_tok: int | None = N
    outcome: str = "ok"
    recounts: Counts = ()
    head: bytes = b"200 OK"
    asked: dict[str, Any] = field(default_factory=dict)


def thought(k: int) -> dict[str, Any]:
    return {"reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": k}]}


CALL = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}
X = {"content": "x"}
BEAT = (130, b"data: \n\n")

CASES = {
    # What usage counts, which may disagree with the text beside it.
    "usage of zeros, the total at the end": Case(each(usage=(0,) * 7 + (N,))),
    "usage of zeros with the role": Case(each((5, ROLE[1] | {"usage": use(0)}), after=[last()])),
    "the prompt's usage alone, at the start": Case(each((5, ROLE[1] | {"usage": use(None)}), after=[last()])),
    "the prompt's usage alone, in each event": Case(each(usage=(None,) * N, after=[last()])),
    "the final usage in each event": Case(each(usage=(N,) * N)),
    "usage that stands still for three events": Case(each(usage=(1, 1, 1, 4, 4, 4, 7, 8))),
    "usage that falls": Case(each(usage=(1, 2, 1, 2, 1, 2, 1, N))),
    "usage that grows as it should": Case(each(ROLE, usage=range(1, N + 1))),
    "a role that counts the first token": Case(each((5, ROLE[1] | {"usage": use(1)}), usage=range(1, N + 1))),
    "usage of zeros throughout": Case(each(usage=(0,) * N), None, n_tok=None),
    "usage of zeros throughout, and a tokenizer": Case(
        each(usage=(0,) * N), "tokenizer", recounts=[("tokenizer", N)]
    ),
    "a prompt of no tokens": Case(each(after=[last(n_prompt=0)])),
    # Usage in odd places.
    "usage in the choice": Case(
        [*each(), (END_MS, {"choices": [{"index": 0, "delta": {}, "finish_reason": None, "usage": use(N)}]})]
    ),
    "usage without choices": Case([*each(), (END_MS, {"usage": use(N)})]),
    "usage with choices of null": Case([*each(), (END_MS, {"choices": None, "usage": use(N)})]),
    "usage of a gateway's own": Case([*each(), (END_MS, {"choices": [], "x_groq": {"usage": use(N)}})]),
    "usage in the words of responses": Case(
        [*each(), (END_MS, {"choices": [], "usage": {"input_tokens": 4, "output_tokens": N}})]
    ),
    "usage before the last text": Case([*each()[:-1], (230, {"choices": [], "usage": use(N)}), each()[-1]]),
    # Text in fields of other names.
    "reasoning in details": Case(of(*map(thought, range(4)), X, X, X, X)),
    "reasoning in details alone": Case(of(*map(thought, range(N)))),
    "thinking": Case(of({"thinking": "hm"}, {"thinking": "hm"}, X, X, X, X, X, X)),
    "a refusal": Case(of(*[{"refusal": "no"}] * N)),
    "parts of content": Case(of(*[{"content": [{"type": "text", "text": "x"}]}] * N)),
    "an unknown field": Case(of(*[{"role": "assistant", "content": None, "novel": "x"}] * N)),
    "fields without text": Case(of(*[X | {"provider": "p", "annotations": []}] * N)),
    "administrative strings before the text": Case(
        each((5, said({"role": "assistant", "id": "1", "name": "m", "type": "message"})), after=[last()])
    ),
    "a tool's call alone": Case(of(*[CALL] * N)),
    "a function's call of old": Case(of(*[{"function_call": {"name": "f", "arguments": "{"}}] * N)),
    # Heartbeats, and events that are not understood.
    "an empty data line": Case(each(BEAT, after=[last()])),
    "a word": Case(each((130, b"data: ping\n\n"), after=[last()])),
    "null": Case(each((130, b"data: null\n\n"), after=[last()])),
    "an event of another type": Case(each((130, b'event: ping\ndata: {"type": "ping"}\n\n'), after=[last()])),
    "an object without choices": Case(each((130, {"id": "1", "object": "heartbeat"}), after=[last()])),
    "an empty object first": Case(each((5, {}), after=[last()])),
    "choices of nothing": Case(each((130, {"choices": []}), after=[last()])),
    "a choice of nothing": Case(each((130, {"choices": [None]}), after=[last()])),
    "an error of null": Case(each((130, {"error": None, "choices": []}), after=[last()])),
    "an error without words": Case(each((130, {"error": {}, "choices": []}), after=[last()])),
    "a comment": Case(each((130, b": keep-alive\n\n"), after=[last()])),
    "a broken event is an error": Case(
        each((130, b"data: {oops\n\n"), after=[last()]), outcome="error_event"
    ),
    "heartbeats alone": Case([(5, b"data: \n\n"), (END_MS, {"choices": []})], None, (), (), None, "empty"),
    # Statuses.
    "created": Case(each(after=[last()]), head=b"201 Created"),
    "accepted": Case(each(after=[last()]), head=b"202 Accepted"),
    # What a tokenizer makes of the text is at most what was asked.
    "a length stop, text of more": Case(each(), "tokenizer", recounts=[("tokenizer", 11)]),
    "a length stop, text of fewer": Case(each(), "tokenizer", recounts=[("tokenizer", 6)]),
    "a length stop far below": Case(
        each()[:2] + each()[-1:],
        "tokenizer",
        token_ms=(100, 120, END_MS),
        token_n=(1, 1, 1),
        n_tok=3,
        recounts=[("tokenizer", 3)],
    ),
    "a stop of its own, text of more": Case(
        [*each()[:-1], (END_MS, said(X, "stop"))], "tokenizer", recounts=[("tokenizer", 11)]
    ),
    "all came, though it says stop": Case(
        [*each()[:-1], (END_MS, said(X, "stop"))], "tokenizer", recounts=[("tokenizer", N)]
    ),
    "twice what was asked": Case(
        [*each()[:-1], (END_MS, said(X, "stop"))],
        "tokenizer",
        outcome="long",
        asked={"n_output_tok": 4},
        recounts=[("tokenizer", N)],
    ),
    # Reasoning that the server counts and does not show.
    "hidden reasoning with events of its own": Case(
        [(20 + 10 * k, said({"content": None})) for k in range(N)] + each(after=[last(2 * N)]),
        n_tok=2 * N,
        asked={"n_output_tok": 2 * N},
    ),
    "hidden reasoning without events": Case(
        each(after=[last(2 * N, completion_tokens_details={"reasoning_tokens": N})]),
        n_tok=2 * N,
        asked={"n_output_tok": 2 * N},
    ),
    "hidden reasoning, one event before the text": Case(
        [
            (60, said({"content": None})),
            *each(after=[last(2 * N, completion_tokens_details={"reasoning_tokens": N})]),
        ],
        n_tok=2 * N,
        asked={"n_output_tok": 2 * N},
    ),
    # What a router drops on the way: a count in each event was asked for.
    "one count at the end, two tokens an event": Case(
        each(after=[last(2 * N)]), token_n=(2,) * N, n_tok=2 * N, asked={"n_output_tok": 2 * N}
    ),
    "one count at the end, fewer events than tokens": Case(
        each(after=[last(12)]),
        token_n=(2, 1, 2, 1, 2, 1, 2, 1),
        n_tok=12,
        asked={"n_output_tok": 12},
    ),
    "no count at all, though asked for": Case(each(), "tokenizer", recounts=[("tokenizer", N)]),
    # As litgpt: another id in each event, a usage of zeros, and "stop" where the length was the end.
    "an empty reason in each event": Case(
        [(at, said(X, "" if at < END_MS else "length")) for at in TIMES_MS] + [last()]
    ),
    "the word null for a reason": Case(
        [(at, said(X, "null" if at < END_MS else "length")) for at in TIMES_MS] + [last()]
    ),
    "a reason in the first event too": Case(
        [(at, said(X, {FIRST_MS: "stop", END_MS: "length"}.get(at))) for at in TIMES_MS] + [last()]
    ),
    "details of null": Case(each(after=[last(completion_tokens_details=None, prompt_tokens_details=None)])),
    "an error without data, in an event stream": Case(
        [(at, said(X)) for at in TIMES_MS]
        + [(END_MS, b'{"error": {"message": "it broke", "code": 500}}\n\n')],
        None,
        n_tok=None,
        outcome="error_event",
    ),
    "another id in each event": Case(
        [*((at, text(k, id=f"cmpl-{k}", created=k)) for k, at in enumerate(TIMES_MS)), last()]
    ),
    "zeros at the end, stop for its length": Case(
        [*each()[:-1], (END_MS, said(X, "stop")), last(0)], "tokenizer", recounts=[("tokenizer", N)]
    ),
    "reasoning that is shown": Case(
        [
            *of(*[{"reasoning": "hm"}] * 4, X, X, X, X)[:-1],
            last(completion_tokens_details={"reasoning_tokens": 4}),
        ]
    ),
}


def as_event(payload: Payload) -> bytes:
    return payload if isinstance(payload, bytes) else b"data: " + orjson.dumps(payload) + b"\n\n"


def record_(case: Case, decode: Any = decode_completion) -> Record:
    head = b"HTTP/1.1 " + case.head + b"\r\ncontent-type: text/event-stream\r\n"
    reads = [Read(MS, None, head + b"transfer-encoding: chunked\r\n\r\n")]
    for at_ms, payload in sorted(case.events, key=lambda row: row[0]):
        reads.append(Read(at_ms * MS, None, chunk(as_event(payload))))
    reads.append(Read(END_MS * MS, None, chunk(DONE) + b"0\r\n\r\n"))
    return record_of(request(**{"n_output_tok": N} | case.asked), capture(reads), decode, case.recounts)


@pytest.mark.parametrize(
    ("after", "outcome"), [([last()], "ok"), ([last(6)], "truncated"), ([], "truncated")]
)
def test_a_whole_body_without_reason_and_done_has_ended_if_all_tokens_came(
    after: list[Timed], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__name__ + ".DONE", b"")
    assert record_(Case([*((at, said(X)) for at in TIMES_MS), *after])).outcome == outcome


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_of_another_habit_has_the_same_times_and_counts(case: Case) -> None:
    record = record_(case)
    assert record.outcome == case.outcome, record.error
    assert list(record.token_ns) == [at_ms * MS for at_ms in case.token_ms]
    assert list(record.token_n) == list(case.token_n)
    assert (record.output_tok, record.output_source) == (case.n_tok, case.source)


def figures_of(record: Record) -> dict[str, float]:
    c = columns_of(record_table([record]))
    return {name: float(latencies(METRICS[name], c)[0]) for name in ("ttft_service", "tpot", "e2e_service")}


HIDES = [name for name in CASES if name.startswith(("hidden", "one count at the end, two", "reasoning that"))]


@pytest.mark.parametrize("name", HIDES)
def test_the_pace_is_that_of_the_tokens_with_text(name: str) -> None:
    """R74: neither what is hidden nor how it is sent changes the pace of the rest."""
    record = record_(CASES[name])
    sent_s = (record.sent_ns or 0) / 1e9
    per_event = CASES[name].token_n[0]
    figures = figures_of(record)
    assert figures["ttft_service"] == pytest.approx(FIRST_MS / 1e3 - sent_s)
    assert figures["tpot"] == pytest.approx(GAP_MS / 1e3 / per_event)
    assert figures["e2e_service"] == pytest.approx(END_MS / 1e3 - sent_s)


OWN_LENGTHS = {
    "ended by itself though asked not to": (N, "stop", {"n_output_tok": 16}),
    "more than the limit": (N, "stop", {"n_output_tok": 4}),
    "more than the limit, by its length": (N, "length", {"n_output_tok": 4}),
    "cut short by the server": (N, "length", {"n_output_tok": 16}),
    "as asked": (N, "length", {}),
}


@pytest.mark.parametrize(("n", "finish", "asked"), OWN_LENGTHS.values(), ids=OWN_LENGTHS)
@pytest.mark.parametrize("has_usage", [True, False])
@pytest.mark.parametrize("name", ["openai", "openai-chat", "vllm+chat"])
def test_no_length_is_a_failure_where_nothing_is_known_of_the_server(
    n: int, finish: str, asked: dict[str, Any], has_usage: bool, name: str
) -> None:
    events = [*each()[:-1], (END_MS, said(X, finish)), *([last()] if has_usage else [])]
    record = record_(Case(events, asked=asked), ENGINES[name].decode)
    assert record.outcome == "ok"
    assert list(record.token_ns) == [at_ms * MS for at_ms in TIMES_MS]
    assert record.output_tok == (n if has_usage else None)


NOISE = (
    b"data: \n\n",
    b"data: ping\n\n",
    b"data: null\n\n",
    b"data: 7\n\n",
    b"data: {}\n\n",
    b": keep-alive\n\n",
    b'event: ping\ndata: {"type":"ping"}\n\n',
    b'data: {"choices":[]}\n\n',
    b'data: {"choices":[],"usage":null,"extra":{"text":"x"}}\n\n',
    b'data: {"id":"1","error":null,"choices":[]}\n\n',
)


@given(
    st.lists(st.tuples(st.integers(1, END_MS), st.sampled_from(NOISE)), max_size=6),
    st.sampled_from(
        ["reasoning in details", "usage of zeros, the total at the end", "usage that grows as it should"]
    ),
)
def test_no_heartbeat_anywhere_changes_a_record(noise: list[tuple[int, bytes]], name: str) -> None:
    case = CASES[name]
    quiet, noisy = record_(case), record_(replace(case, events=[*case.events, *noise]))
    # What is an event of its own may be the first of any kind, and nothing else.
    own = {"n_events": 0, "n_reads": 0, "first_event_ns": None}
    assert replace(noisy, **own) == replace(quiet, **own)


USED = said({}, "length", usage=use(32))
WITHOUT_TEXT = {
    "one final event": [(END_MS, said({"content": ""}, "length", usage=use(32)))],
    "a role, the end, and then usage": [ROLE, (END_MS, said({}, "length")), (900, last(32)[1])],
    "an empty event now and then": [*((t, said({"content": ""})) for t in TIMES_MS[:-1]), (END_MS, USED)],
    "an empty event for each token": [
        *((END_MS * k // 32, said({"content": None})) for k in range(1, 33)),
        (END_MS, USED),
    ],
    "reasoning that is counted apart": [
        (END_MS, said({}, "length", usage=use(32, completion_tokens_details={"reasoning_tokens": 32})))
    ],
    "usage alone": [ROLE, last(32)],
}


@pytest.mark.parametrize("events", WITHOUT_TEXT.values(), ids=WITHOUT_TEXT)
def test_tokens_without_text_have_an_end_and_no_beginning(events: list[Timed]) -> None:
    record = record_(Case(events, asked={"n_output_tok": 32}))
    assert (record.outcome, record.error, record.output_tok) == ("ok", None, 32)
    assert (record.token_ns, record.token_n, record.split) == ([END_MS * MS], [32], "no-text")
    c = columns_of(record_table([record]))
    figures = {name: latencies(METRICS[name], c)[0] for name in ("ttft", "ttft_service", "ttfa", "tpot")}
    assert np.isnan([*figures.values()]).all(), figures
    assert latencies(METRICS["e2e"], c)[0] == (END_MS * MS - record.due_ns) / 1e9
    assert missed(c, [parse_slo("ttft<=9s")]) is None
    within = missed(c, [parse_slo("e2e<=9s")])
    assert within is not None
    assert within < 1
