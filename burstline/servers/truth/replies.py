"""The known-truth server's replies: when a script sends their tokens, in which words, and their bytes.

The words are those of OpenAI's completions and chats, streamed as vLLM 0.32 streams them (recorded replies,
and its source). The bytes of a reply are made before the first is sent.

Every event has a hole of 19 characters where the moment of sending goes: JSON allows blanks after a number,
so the stamp is a plain integer padded on the right and the framing around it never changes. A write is kept
as the pieces around its holes, so that sending it costs one `stamp.join(pieces)`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import accumulate, chain, repeat
from typing import Any

import orjson

from burstline.workloads.request import WorkloadError

Json = dict[str, Any]
Prompt = Sequence[int] | str
STAMP = b"%-19d"
HOLE_NUMBER = 2**63 - 1
HOLE = str(HOLE_NUMBER).encode()


@dataclass(frozen=True, slots=True)
class Script:
    """One reply. Times are seconds from the arrival of the whole request, gaps from event to event.

    `tok_per_event` is how many tokens each event carries, `n_tok` how many the reply has (None: as many as
    the request asks for), `text` the text of a token. A list that is too short repeats its last value.
    `events_per_write`: so many token events are held back and written at once.
    `status`: other than 200 refuses the request after `headers_s`. `cut_after_tok`: the connection ends amid
    the reply, when the event after so many tokens would be due. `role_s`: an event without text comes so
    soon, instead of with a chat's first token. `usage_s` is how long the usage event comes after the last
    token; None: it never comes.
    """

    headers_s: float = 0.0
    ttft_s: float = 0.2
    gaps_s: tuple[float, ...] = (0.02,)
    tok_per_event: tuple[int, ...] = (1,)
    n_tok: int | None = None
    text: str = " tok"
    events_per_write: int = 1
    status: int = 200
    cut_after_tok: int | None = None
    role_s: float | None = None
    usage_s: float | None = 0.0

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise WorkloadError(f"script: {problem}")

    def problems(self) -> Iterator[str]:
        times_s = self.headers_s, self.ttft_s, *self.gaps_s, self.usage_s or 0.0
        if not all(0 <= time_s < 1e9 for time_s in times_s):
            yield "a time is negative or not finite"
        if self.headers_s > self.ttft_s:
            yield f"headers_s {self.headers_s}, ttft_s {self.ttft_s}: expected to ascend"
        if self.role_s is not None and not self.headers_s <= self.role_s <= self.ttft_s:
            yield f"role_s {self.role_s}: expected to ascend from headers_s to ttft_s"
        if not self.gaps_s or not self.tok_per_event:
            yield "gaps_s and tok_per_event need at least one value"
        if any(n < 1 for n in self.tok_per_event):
            yield "tok_per_event: expected at least 1 token an event"
        if self.n_tok is not None and self.n_tok < 0:
            yield f"n_tok {self.n_tok}: expected 0 or more"
        if not 100 < self.status < 600:
            yield f"status {self.status}: expected an HTTP status"
        if self.events_per_write < 1:
            yield "events_per_write: expected at least 1"

    def served_tok(self, n_asked: int) -> int:
        """How many tokens a request for `n_asked` tokens gets."""
        return n_asked if self.n_tok is None else self.n_tok


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants; with `details`, the ids of the tokens too, with `usage`, their count at last.

    A `chat` has messages.
    """

    model: str
    n_prompt_tok: int
    n_output_tok: int
    details: bool = False
    stream: bool = True
    chat: bool = False
    usage: bool = True


@dataclass(frozen=True, slots=True)
class Portion:
    """The tokens of one event: how many came before it, how many it carries, whether they are the last."""

    before: int
    n: int
    last: bool

    @property
    def after(self) -> int:
        return self.before + self.n

    @property
    def ids(self) -> list[int]:
        return list(range(self.before, self.after))


def n_tok_of(prompt: Any, n_output: Any) -> int:
    """How many tokens a prompt has: as many as ids, or as its text has words. Raises WorkloadError."""
    if not isinstance(prompt, str | list):
        raise WorkloadError(f"the prompt is {prompt!r:.80}; expected a text or a list of token ids")
    if not isinstance(n_output, int) or n_output < 1:
        raise WorkloadError(f"the output length is {n_output!r}; expected a positive number")
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def read(path: str, body: Json, model: str) -> tuple[Wanted, Prompt]:
    """What the body of a completion or a chat asks for, its values checked, and its prompt.

    KeyError where nothing is served at the path.
    """
    chat = {"/v1/completions": False, "/v1/chat/completions": True}[path]
    prompt: Any = text_of(body) if chat else body.get("prompt")
    n_output = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    ids, stream = bool(body.get("return_token_ids")), bool(body.get("stream", False))
    usage = bool((body.get("stream_options") or {}).get("include_usage", False))
    return Wanted(model, n_tok_of(prompt, n_output), n_output, ids, stream, chat, usage), prompt


