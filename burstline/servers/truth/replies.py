"""The bytes of a reply and when each is due, made before the first is sent.

Every event has a hole of 19 characters where the moment of sending goes: JSON allows blanks after a number,
so the stamp is a plain integer padded on the right and the framing around it never changes. A write is kept
as the pieces around its holes, so that sending it costs one `stamp.join(pieces)`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import accumulate, chain, repeat

import orjson

from burstline.servers.truth.openai import (
    Json,
    Portion,
    Wanted,
    chat_plain,
    chat_role,
    chat_token,
    completion_plain,
    completion_token,
    error,
    usage_event,
)
from burstline.servers.truth.script import Script

STAMP = b"%-19d"
HOLE_NUMBER = 2**63 - 1
HOLE = str(HOLE_NUMBER).encode()


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
            whole = (chat_plain if wanted.chat else completion_plain)(wanted, script, n_tok)
            return plain_reply(200, orjson.dumps(whole), at_ns=end_ns, n_tok=n_tok)
        tokens = track.writes[:n_events]
        if n_events:
            before = track.befores[n_events - 1]
            tokens[-1] = track.event(n_events - 1, Portion(before, n_tok - before, last=True))
        if n_events and (wanted.chat or script.role_s is not None):
            none = Portion(0, 0, last=False)
            empty = chat_role(wanted) if wanted.chat else completion_token(wanted, script, none)
            role = event(stamped(empty, 0), Mark("role"))
            if script.role_s is None:
                tokens[0] = joined([role, tokens[0]])
            else:
                tokens, times_ns = [role, *tokens], [to_ns(script.role_s), *times_ns]
        closing, end = joined([event(b"[DONE]", Mark("done")), _END]), "done"
        if wanted.usage and script.usage_s is not None:
            end_ns += to_ns(script.usage_s)
            usage = event(stamped(usage_event(wanted, n_tok), n_events), Mark("usage"))
            closing = joined([usage, closing])
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
        payload = (chat_token if self.wanted.chat else completion_token)(self.wanted, self.script, portion)
        return event(stamped(payload, i), Mark("token", portion.n))
