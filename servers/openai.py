"""The OpenAI completions dialect, which most engines speak: one request encoded, one reply decoded.

Tolerant in what it decodes, because the engines differ: `[DONE]` may be missing, usage may stand in the last
content event, in an event without choices, in every event or nowhere, text may be empty, and errors come in
five shapes, also inside a stream that began with 200. It reads `/v1/completions` and `/v1/chat/completions`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from servers import sse
from servers.engine import Call, Event, HttpReply, Kind, Reply, Target
from workloads.request import Request

DONE = b"[DONE]"


def encode_completion(request: Request, target: Target, *, extra: Mapping[str, object] | None = None) -> Call:
    """The streaming completion call that asks for exactly this request; `extra` is laid over its fields.

    Token ids are sent where the request has them, text otherwise. `ignore_eos` is not in OpenAI's own
    schema and only sent when it is wanted. `min_tokens` is never sent: vLLM would then mask the stop
    tokens of every sequence at every step, and the benchmark would slow down what it measures.
    """
    prompt = request.prompt_text if request.prompt_ids is None else list(request.prompt_ids)
    fields: dict[str, object] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": request.n_output_tok,
        "temperature": request.sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.ignore_eos:
        fields["ignore_eos"] = True
    if request.sampling.temperature > 0:
        fields |= {"top_p": request.sampling.top_p, "seed": request.sampling.seed}
    return post(target, "/v1/completions", fields | dict(extra or {}))


def post(target: Target, path: str, fields: Mapping[str, object]) -> Call:
    """A POST of JSON to a path of the server, with the user's key where there is one."""
    headers = [("content-type", "application/json")]
    if target.api_key:
        headers.append(("authorization", f"Bearer {target.api_key}"))
    return Call("POST", path_under(target.url, path), orjson.dumps(fields), tuple(headers))


def path_under(url: str, path: str) -> str:
    """The path to ask for below a base URL. Users give those with and without `/v1`: it is never doubled."""
    has_v1 = urlsplit(url).path.rstrip("/").endswith("/v1")
    return path.removeprefix("/v1") if has_v1 else path


def decode_completion(reply: HttpReply) -> Reply:
    """What the server answered, streamed or plain; never raises.

    An event's `n_tok` is the number of its token ids, else the growth of the usage block where every event
    has one, else None. A reply counts as `terminated` by `[DONE]` or by a finish reason.
    """
    if reply.status != 200:
        return _refusal(reply)
    if _is_stream(reply):
        return _decode_stream(reply.body)
    return _decode_plain(reply.body)