def text_of(body: Json) -> str:
    """The text of a chat's messages, a line each."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise WorkloadError("no messages; expected a list of role and content")
    contents = [message.get("content") for message in messages]
    parts = [each if isinstance(each, list) else [{"text": each}] for each in contents]
    return "\n".join(str(part.get("text")) for of_one in parts for part in of_one)


def usage_of(wanted: Wanted, n_tok: int) -> Json:
    return {
        "prompt_tokens": wanted.n_prompt_tok,
        "total_tokens": wanted.n_prompt_tok + n_tok,
        "completion_tokens": n_tok,
        "prompt_tokens_details": None,
    }


def error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "scripted_error", "param": None, "code": status}}


def answer(wanted: Wanted, *choices: Json) -> Json:
    """The object around choices, in the words of a chat or of a completion."""
    name, kind = "cmpl", "text_completion"
    if wanted.chat:
        name, kind = "chatcmpl", "chat.completion.chunk" if wanted.stream else "chat.completion"
    names = {"id": f"{name}-truth", "object": kind, "created": 0, "model": wanted.model}
    return {**names, "choices": list(choices)}


def chat_role(wanted: Wanted) -> Json:
    delta = {"role": "assistant", "content": ""}
    return answer(wanted, {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})


def token(wanted: Wanted, script: Script, portion: Portion) -> Json:
    """The event of some tokens; a completion also names what it has nothing to say of."""
    text = script.text * portion.n
    content: Json = {"delta": {"content": text}} if wanted.chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length" if portion.last else None}
    if not wanted.chat:
        choice |= {"stop_reason": None, "prompt_token_ids": None, "token_ids": None}
    if wanted.details:
        choice["token_ids"] = portion.ids
    return answer(wanted, choice)


def plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    text = script.text * n_tok
    content: Json = {"text": text, "logprobs": None}
    if wanted.chat:
        content = {"message": {"role": "assistant", "content": text}}
    whole = answer(wanted, {"index": 0, **content, "finish_reason": "length"})
    return {**whole, "usage": usage_of(wanted, n_tok)}


@dataclass(frozen=True, slots=True)
class Mark:
    """An event whose last byte is in a write: headers, role, token, usage, done or plain, and its tokens."""

    kind: str
    n_tok: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes to hand to the kernel at once: `pieces` around the stamps."""

    pieces: tuple[bytes, ...]
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class TimedReply:
    """One reply: `writes[i]` is due `offsets_ns[i]` after the arrival.

    After the last write comes `end`: "done" (the next request may follow) or "close".
    """

    writes: Sequence[Write]
    offsets_ns: Sequence[int]
    status: int = 200
    end: str = "done"


def to_ns(time_s: float) -> int:
    return round(time_s * 1e9)


def joined(writes: Sequence[Write]) -> Write:
    """One write of several: the last piece of each grows together with the first of the next."""
    pieces = list(writes[0].pieces)
    for write in writes[1:]:
        pieces[-1] += write.pieces[0]
        pieces.extend(write.pieces[1:])
    return Write(tuple(pieces), tuple(mark for write in writes for mark in write.marks))


