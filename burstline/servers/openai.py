"""The OpenAI completions dialect, which most engines speak: one request encoded, one reply decoded.

Tolerant in what it decodes, because the engines differ: `[DONE]` may be missing, usage may stand in the last
content event, in an event without choices, in every event or nowhere, text may be empty, and errors come in
five shapes, also inside a stream that began with 200. It reads `/v1/completions` and `/v1/chat/completions`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from burstline.servers.messages import WITH_TOKENS, Call, Event, HttpReply, Kind, ReplyContent, Target
from burstline.servers.replies import REASONING, Tally, answers_in, loads, text_of, words_in
from burstline.workloads.request import Request, RequestKind

COMPLETION_LIMIT = "max_completion_tokens"
"""OpenAI's newer name of `max_tokens`, which some chat servers take alone; also a word of `Target.takes`."""
COUNT_EVERY_EVENT = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""Has vLLM and TensorRT-LLM count the tokens of each event; else a usage block comes once, at the end."""
_ANSWER = Kind.ANSWER  # looked up once: members of an enumeration are slow to get


def encode_completion(request: Request, target: Target, *, extra: Mapping[str, object] | None = None) -> Call:
    """The streaming completion call that asks for exactly this request; `extra` is laid over its fields.

    A chat goes to the chat endpoint as it is. Otherwise token ids are sent where the request has them, text
    where it has not. `ignore_eos` is not in OpenAI's own schema and only sent when it is wanted. `min_tokens`
    is never sent: vLLM would then mask the stop tokens of every sequence at every step, and the benchmark
    would slow down what it measures.
    """
    prompt: object = request.prompt_text if request.prompt_ids is None else list(request.prompt_ids)
    if request.kind is RequestKind.EMBED:
        return post(target, "/v1/embeddings", {"model": target.model, "input": prompt})
    if request.kind is RequestKind.RERANK:
        ranked = {"model": target.model, "query": prompt, "documents": list(request.documents)}
        return post(target, "/v1/rerank", ranked)
    path, name = "/v1/completions", "prompt"
    if request.messages is not None:
        path, name, prompt = "/v1/chat/completions", "messages", orjson.Fragment(request.messages)
    fields = fields_of(request, target) | {name: prompt, "stream_options": {"include_usage": True}}
    if request.ignore_eos:
        fields["ignore_eos"] = True
    if request.turn is not None and request.prompt_ids is not None:
        fields["return_token_ids"] = True  # the next turn's prompt goes on with them
    return post(target, path, fields | dict(extra or {}))


def fields_of(request: Request, target: Target) -> dict[str, object]:
    """What a completion and a chat are asked for alike."""
    sampling = request.sampling
    fields: dict[str, object] = {"model": target.model, "max_tokens": request.n_output_tok, "stream": True}
    fields["temperature"] = sampling.temperature
    if sampling.temperature > 0:
        fields |= {"top_p": sampling.top_p, "seed": sampling.seed}
    return fields


def post(target: Target, path: str, fields: Mapping[str, object]) -> Call:
    return Call("POST", path_under(target.url, path), orjson.dumps(fields))


def tokenize_call(text: str, target: Target) -> Call:
    """The request to a server's `/tokenize` for the ids of a text, special ones not added.

    As specified by vLLM (vllm/entrypoints/serve/tokenize/protocol.py) and SGLang.
    """
    return post(target, "/tokenize", {"model": target.model, "prompt": text, "add_special_tokens": False})


def tokens_in(reply: HttpReply) -> list[int] | None:
    """The ids in the answer to a `tokenize_call`; None where the server has none, or none like this."""
    answer = loads(reply.body)
    tokens = answer.get("tokens") if reply.ok and isinstance(answer, dict) else None
    is_ids = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
    return tokens if is_ids else None


def count_in(reply: HttpReply) -> int | None:
    """How many ids the answer to a `tokenize_call` counts; None as for `tokens_in`."""
    answer = loads(reply.body)
    count = answer.get("count") if reply.ok and isinstance(answer, dict) else None
    return count if isinstance(count, int) else None


def path_under(url: str, path: str) -> str:
    """The path to ask for below a base URL. Users give those with and without `/v1`: it is never doubled."""
    return path.removeprefix("/v1") if urlsplit(url).path.rstrip("/").endswith("/v1") else path


def reply_content(reply: HttpReply) -> ReplyContent | None:
    """The text of a whole reply, and its ids where every token came with one; None where it is an error."""
    try:
        answers = answers_in(reply)
    except ValueError:
        return None
    parts = [choice.get("delta") or choice.get("message") or choice for choice in _choices(answers)]
    ids = generated(answers)
    text = "".join(words_in(part.get("content") or part.get("text")) for part in parts)
    return ReplyContent(text, None if isinstance(ids, str) else tuple(ids))


def _choices(answers: Sequence[Any]) -> list[Any]:
    return [answer["choices"][0] for answer in answers if answer.get("choices")]


def generated(answers: Sequence[Any]) -> Sequence[int] | str:
    """All that a whole reply says, reasoning too: token ids where they came, else the text."""
    choices = _choices(answers)
    return [each for choice in choices for each in choice.get("token_ids") or ()] or text_of(choices) or ""


def take(tally: Tally, answer: Any, end: int) -> Event:
    """One value of a completion or a chat.

    An event's `n_tok` is the number of its token ids, else the growth of the usage block where each event
    with text has one that grows, else None. A reply counts as `terminated` by `[DONE]` or by a finish reason.
    """
    if "choices" not in answer and isinstance(answer.get("data") or answer.get("results"), list):
        usage = answer.get("usage") or {}
        tally.n_prompt_tok = usage.get("prompt_tokens") or usage.get("total_tokens")
        tally.finish_reason = "length"
        return Event(end, Kind.ANSWER, 1)
    choices = answer.get("choices")
    choice = choices[0] if choices else None
    usage = answer.get("usage") or (choice or answer.get("x_groq") or answer).get("usage")
    grown = _read_usage(tally, usage) if usage else None
    if choice is None:
        if not usage and choices is None:
            raise KeyError
        return Event(end, Kind.USAGE, None)
    if tally.n_prompt_tok is None and (prompt_ids := choice.get("prompt_token_ids")) is not None:
        tally.n_prompt_tok = len(prompt_ids)
    reason = choice.get("finish_reason") or None  # TGI says "" where others say null
    if reason is not None:
        tally.finish_reason = reason
        tally.terminated = True
    kind = _ANSWER if choice.get("text") else _kind(choice, reason)
    n_tok = None
    if (ids := choice.get("token_ids")) is not None:
        n_tok = len(ids)
        tally.n_output_ids = (tally.n_output_ids or 0) + n_tok
    elif tally.counting is not False:
        n_tok = _growth(tally, kind, grown)
    event = Event(end, kind, n_tok)
    if n_tok and kind not in WITH_TOKENS:
        event.kind = _ANSWER
        tally.silent.append(event)
    if n_tok is None:
        tally.uncounted.append(choice)
        tally.is_all_text &= kind is not Kind.TOOL  # no server shows the text of a call as it was generated
    return event


def _growth(tally: Tally, kind: Kind, grown: int | None) -> int | None:
    """How many tokens an event has by the growth of usage; None where that counts no events.

    Text without growth shows that it counts none: zeros, a total of the whole reply, one that is brought up
    to date now and then. What a role counts belongs to the first text.
    """
    if kind not in WITH_TOKENS:
        is_total = kind is Kind.FINISH and tally.counting is None and grown != 1  # of tokens without text
        if not grown or not (is_total or kind is Kind.ROLE):
            return grown
        tally.early = grown
        return 0
    if grown is not None and grown + tally.early > 0:
        grown, tally.early, tally.counting = grown + tally.early, 0, True
        return grown
    if grown is not None or tally.counting is None:
        tally.counting = False
        for event in tally.events:
            event.n_tok = None
        for event in tally.silent:
            event.kind = Kind.EMPTY
    return None


def _read_usage(tally: Tally, usage: Mapping[str, Any]) -> int | None:
    """Takes over a usage block's totals; how much the output count grew by it."""
    before = tally.n_output_usage or 0
    n_prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    n_output = usage.get("completion_tokens", usage.get("output_tokens"))
    if n_prompt is not None:
        tally.n_prompt_tok = n_prompt
    details = usage.get("prompt_tokens_details")
    if details and details.get("cached_tokens") is not None:
        tally.n_cached_tok = details["cached_tokens"]
    if details := usage.get("completion_tokens_details"):
        tally.n_reasoning_tok = details.get("reasoning_tokens")
    if n_output is None:
        return None
    tally.n_output_usage = n_output
    return int(n_output - before)


_KINDS = {
    "content": Kind.ANSWER, **dict.fromkeys(REASONING, Kind.REASONING), "tool_calls": Kind.TOOL,
    "function_call": Kind.TOOL, "refusal": Kind.ANSWER,
}  # fmt: skip


def _kind(choice: Mapping[str, Any], reason: str | None) -> Kind:
    """The kind of an event by its text alone; text in an unknown field is text, too."""
    delta = choice.get("delta") or choice.get("message") or choice
    for name, kind in _KINDS.items():
        if (value := delta.get(name)) and (name != "reasoning_details" or words_in(value)):
            return kind
    if delta is not choice and words_in(delta):
        return Kind.OTHER
    return Kind.FINISH if reason is not None else Kind.ROLE if delta.get("role") else Kind.EMPTY
