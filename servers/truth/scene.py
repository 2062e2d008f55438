"""Scenes: the bytes of a reply and when each is due, made before the first is sent.

Every event has a hole of 19 characters where the moment of sending goes: JSON allows blanks after a number,
so the stamp is a plain integer padded on the right and the framing around it never changes. A write is kept
as the pieces around its holes, so that sending it costs one `stamp.join(pieces)`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import accumulate

import orjson

from servers.truth.ask import Ask, Json, Portion
from servers.truth.dialects import DIALECTS, Dialect
from servers.truth.script import Script

STAMP = b"%-19d"
_HOLE_NUMBER = 2**63 - 1
_HOLE = str(_HOLE_NUMBER).encode()

Pace = Callable[[Sequence[int]], Sequence[int]]
"""From a script's own offsets of its token events to the offsets they shall have."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event whose last byte is in a write: headers, role, token, usage, done, error, comment or plain."""

    kind: str
    n_tok: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes to hand to the kernel at once: `pieces` around the stamps, or the part of them that `cut` names.

    `fresh` is False for a later part of a cut write: it keeps the stamp that its first part took.
    """

    pieces: tuple[bytes, ...]
    marks: tuple[Mark, ...] = ()
    cut: tuple[int, int | None] | None = None
    fresh: bool = True


_NOTHING = Write((b"",))
"""Gives the end of a reply a due time of its own."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One reply: `writes[i]` is due `offsets_ns[i]` after the arrival; then comes `end`.

    `end` is "done" (the next request may follow), "close", "half_close", "reset" or "stall".
    """

    writes: Sequence[Write]
    offsets_ns: Sequence[int]
    end: str = "done"
    status: int = 200


def plain_reply(status: int, body: bytes, content_type: str = "application/json", at_ns: int = 0) -> Scene:
    """A whole reply with its length, at once."""
    head = _head(status, (f"content-type: {content_type}", f"content-length: {len(body)}"))
    return Scene((Write((head + body,), (Mark("plain"),)),), (at_ns,), status=status)


def error_reply(dialect: str, status: int, message: str, at_ns: int = 0) -> Scene:
    """A refusal in the dialect's words."""
    return plain_reply(status, orjson.dumps(DIALECTS[dialect].error(message, status)), at_ns=at_ns)


@dataclass(slots=True)
class Scenes:
    """Makes scenes; what replies share is made once."""

    _tracks: dict[tuple[Script, Ask], "_Track"] = field(default_factory=dict)

    def make(self, script: Script, ask: Ask, pace: Pace | None = None) -> Scene:
        """The scene of one request under a script; `pace` moves its token events."""
        if script.status != 200:
            return error_reply(ask.dialect, script.status, script.message, _ns(script.headers_s))
        track = self._track(script, ask)
        if not ask.stream:
            return _plain_scene(script, ask, track, pace)
        writes, offsets_ns, end = _stream(script, ask, track, pace)
        if script.arranged:
            writes, offsets_ns = _arranged(script, writes, offsets_ns)
        return Scene(writes, offsets_ns, end)

    def refusal_in_stream(self, ask: Ask, status: int, message: str) -> Scene:
        """A 200 whose stream holds nothing but an error, as TGI refuses."""
        script = Script(ttft_s=0.0, fault="error", message=message, stamp=False)
        writes, _, end = _stream(script, ask, self._track(script, ask), None, status)
        return Scene(writes, [0] * len(writes), end)

    def _track(self, script: Script, ask: Ask) -> "_Track":
        in_every_event = DIALECTS[ask.dialect].counts_prompt or script.usage in ("cumulative", "lagging")
        shape = replace(ask, n_output_tok=0)
        if not in_every_event:
            shape = replace(shape, n_prompt_tok=0, n_cached_tok=None)
        track = self._tracks.get((script, shape))
        if track is None:
            track = self._tracks[script, shape] = _Track(script, replace(ask, n_output_tok=0))
        return track