def head(status: int, *lines: str) -> bytes:
    """The head of a reply with these header lines."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return "\r\n".join((f"HTTP/1.1 {status} {phrase}", *lines, "", "")).encode()


def plain_reply(
    status: int, body: bytes, content_type: str = "application/json", at_ns: int = 0, n_tok: int = 0
) -> TimedReply:
    lines = (f"content-type: {content_type}", f"content-length: {len(body)}")
    return TimedReply((Write((head(status, *lines) + body,), (Mark("plain", n_tok),)),), (at_ns,), status)


_HEAD = ("content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked")
_END = Write((b"0\r\n\r\n",))


def event(data: bytes, mark: Mark) -> Write:
    """A server-sent event in a chunk of its own."""
    block = b"data: %b\n\n" % data
    return Write(tuple((b"%x\r\n%b\r\n" % (len(block), block)).split(HOLE)), (mark,))


def stamped(payload: Json, seq: int) -> bytes:
    """The payload with the hole for its stamp and its number in the reply."""
    return orjson.dumps({**payload, "sent_ns": HOLE_NUMBER, "seq": seq})


def token_offsets_ns(script: Script, n_events: int) -> list[int]:
    """When each event with tokens is due, by the script."""
    gaps_ns = map(to_ns, chain(script.gaps_s, repeat(script.gaps_s[-1])))
    steps_ns = (gap_ns for gap_ns, _ in zip(gaps_ns, range(n_events - 1), strict=False))
    return list(accumulate(steps_ns, initial=to_ns(script.ttft_s)))[:n_events]


class Replies:
    """Makes replies. The token events that replies of one kind share are made once."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[Script, Wanted], _Track] = {}

    def make(self, script: Script, wanted: Wanted, wait_ns: int = 0) -> TimedReply:
        """The reply to one request under a script; its tokens come `wait_ns` later."""
        if script.status != 200:
            refusal = orjson.dumps(error("scripted failure", script.status))
            return plain_reply(script.status, refusal, at_ns=to_ns(script.headers_s))
        n_tok = script.served_tok(wanted.n_output_tok)
        words = replace(script, headers_s=0.0, ttft_s=0.0, gaps_s=(0.0,))
        shape = replace(wanted, n_prompt_tok=0, n_output_tok=0)
        track = self._tracks.setdefault((words, shape), _Track(words, shape))
        n_events = track.grow(n_tok)
        times_ns = [at_ns + wait_ns for at_ns in token_offsets_ns(script, n_events)]
        end_ns = times_ns[-1] if times_ns else to_ns(script.ttft_s)
        if not wanted.stream:
            return plain_reply(200, orjson.dumps(plain(wanted, script, n_tok)), at_ns=end_ns, n_tok=n_tok)
        tokens = track.writes[:n_events]
        if n_events:
            before = track.befores[n_events - 1]
            tokens[-1] = track.event(n_events - 1, Portion(before, n_tok - before, last=True))
        if n_events and (wanted.chat or script.role_s is not None):
            empty = chat_role(wanted) if wanted.chat else token(wanted, script, Portion(0, 0, last=False))
            role = event(stamped(empty, 0), Mark("role"))
            if script.role_s is None:
                tokens[0] = joined([role, tokens[0]])
            else:
                tokens, times_ns = [role, *tokens], [to_ns(script.role_s), *times_ns]
        closing, end = joined([event(b"[DONE]", Mark("done")), _END]), "done"
        if wanted.usage and script.usage_s is not None:
            end_ns += to_ns(script.usage_s)
            usage = {**answer(wanted), "usage": usage_of(wanted, n_tok)}
            closing = joined([event(stamped(usage, n_events), Mark("usage")), closing])
        if script.cut_after_tok is not None and script.cut_after_tok < n_tok:
            n_shown = bisect_right(track.befores, script.cut_after_tok) - 1
            end_ns, closing, end = times_ns[n_shown], Write((b"",)), "close"
            tokens, times_ns = tokens[:n_shown], times_ns[:n_shown]
        k = script.events_per_write
        if k > 1:
            tokens = [joined(tokens[i : i + k]) for i in range(0, len(tokens), k)]
            times_ns = [times_ns[min(i + k, len(times_ns)) - 1] for i in range(0, len(times_ns), k)]
        stream_head = head(200, *_HEAD, f"x-burstline-sent-ns: {HOLE_NUMBER}").split(HOLE)
        writes = [Write(tuple(stream_head), (Mark("headers"),)), *tokens, closing]
        return TimedReply(writes, [to_ns(script.headers_s), *times_ns, end_ns], end=end)


@dataclass(slots=True)
class _Track:
    """The token events that all replies in the same words to one kind of request share, grown as needed.

    Event i carries the tokens befores[i]..befores[i+1].
    """

    script: Script
    wanted: Wanted
    befores: list[int] = field(default_factory=lambda: [0])
    writes: list[Write] = field(default_factory=list)

    def grow(self, n_tok: int) -> int:
        """Have events for `n_tok` tokens; how many of them a reply needs."""
        tok_per_event = self.script.tok_per_event
        while self.befores[-1] < n_tok:
            i, before = len(self.writes), self.befores[-1]
            n = tok_per_event[min(i, len(tok_per_event) - 1)]
            self.writes.append(self.event(i, Portion(before, n, last=False)))
            self.befores.append(before + n)
        return bisect_left(self.befores, n_tok)

    def event(self, i: int, portion: Portion) -> Write:
        return event(stamped(token(self.wanted, self.script, portion), i), Mark("token", portion.n))
