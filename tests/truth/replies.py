"""Replies as a script of the tests has them: paced, cut, failing, and in every dialect."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import orjson

from burstline.servers.truth.replies import (
    Json,
    Mark,
    Portion,
    TimedReply,
    Write,
    joined,
    plain_reply,
    to_ns,
    token_offsets_ns,
)
from tests.truth.dialects import DIALECTS, Wanted
from tests.truth.script import Script
from tests.truth.writes import NOTHING, arranged, data_event, end_of_body, json_event, stream_head

Pace = Callable[[Sequence[int]], Sequence[int]]
"""From a script's own offsets of its token events to the offsets they shall have."""


class ScriptedReplies:
    """Makes replies; what they share is made once."""

    def __init__(self) -> None:
        self._shared: dict[tuple[Script, Wanted], _Track] = {}

    def error(self, dialect: str, status: int, message: str, at_ns: int = 0) -> TimedReply:
        """A refusal in the dialect's words."""
        return plain_reply(status, orjson.dumps(DIALECTS[dialect].error(message, status)), at_ns=at_ns)

    def make(self, script: Script, wanted: Wanted, pace: Pace | None = None) -> TimedReply:
        """The reply to one request under a script; `pace` moves its token events."""
        if script.status != 200:
            return self.error(wanted.dialect, script.status, script.message, to_ns(script.headers_s))
        track = self._track(script, wanted)
        if not wanted.stream:
            return _plain(script, wanted, track, pace)
        writes, offsets_ns, end = _stream(script, wanted, track, pace)
        if script.arranged:
            writes, offsets_ns = arranged(script, writes, offsets_ns)
        return TimedReply(writes, offsets_ns, end=end)

    def refusal_in_stream(self, wanted: Wanted, status: int, message: str) -> TimedReply:
        """A 200 whose stream holds nothing but an error, as TGI refuses."""
        script = Script(ttft_s=0.0, fault="error", message=message, stamp=False)
        writes, _, end = _stream(script, wanted, self._track(script, wanted), None, status)
        return TimedReply(writes, [0] * len(writes), end=end)

    def _track(self, script: Script, wanted: Wanted) -> "_Track":
        in_every_event = DIALECTS[wanted.dialect].counts_prompt or script.usage in (
            "cumulative",
            "lagging",
            "role",
        )
        shape = replace(wanted, n_output_tok=0)
        if not in_every_event:
            shape = Wanted(
                wanted.model, 0, 0, wanted.details, wanted.stream, wanted.chat, dialect=wanted.dialect
            )
        words = _timeless(script)
        return self._shared.setdefault((words, shape), _Track(words, shape))


@dataclass(slots=True)
class _Track:
    """The token events that all replies in the same words to one kind of request share, grown as needed.

    Event i carries the tokens befores[i]..befores[i+1].
    """

    script: Script
    wanted: Wanted
    befores: list[int] = field(default_factory=lambda: [0])
    writes: list[Write] = field(default_factory=list)

    def grow(self, n_tok: int) -> None:
        script = self.script
        while self.befores[-1] < n_tok:
            i, before = len(self.writes), self.befores[-1]
            n = script.tok_per_event[min(i, len(script.tok_per_event) - 1)]
            if before < script.n_reasoning_tok:
                n = min(n, script.n_reasoning_tok - before)
            self.writes.append(self.event(i, Portion(before, n, last=False)))
            self.befores.append(before + n)

    def event(self, i: int, portion: Portion) -> Write:
        payload = DIALECTS[self.wanted.dialect].token(self.wanted, self.script, portion)
        seq = i + _n_roles(self.script, self.wanted)
        return _say(self.script, self.wanted, payload, seq, Mark("token", portion.n))


@lru_cache(maxsize=4096)
def _timeless(script: Script) -> Script:
    """The same words at no particular times: replies that differ in nothing else share their bytes."""
    return replace(
        script,
        headers_s=0.0,
        ttft_s=0.0,
        gaps_s=(0.0,),
        round_gap_s=0.0,
        role_s=None if script.role_s is None else 0.0,
    )


