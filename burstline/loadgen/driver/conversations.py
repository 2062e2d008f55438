"""Sessions in progress: each turn's prompt, built from the replies before it, and when the turn is due.

No sockets and no clock: the caller reports that a turn has ended, and gets the turns which that releases.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from burstline.servers.messages import ReplyContent
from burstline.workloads.request import Request

PREDECESSOR: Final = "predecessor"
"""How a turn fails that was never sent because one that it follows had failed."""

NO_IDS: Final = "no_ids"
"""The same where that one's reply has no token ids, with which the turn's prompt would begin."""

Due = tuple[Request, int]


@dataclass(slots=True)
class _Turn:
    """`n_missing` of the turns that it follows have not ended; `end_ns` is when the last other one did."""

    request: Request
    n_missing: int
    followers: list[int] = field(default_factory=list)
    end_ns: int = 0
    reply: ReplyContent | None = None
    done: bool = False
    failed: bool = False


class Conversations:
    """The sessions of one driver; at most `concurrency` of them in progress at a time."""

    def __init__(self, requests: Sequence[Request], due_ns: Sequence[int], concurrency: int | None) -> None:
        self._turns: dict[int, _Turn] = {}
        self._n_left: dict[int, int] = {}
        self._waiting: deque[Due] = deque()
        self._is_closed = concurrency is not None
        self._n_free = concurrency or 0
        for request, at_ns in zip(requests, due_ns, strict=True):
            turn = request.turn
            assert turn is not None
            self._turns[request.index] = _Turn(request, len(turn.after))
            self._n_left[turn.session] = self._n_left.get(turn.session, 0) + 1
            for index in turn.after:
                self._turns[index].followers.append(request.index)
            if not turn.after:
                self._waiting.append((request, at_ns))

    def opening(self) -> Iterator[Due]:
        """Turns that open a session and may be sent: in a closed loop as many as slots are free."""
        while self._waiting and (not self._is_closed or self._n_free):
            self._n_free -= self._is_closed
            yield self._waiting.popleft()

    def is_followed(self, index: int) -> bool:
        """Whether another turn begins with this one's reply."""
        return bool(self._turns[index].followers)

    def ended(self, index: int, end_ns: int, reply: ReplyContent | None) -> tuple[list[Due], list[Due]]:
        """A turn ended at `end_ns`: the turns now due, and those never sent. A failed one has no reply.

        Times count from the run's start. The reply of a turn that is not followed is not needed. A session
        that is over frees its slot for the next.
        """
        due: list[Due] = []
        skipped: list[Due] = []
        over: list[tuple[int, int, ReplyContent | None]] = [(index, end_ns, reply)]
        while over:  # no recursion: a session may have thousands of turns
            index, at_ns, reply = over.pop()
            turn = self._turns[index]
            turn.done, turn.reply, turn.failed = True, reply, reply is None
            self._leave(turn)
            for follower in turn.followers:
                child = self._turns[follower]
                child.n_missing -= 1
                child.end_ns = max(child.end_ns, at_ns)
                child.failed = child.failed or turn.failed
                if child.n_missing:
                    continue
                if child.failed:
                    skipped.append((child.request, child.end_ns))
                    over.append((follower, child.end_ns, None))
                else:
                    pause_ns = child.request.turn.pause_ns if child.request.turn else 0
                    due.append((self._with_context(child), child.end_ns + pause_ns))
        if self._is_closed:
            due += [(request, max(at_ns, end_ns)) for request, at_ns in self.opening()]
        return due, skipped

    def _leave(self, turn: _Turn) -> None:
        place = turn.request.turn
        assert place is not None
        self._n_left[place.session] -= 1
        if self._is_closed and not self._n_left[place.session]:
            self._n_free += 1

    def _with_context(self, turn: _Turn) -> Request:
        """The turn with the whole conversation before it: kept until the next one takes it over."""
        request = turn.request
        assert request.turn is not None
        first, *others = (self._turns[index] for index in request.turn.after)
        request = _joined(first.request, [t.reply for t in (first, *others) if t.reply], request)
        turn.request = request
        for parent in (first, *others):  # once the children have it, nothing else needs a parent's text
            if all(self._turns[k].n_missing == 0 for k in parent.followers):
                parent.reply = None
                parent.request = replace(parent.request, prompt_ids=None, prompt_text=None, messages=None)
        return request

    def sent(self, request: Request) -> None:
        """Keep the prompt as it was sent (salted): later turns begin with it."""
        self._turns[request.index].request = request


def _joined(before: Request, replies: Sequence[ReplyContent], new: Request) -> Request:
    if new.messages is not None:
        replied = [{"role": "assistant", "content": reply.text} for reply in replies]
        messages = [*json.loads(before.messages or "[]"), *replied, *json.loads(new.messages)]
        return replace(new, messages=json.dumps(messages, ensure_ascii=False))
    if new.prompt_ids is None:
        text = "".join([before.prompt_text or "", *(reply.text for reply in replies), "\n"])
        return replace(new, prompt_text=text + (new.prompt_text or ""))
    ids = array("I", before.prompt_ids or ())
    for reply in replies:
        ids.extend(reply.ids or ())
    ids.extend(new.prompt_ids)
    return replace(new, prompt_ids=ids)