@dataclass(slots=True)
class _Track:
    """The token events that all replies of one script and one kind of request share, grown as needed.

    Event i carries the tokens befores[i]..befores[i+1].
    """

    script: Script
    ask: Ask
    befores: list[int] = field(default_factory=lambda: [0])
    writes: list[Write] = field(default_factory=list)
    offsets_ns: list[int] = field(default_factory=list)

    def grow(self, n_tok: int) -> None:
        script = self.script
        while self.befores[-1] < n_tok:
            i, before = len(self.writes), self.befores[-1]
            n = script.tok_per_event[min(i, len(script.tok_per_event) - 1)]
            if before < script.n_reasoning_tok:
                n = min(n, script.n_reasoning_tok - before)
            gap_s = script.gaps_s[min(i, len(script.gaps_s)) - 1] if i else script.ttft_s
            self.offsets_ns.append((self.offsets_ns[-1] if i else 0) + _ns(gap_s))
            self.writes.append(self.event(i, Portion(before, n, last=False)))
            self.befores.append(before + n)

    def event(self, i: int, portion: Portion) -> Write:
        payload = DIALECTS[self.ask.dialect].token(self.ask, self.script, portion)
        seq = i + (self.script.role_s is not None)
        return _event(self.script, self.ask, payload, seq, Mark("token", portion.n))


def _stream(
    script: Script, ask: Ask, track: _Track, pace: Pace | None, status: int = 500
) -> tuple[list[Write], list[int], str]:
    """The writes of a streamed reply, one an event, their offsets, and how it ends."""
    n_tok = ask.n_output_tok if script.n_tok is None else script.n_tok
    n_fault = min(script.fault_after_tok, n_tok) if script.fault else n_tok
    track.grow(n_tok)
    n_all = bisect_left(track.befores, n_tok)
    n_shown = n_all if n_fault >= n_tok else max(bisect_right(track.befores, n_fault) - 1, 0)
    times_ns = list((pace or list)(track.offsets_ns[:n_all]))
    end_ns = times_ns[min(n_shown, n_all - 1)] if times_ns else _ns(script.ttft_s)

    opening = [(_ns(script.headers_s), _stream_head(script)), *_role(script, ask)]
    writes = [write for _, write in opening] + track.writes[:n_shown]
    offsets_ns = [at_ns for at_ns, _ in opening] + times_ns[:n_shown]
    if n_shown and n_shown == n_all:
        before = track.befores[n_all - 1]
        own = replace(track, ask=ask)
        writes[-1] = own.event(n_all - 1, Portion(before, n_tok - before, last=True))
    if script.fault not in (None, "error"):
        if script.fault_after_tok < 0:
            return [_NOTHING], [_ns(script.headers_s)], script.fault or "done"
        return [*writes, _NOTHING], [*offsets_ns, end_ns], script.fault or "done"
    seq = n_shown + (script.role_s is not None)
    closing = _error(script, ask, seq, status) if script.fault else _closing(script, ask, n_tok, seq)
    end = "done" if script.chunked else "close"
    return writes + closing, offsets_ns + [end_ns] * len(closing), end


def _role(script: Script, ask: Ask) -> list[tuple[int, Write]]:
    make = DIALECTS[ask.dialect].role
    if script.role_s is None or make is None:
        return []
    return [(_ns(script.role_s), _event(script, ask, make(ask), 0, Mark("role")))]


def _closing(script: Script, ask: Ask, n_tok: int, seq: int) -> list[Write]:
    """The last write: the usage event, `[DONE]` and the end of the body, as far as there are any."""
    dialect = DIALECTS[ask.dialect]
    parts: list[Write] = []
    if script.usage == "final" and dialect.usage:
        parts.append(_event(script, ask, dialect.usage(ask, script, n_tok), seq, Mark("usage")))
    return [_joined([*parts, *_end_of_stream(script, dialect)])]


def _error(script: Script, ask: Ask, seq: int, status: int) -> list[Write]:
    dialect = DIALECTS[ask.dialect]
    event = _event(script, ask, dialect.error(script.message, status), seq, Mark("error"))
    return [_joined([event, *_end_of_stream(script, dialect)])]


def _end_of_stream(script: Script, dialect: Dialect) -> list[Write]:
    parts: list[Write] = []
    if dialect.done:
        parts.append(Write((_framed(script, _data(script, dialect, b"[DONE]")),), (Mark("done"),)))
    if script.chunked:
        parts.append(Write((b"0\r\n\r\n",)))
    return parts or [_NOTHING]


def _plain_scene(script: Script, ask: Ask, track: _Track, pace: Pace | None) -> Scene:
    """The whole reply at the moment its last token would have been streamed."""
    n_tok = ask.n_output_tok if script.n_tok is None else script.n_tok
    track.grow(n_tok)
    times_ns = (pace or list)(track.offsets_ns[: bisect_left(track.befores, n_tok)])
    body = orjson.dumps(DIALECTS[ask.dialect].plain(ask, script, n_tok))
    whole = plain_reply(200, body, at_ns=times_ns[-1] if times_ns else _ns(script.ttft_s))
    return replace(whole, writes=(replace(whole.writes[0], marks=(Mark("plain", n_tok),)),))