def error_message(answer: object) -> str | None:
    """The server's own words out of any of the error shapes; None where the JSON value is no error."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error
    if error is None and answer.get("object") == "error":
        error = answer.get("message") or answer
    if error is None and "choices" not in answer:
        error = answer.get("detail")
    if error is None:
        return None
    return error if isinstance(error, str) else orjson.dumps(error).decode()


def _is_stream(reply: HttpReply) -> bool:
    if "event-stream" in reply.headers.get("content-type", ""):
        return True
    return reply.body.lstrip().startswith((b"data:", b"event:", b":"))


def _refusal(reply: HttpReply) -> Reply:
    answer = _loads(reply.body)
    said = error_message(answer) or reply.body[:300].decode(errors="replace").strip()
    error = said or f"HTTP {reply.status} without a body"
    return Reply([Event(len(reply.body), Kind.ERROR, None)], error=error)


def _decode_plain(body: bytes) -> Reply:
    answer = _loads(body)
    if not isinstance(answer, dict) or "choices" not in answer:
        error = error_message(answer) or (f"not a completion: {body[:300]!r}" if body else None)
        return Reply([Event(len(body), Kind.ERROR, None)] if error else [], error=error)
    tally = _Tally()
    tally.take(answer, len(body))
    if tally.events and tally.events[0].n_tok is None:
        tally.events[0].n_tok = tally.n_output_usage
    return tally.reply(done=True)


def _decode_stream(body: bytes) -> Reply:
    payloads, ends = sse.events(body)
    done = DONE in payloads
    if done:
        del payloads[payloads.index(DONE) :]
    answers = _loads_all(payloads)
    if answers and isinstance(answers[-1], bytes) and not body.endswith(b"\n"):
        answers.pop()  # cut off in the middle: the wire knows that the reply is not whole
    tally = _Tally()
    for answer, end in zip(answers, ends, strict=False):
        tally.take(answer, end)
    return tally.reply(done=done)


class _Tally:
    """What the events of one reply add up to."""

    __slots__ = (
        "counting",
        "error",
        "events",
        "finish_reason",
        "n_cached",
        "n_ids",
        "n_output_usage",
        "n_prompt",
    )

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.n_prompt: int | None = None
        self.n_ids: int | None = None
        self.n_output_usage: int | None = None
        self.n_cached: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        # Differences of usage count an event's tokens only where usage came with the very first event:
        # a usage block that comes once, at the end, is a total.
        self.counting: bool | None = None

    def take(self, answer: Any, end: int) -> None:
        """Adds one decoded JSON value that ends at offset `end`; one that it cannot read is an error."""
        try:
            self.events.append(self._event(answer, end))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            error = error_message(answer) or f"not an event of a completion: {answer!r:.300}"
            self.error = self.error or error
            self.events.append(Event(end, Kind.ERROR, None))

    def _event(self, answer: Any, end: int) -> Event:
        choices = answer["choices"]
        usage = answer.get("usage")
        grown = self._read_usage(usage) if usage else None
        if not choices:
            if "error" in answer:
                raise ValueError("an error, whatever else it carries")
            return Event(end, Kind.USAGE, None)
        choice = choices[0]
        ids = choice.get("token_ids")
        if self.counting is None:
            self.counting = grown is not None
            self._read_prompt_ids(choice)
        n_tok = grown if self.counting else None
        if ids is not None:
            n_tok = len(ids)
            self.n_ids = (self.n_ids or 0) + n_tok
        reason = choice.get("finish_reason")
        if reason is not None:
            self.finish_reason = reason
        return Event(end, _kind(choice, n_tok, reason), n_tok)

    def _read_usage(self, usage: Mapping[str, Any]) -> int | None:
        """Takes over a usage block's totals; how much the output count grew by it."""
        before = self.n_output_usage or 0
        n_prompt, n_output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if n_prompt is not None:
            self.n_prompt = n_prompt
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens") is not None:
            self.n_cached = details["cached_tokens"]
        if n_output is None:
            return None
        self.n_output_usage = n_output
        return int(n_output - before)

    def _read_prompt_ids(self, choice: Mapping[str, Any]) -> None:
        prompt_ids = choice.get("prompt_token_ids")
        if prompt_ids is not None and self.n_prompt is None:
            self.n_prompt = len(prompt_ids)

    def reply(self, *, done: bool) -> Reply:
        return Reply(
            self.events,
            n_prompt_tok=self.n_prompt,
            n_output_ids=self.n_ids,
            n_output_usage=self.n_output_usage,
            n_cached_tok=self.n_cached,
            finish_reason=self.finish_reason,
            terminated=done or self.finish_reason is not None,
            error=self.error,
        )


def _kind(choice: Mapping[str, Any], n_tok: int | None, reason: str | None) -> Kind:
    """What an event carries. One with text "" may still hold a token whose UTF-8 is not complete yet."""
    delta = choice.get("delta") or choice.get("message") or choice
    text = delta.get("content") if delta is not choice else choice.get("text")
    if text:
        return Kind.ANSWER
    if delta.get("reasoning_content") or delta.get("reasoning"):
        return Kind.REASONING
    if delta.get("tool_calls"):
        return Kind.TOOL
    if n_tok:
        return Kind.ANSWER
    if reason is not None:
        return Kind.FINISH
    if n_tok == 0 or delta.get("role"):
        return Kind.ROLE
    return Kind.ANSWER


def _loads_all(payloads: Sequence[bytes]) -> list[Any]:
    """Every payload as a JSON value: in one go where all are sound, which costs a third, else one by one."""
    answers = _loads(b"[" + b",".join(payloads) + b"]")
    if isinstance(answers, list) and len(answers) == len(payloads):
        return answers
    return [_loads(payload) for payload in payloads]


def _loads(payload: bytes) -> Any:
    """The JSON value, or the bytes themselves where they are none (a stray byte in UTF-8 is forgiven)."""
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        pass
    try:
        return orjson.loads(payload.decode(errors="replace"))
    except orjson.JSONDecodeError:
        return payload
