"""When the tokens of one reply are sent: the script that the known-truth server follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from burstline.workloads.request import WorkloadError


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