def _event(script: Script, ask: Ask, payload: Json, seq: int, mark: Mark) -> Write:
    if script.stamp:
        payload = payload | {"sent_ns": _HOLE_NUMBER, "seq": seq}
    framed = _framed(script, _data(script, DIALECTS[ask.dialect], orjson.dumps(payload)))
    return Write(tuple(framed.split(_HOLE)), (mark,))


def _data(script: Script, dialect: Dialect, data: bytes) -> bytes:
    space = dialect.space if script.space is None else script.space
    return (b"data: " if space else b"data:") + data + _blank_line(script)


def _blank_line(script: Script) -> bytes:
    return b"\r\n\r\n" if script.crlf else b"\n\n"


def _framed(script: Script, data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if script.chunked else data


def _stream_head(script: Script) -> Write:
    coding = "transfer-encoding: chunked" if script.chunked else "connection: close"
    lines = ["content-type: text/event-stream; charset=utf-8", coding]
    if script.stamp:
        lines.append(f"x-burstline-sent-ns: {_HOLE_NUMBER}")
    return Write(tuple(_head(200, lines).split(_HOLE)), (Mark("headers"),))


def _head(status: int, lines: Sequence[str]) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return "\r\n".join((f"HTTP/1.1 {status} {phrase}", *lines, "", "")).encode()


def _arranged(script: Script, writes: list[Write], offsets_ns: list[int]) -> tuple[list[Write], list[int]]:
    """The same bytes with comments put in, events held back to share a write, and writes cut into parts."""
    timed = list(zip(offsets_ns, writes, strict=True))
    timed = _held_back(script, timed)
    comment = Write((_framed(script, b": keep-alive" + _blank_line(script)),), (Mark("comment"),))
    headers_ns = _ns(script.headers_s)
    comments = [
        (_ns(at_s), comment) for at_s in script.comments_s if headers_ns <= _ns(at_s) <= offsets_ns[-1]
    ]
    # Sorted by time alone: of equal times the headers stay first and the end of the reply last.
    timed = sorted([*timed[:1], *comments, *timed[1:]], key=lambda row: row[0])
    parts = [part for row in timed for part in _cut(script, *row)]
    return [write for _, write in parts], list(accumulate((at_ns for at_ns, _ in parts), max))


def _held_back(script: Script, timed: list[tuple[int, Write]]) -> list[tuple[int, Write]]:
    out: list[tuple[int, Write]] = []
    held: list[tuple[int, Write]] = []
    for row in timed:
        is_token = any(mark.kind == "token" for mark in row[1].marks)
        if is_token:
            held.append(row)
        if held and (not is_token or len(held) == script.events_per_write):
            out.append((held[-1][0], _joined([write for _, write in held])))
            held = []
        if not is_token:
            out.append(row)
    return out


def _cut(script: Script, at_ns: int, write: Write) -> list[tuple[int, Write]]:
    n_bytes = sum(map(len, write.pieces)) + len(_HOLE) * (len(write.pieces) - 1)
    is_head = any(mark.kind == "headers" for mark in write.marks)
    at = {offset % n_bytes for offset in script.split_at if abs(offset) < n_bytes and not is_head}
    if script.drip_bytes:
        at |= set(range(0, n_bytes, script.drip_bytes))
    borders = sorted({0, *at})
    if len(borders) == 1:
        return [(at_ns, write)]
    gap_ns = _ns(script.split_gap_s)
    ends: list[int | None] = [*borders[1:], None]
    return [
        (
            at_ns + i * gap_ns,
            Write(write.pieces, write.marks if end is None else (), (begin, end), fresh=i == 0),
        )
        for i, (begin, end) in enumerate(zip(borders, ends, strict=True))
    ]


def _joined(writes: Sequence[Write]) -> Write:
    """One write of several: the last piece of each grows together with the first of the next."""
    pieces = list(writes[0].pieces)
    for write in writes[1:]:
        pieces[-1] += write.pieces[0]
        pieces.extend(write.pieces[1:])
    return Write(tuple(pieces), tuple(mark for write in writes for mark in write.marks))


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
