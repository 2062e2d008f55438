"""Conversations: turns that follow each other's live replies, with think times.

What a turn adds, how long its reply is and how long the user thinks are planned; the replies are the server's
own and come into the next prompt as they are. A session is a graph: a turn names the turns that must have
ended before it, so that an agent may fan out into branches and join them.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.data_sets import Item, Materials, as_plain_text
from burstline.workloads.lengths import Lengths
from burstline.workloads.prompts import Stream, Vocabulary
from burstline.workloads.request import Request, Turn, WorkloadError
from burstline.workloads.seeds import rng

NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Sessions in numbers. The first turn brings `prompt_tok` tokens, each later one `turn_tok`.

    Between a reply's end and the next turn the user thinks for `think_ms`.
    """

    turns: Lengths
    prompt_tok: Lengths
    turn_tok: Lengths
    output_tok: Lengths
    think_ms: Lengths

    @property
    def longest_tok(self) -> int:
        """The most tokens that a session may come to."""
        n = self.turns.high
        return self.prompt_tok.high + (n - 1) * self.turn_tok.high + n * self.output_tok.high

    def __str__(self) -> str:
        return f"{self.turns} turns, {self.prompt_tok} + {self.turn_tok} → {self.output_tok} tokens"


def drawn_sessions(
    shape: SessionShape, n: int, vocabulary: Vocabulary, seed: int, max_tok: int | None = None
) -> tuple[tuple[Request, ...], NDArray[np.int64], Counter[str]]:
    """The turns of n synthetic sessions, the session of each, and what was cut off, by reason.

    Turns of one session stand together, each after those that it follows.
    """
    n_turns = shape.turns.draw(n, rng(seed, "turns"))
    sizes = _Sizes.drawn(shape, int(n_turns.sum()), seed)
    stream, requests, dropped = Stream(seed, "prompts"), list[Request](), Counter[str]()
    at = 0
    for session, n_own in enumerate(n_turns.tolist()):
        first, total = len(requests), 0
        for number in range(n_own):
            k, index = at + number, first + number
            n_new = int(sizes.turn_tok[k] if number else sizes.prompt_tok[session % len(sizes.prompt_tok)])
            before = total + requests[-1].n_output_tok if number else 0
            if max_tok is not None and before + n_new + int(sizes.output_tok[k]) > max_tok:
                dropped[f"turns beyond the model's limit of {max_tok:,} tokens"] += n_own - number
                break
            total = before + n_new
            pause_ns = int(sizes.pause_ns[k]) if number else 0
            turn = Turn(session, number, (index - 1,) if number else (), pause_ns)
            ids = array("I", stream.ids(index, n_new, vocabulary).tobytes())
            requests.append(Request(index, ids, None, total, int(sizes.output_tok[k]), turn=turn))
        at += n_own
    _check(requests, max_tok)
    return tuple(requests), _sessions(requests), dropped


def _check(requests: Sequence[Request], max_tok: int | None) -> None:
    if not requests:
        raise WorkloadError(f"no session's first turn fits the model's limit of {max_tok} tokens")


def _sessions(requests: Sequence[Request]) -> NDArray[np.int64]:
    return np.array([r.turn.session for r in requests if r.turn], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Sizes:
    prompt_tok: NDArray[np.int64]
    turn_tok: NDArray[np.int64]
    output_tok: NDArray[np.int64]
    pause_ns: NDArray[np.int64]

    @classmethod
    def drawn(cls, shape: SessionShape, n: int, seed: int) -> _Sizes:
        pause_ms = shape.think_ms.draw(n, rng(seed, "think times"))
        return cls(
            shape.prompt_tok.draw(n, rng(seed, "prompt lengths")),
            shape.turn_tok.draw(n, rng(seed, "turn lengths")),
            shape.output_tok.draw(n, rng(seed, "output lengths")),
            pause_ms * NS_PER_MS,
        )


def written_sessions(
    items: Sequence[Item], materials: Materials, n: int | None, think_ms: Lengths, seed: int
) -> tuple[tuple[Request, ...], NDArray[np.int64], Counter[str]]:
    """Sessions out of rows: those with one `session` are its turns; a chat of several turns is one itself."""
    requests: list[Request] = []
    dropped: Counter[str] = Counter()
    think = rng(seed, "think times")
    session = 0
    for turns in _conversations(items):
        if session == n:
            break
        if materials.template is None and not materials.speaks_chat:
            turns = [as_plain_text(item) for item in turns]
        first, n_context = len(requests), 0
        for number, item in enumerate(turns):
            ids = (
                None
                if item.prompt is None
                else materials.tokenizer.encode(item.prompt, add_special_tokens=number == 0).ids
            )
            n_reply = len(materials.tokenizer.encode(item.reply or "", add_special_tokens=False).ids)
            n_output = item.output_tok or n_reply or int(materials.output_tok.draw(1, think)[0])
            n_context += len(ids or ())
            if materials.max_tok is not None and n_context + n_output > materials.max_tok:
                dropped[f"turns beyond the model's limit of {materials.max_tok:,} tokens"] += (
                    len(turns) - number
                )
                break
            pause_ms = think_ms.draw(1, think)[0] if item.pause_s is None else item.pause_s * 1e3
            after = (first + number - 1,) if number else ()
            turn = Turn(session, number, after, round(pause_ms * NS_PER_MS) if number else 0)
            request = Request(first + number, None, None, n_context, n_output, verbatim=True, turn=turn)
            if ids is None:
                messages = json.dumps(item.messages, ensure_ascii=False)
                request = replace(request, messages=messages, n_prompt_tok=0)
            elif materials.takes_ids:
                request = replace(request, prompt_ids=array("I", ids))
            else:
                request = replace(request, prompt_text=item.prompt)
            requests.append(request)
            n_context += n_output
        session += len(requests) > first
    _check(requests, materials.max_tok)
    return tuple(requests), _sessions(requests), dropped


def _conversations(items: Sequence[Item]) -> Iterator[list[Item]]:
    """The turns of each session, in the order of the rows."""
    grouped: dict[object, list[Item]] = {}
    for item in items:
        grouped.setdefault(item.session if item.session is not None else ("row", item.row), []).append(item)
    for turns in grouped.values():
        yield [turn for item in turns for turn in _turns_of(item)]


def _turns_of(item: Item) -> Iterator[Item]:
    """A chat as one item for each message of its user, with what stands between it and the one before."""
    if not item.messages or item.session is not None:
        yield item
        return
    new: list[Mapping[str, object]] = []
    later = [m["content"] for m in item.messages if m["role"] == "assistant"] + [item.reply]
    replies = iter(later)
    for message in item.messages:
        if message["role"] == "assistant":
            continue
        new.append(message)
        if message["role"] in ("user", "tool"):
            reply = next(replies, None)
            yield replace(item, messages=tuple(new), reply=reply if isinstance(reply, str) else None)
            new = []
