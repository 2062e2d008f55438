"""Scenes: the bytes of a reply and when each is due, made before the first is sent."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

import orjson

from servers.truth.dialects import DIALECTS, Ask, Json, Portion
from servers.truth.script import Script
from servers.truth.writes import (
    NOTHING,
    Mark,
    Write,
    arranged,
    data_event,
    end_of_body,
    head,
    joined,
    json_event,
    stream_head,
    to_ns,
)

Pace = Callable[[Sequence[int]], Sequence[int]]
"""From a script's own offsets of its token events to the offsets they shall have."""


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
    lines = (f"content-type: {content_type}", f"content-length: {len(body)}")
    return Scene((Write((head(status, lines) + body,), (Mark("plain"),)),), (at_ns,), status=status)


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
            return error_reply(ask.dialect, script.status, script.message, to_ns(script.headers_s))
        track = self._track(script, ask)
        if not ask.stream:
            return _plain_scene(script, ask, track, pace)
        writes, offsets_ns, end = _stream(script, ask, track, pace)
        if script.arranged:
            writes, offsets_ns = arranged(script, writes, offsets_ns)
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
        words = _timeless(script)
        track = self._tracks.get((words, shape))
        if track is None:
            track = self._tracks[words, shape] = _Track(words, replace(ask, n_output_tok=0))
        return track


@dataclass(slots=True)
class _Track:
    """The token events that all replies in the same words to one kind of request share, grown as needed.

    Event i carries the tokens befores[i]..befores[i+1].
    """

    script: Script
    ask: Ask
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
        payload = DIALECTS[self.ask.dialect].token(self.ask, self.script, portion)
        return _say(
            self.script, self.ask, payload, i + _n_roles(self.script, self.ask), Mark("token", portion.n)
        )


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
    gaps_ns = [to_ns(gap_s) for gap_s in script.gaps_s[: max(n_events - 1, 0)]]
    gaps_ns += [to_ns(script.gaps_s[-1])] * (n_events - 1 - len(gaps_ns))
    if script.round_tok is not None and script.round_gap_s:
        for i in range(script.round_tok - 1, len(gaps_ns), script.round_tok):
            gaps_ns[i] += to_ns(script.round_gap_s)
    return list(accumulate(gaps_ns, initial=to_ns(script.ttft_s)))[:n_events]


def _stream(
    script: Script, ask: Ask, track: _Track, pace: Pace | None, status: int = 500
) -> tuple[list[Write], list[int], str]:
    """The writes of a streamed reply, one an event, their offsets, and how it ends."""
    n_tok = script.served_tok(ask.n_output_tok)
    n_fault = min(script.fault_after_tok, n_tok) if script.fault else n_tok
    track.grow(n_tok)
    n_all = bisect_left(track.befores, n_tok)
    n_shown = n_all if n_fault >= n_tok else max(bisect_right(track.befores, n_fault) - 1, 0)
    times_ns = list((pace or list)(_token_offsets_ns(script, n_all)))
    end_ns = times_ns[min(n_shown, n_all - 1)] if times_ns else to_ns(script.ttft_s)

    opening = [(to_ns(script.headers_s), stream_head(script)), *_role(script, ask)]
    writes = [write for _, write in opening] + track.writes[:n_shown]
    offsets_ns = [at_ns for at_ns, _ in opening] + times_ns[:n_shown]
    if n_shown and n_shown == n_all:
        before = track.befores[n_all - 1]
        writes[-1] = replace(track, ask=ask).event(n_all - 1, Portion(before, n_tok - before, last=True))
    if script.fault in (None, "error"):
        seq = n_shown + _n_roles(script, ask)
        closing = _error(script, ask, seq, status) if script.fault else _closing(script, ask, n_tok, seq)
        return [*writes, closing], [*offsets_ns, end_ns], "done" if script.chunked else "close"
    if script.fault_after_tok < 0:
        return [NOTHING], [to_ns(script.headers_s)], script.fault
    return [*writes, NOTHING], [*offsets_ns, end_ns], script.fault


def _n_roles(script: Script, ask: Ask) -> int:
    return int(script.role_s is not None and DIALECTS[ask.dialect].role is not None)


def _role(script: Script, ask: Ask) -> list[tuple[int, Write]]:
    make = DIALECTS[ask.dialect].role
    if script.role_s is None or make is None:
        return []
    return [(to_ns(script.role_s), _say(script, ask, make(ask), 0, Mark("role")))]


def _closing(script: Script, ask: Ask, n_tok: int, seq: int) -> Write:
    """The usage event, `[DONE]` and the end of the body, as far as there are any, in one write."""
    usage = DIALECTS[ask.dialect].usage
    parts = _end(script, ask)
    if script.usage == "final" and usage:
        parts.insert(0, _say(script, ask, usage(ask, script, n_tok), seq, Mark("usage")))
    return joined(parts)


def _error(script: Script, ask: Ask, seq: int, status: int) -> Write:
    payload = DIALECTS[ask.dialect].error(script.message, status)
    return joined([_say(script, ask, payload, seq, Mark("error")), *_end(script, ask)])


def _end(script: Script, ask: Ask) -> list[Write]:
    dialect = DIALECTS[ask.dialect]
    done = [data_event(script, b"[DONE]", Mark("done"), space=dialect.space)] if dialect.done else []
    return [*done, end_of_body(script)]


def _say(script: Script, ask: Ask, payload: Json, seq: int, mark: Mark) -> Write:
    return json_event(script, payload, seq, mark, space=DIALECTS[ask.dialect].space)


def _plain_scene(script: Script, ask: Ask, track: _Track, pace: Pace | None) -> Scene:
    """The whole reply at the moment its last token would have been streamed."""
    n_tok = script.served_tok(ask.n_output_tok)
    track.grow(n_tok)
    times_ns = (pace or list)(_token_offsets_ns(script, bisect_left(track.befores, n_tok)))
    body = orjson.dumps(DIALECTS[ask.dialect].plain(ask, script, n_tok))
    whole = plain_reply(200, body, at_ns=times_ns[-1] if times_ns else to_ns(script.ttft_s))
    return replace(whole, writes=(replace(whole.writes[0], marks=(Mark("plain", n_tok),)),))
