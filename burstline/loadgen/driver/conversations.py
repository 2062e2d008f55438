"""Sessions in progress: each turn's prompt, built from the replies before it, and when the turn is due.

No sockets and no clock: the caller reports that a turn has ended, and gets the turns which that releases.
"""

import json
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from burstline.servers.messages import ReplyContent
from burstline.workloads.request import Request

PREDECESSOR: Final = "predecessor"
"""How a turn fails that was never sent because one that it follows had failed."""

NO_IDS: Final = "no_ids"
"""The same where that one's reply has no token ids, with which the turn's prompt would begin."""

Due = tuple[Request, int]


class Conversations:
    """The sessions of one driver; at most `concurrency` of them in progress at a time."""

    def __init__(self, requests: Sequence[Request], due_ns: Sequence[int], concurrency: int | None) -> None:
        self._requests = {request.index: request for request in requests}  # of turns that have not ended
        self._follower: dict[int, int] = {}
        self._waiting: deque[Due] = deque()
        self._is_closed = concurrency is not None
        self._n_free = concurrency or 0
        for request, at_ns in zip(requests, due_ns, strict=True):
            if request.turn is not None and request.turn.after:
                self._follower[request.turn.after[0]] = request.index
            else:
                self._waiting.append((request, at_ns))

    def opening(self) -> Iterator[Due]:
        """Turns that open a session and may be sent: in a closed loop as many as slots are free."""
        while self._waiting and (not self._is_closed or self._n_free):
            self._n_free -= self._is_closed
            yield self._waiting.popleft()

    def is_followed(self, index: int) -> bool:
        """Whether another turn begins with this one's reply."""
        return index in self._follower

    def ended(self, index: int, end_ns: int, reply: ReplyContent | None) -> tuple[list[Due], list[Due]]:
        """A turn ended at `end_ns`: the turns now due, and those never sent. A failed one has no reply.

        Times count from the run's start. The reply of a turn that is not followed is not needed. A session
        that is over frees its slot for the next.
        """
        due: list[Due] = []
        skipped: list[Due] = []
        before, following = self._requests.pop(index), self._follower.get(index)
        if following is not None and reply is not None:
            new = self._requests[following] = _joined(before, reply, self._requests[following])
            due.append((new, end_ns + (new.turn.pause_ns if new.turn else 0)))
        else:
            self._n_free += self._is_closed
            while following is not None:
                skipped.append((self._requests.pop(following), end_ns))
                following = self._follower.get(following)
        if self._is_closed:
            due += [(request, max(at_ns, end_ns)) for request, at_ns in self.opening()]
        return due, skipped

    def sent(self, request: Request) -> None:
        """Keep the prompt as it was sent (salted): the next turn begins with it."""
        self._requests[request.index] = request


def _joined(before: Request, reply: ReplyContent, new: Request) -> Request:
    """The new turn with the whole conversation before it."""
    if new.messages is not None:
        replied = {"role": "assistant", "content": reply.text}
        messages = [*json.loads(before.messages or "[]"), replied, *json.loads(new.messages)]
        return replace(new, messages=json.dumps(messages, ensure_ascii=False))
    if new.prompt_ids is None:
        return replace(new, prompt_text=f"{before.prompt_text or ''}{reply.text}\n{new.prompt_text or ''}")
    ids = array("I", before.prompt_ids or ())
    ids.extend(reply.ids or ())
    ids.extend(new.prompt_ids)
    return replace(new, prompt_ids=ids)