def _token_offsets_ns(script: Script, n_events: int) -> list[int]:
    offsets_ns = token_offsets_ns(script, n_events)
    if script.round_tok is not None and script.round_gap_s:
        extra_ns = to_ns(script.round_gap_s)
        offsets_ns = [at_ns + i // script.round_tok * extra_ns for i, at_ns in enumerate(offsets_ns)]
    return offsets_ns


def _stream(
    script: Script, wanted: Wanted, track: _Track, pace: Pace | None, status: int = 500
) -> tuple[list[Write], list[int], str]:
    """The writes of a streamed reply, one an event, their offsets, and how it ends."""
    n_tok = script.served_tok(wanted.n_output_tok)
    n_fault = min(script.fault_after_tok, n_tok) if script.fault else n_tok
    track.grow(n_tok)
    n_all = bisect_left(track.befores, n_tok)
    n_shown = n_all if n_fault >= n_tok else max(bisect_right(track.befores, n_fault) - 1, 0)
    times_ns = list((pace or list)(_token_offsets_ns(script, n_all)))
    end_ns = times_ns[min(n_shown, n_all - 1)] if times_ns else to_ns(script.ttft_s)

    opening = [(to_ns(script.headers_s), stream_head(script)), *_role(script, wanted)]
    writes = [write for _, write in opening] + track.writes[:n_shown]
    offsets_ns = [at_ns for at_ns, _ in opening] + times_ns[:n_shown]
    if n_shown and n_shown == n_all:
        before = track.befores[n_all - 1]
        last = Portion(before, n_tok - before, last=True)
        writes[-1] = replace(track, wanted=wanted).event(n_all - 1, last)
    if script.fault in (None, "error"):
        seq = n_shown + _n_roles(script, wanted)
        closing = _closing(script, wanted, n_tok, seq)
        if script.fault:
            closing = _error(script, wanted, seq, status)
        return [*writes, closing], [*offsets_ns, end_ns], "done" if script.chunked else "close"
    if script.fault_after_tok < 0:
        return [NOTHING], [to_ns(script.headers_s)], script.fault
    return [*writes, NOTHING], [*offsets_ns, end_ns], script.fault


def _n_roles(script: Script, wanted: Wanted) -> int:
    return int(script.role_s is not None and DIALECTS[wanted.dialect].role is not None)


def _role(script: Script, wanted: Wanted) -> list[tuple[int, Write]]:
    make = DIALECTS[wanted.dialect].role
    if script.role_s is None or make is None:
        return []
    payload, usage = make(wanted), DIALECTS[wanted.dialect].usage
    if script.usage == "role" and usage:
        payload |= {"usage": usage(wanted, 1)["usage"]}
    return [(to_ns(script.role_s), _say(script, wanted, payload, 0, Mark("role")))]


def _closing(script: Script, wanted: Wanted, n_tok: int, seq: int) -> Write:
    """The usage event, `[DONE]` and the end of the body, as far as there are any, in one write."""
    usage = DIALECTS[wanted.dialect].usage
    parts = _end(script, wanted)
    if script.usage in ("final", "gateway", "bare") and usage:
        payload = usage(wanted, n_tok)
        if script.usage == "gateway":
            payload["x_groq"] = {"usage": payload.pop("usage")}
        if script.usage == "bare":
            del payload["choices"]
        parts.insert(0, _say(script, wanted, payload, seq, Mark("usage")))
    return joined(parts)


def _error(script: Script, wanted: Wanted, seq: int, status: int) -> Write:
    payload = DIALECTS[wanted.dialect].error(script.message, status)
    return joined([_say(script, wanted, payload, seq, Mark("error")), *_end(script, wanted)])


def _end(script: Script, wanted: Wanted) -> list[Write]:
    dialect = DIALECTS[wanted.dialect]
    done = [data_event(script, b"[DONE]", Mark("done"), space=dialect.space)] if dialect.done else []
    return [*done, end_of_body(script)]


def _say(script: Script, wanted: Wanted, payload: Json, seq: int, mark: Mark) -> Write:
    return json_event(script, payload, seq, mark, space=DIALECTS[wanted.dialect].space)


def _plain(script: Script, wanted: Wanted, track: _Track, pace: Pace | None) -> TimedReply:
    """The whole reply at the moment its last token would have been streamed."""
    n_tok = script.served_tok(wanted.n_output_tok)
    track.grow(n_tok)
    times_ns = (pace or list)(_token_offsets_ns(script, bisect_left(track.befores, n_tok)))
    body = orjson.dumps(DIALECTS[wanted.dialect].plain(wanted, script, n_tok))
    return plain_reply(200, body, at_ns=times_ns[-1] if times_ns else to_ns(script.ttft_s), n_tok=n_tok)
