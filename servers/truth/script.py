"""When the tokens of one reply are sent: the script that the known-truth server follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TypeVar

import orjson

from burstline.workloads.request import WorkloadError


@dataclass(frozen=True, slots=True)
class Script:
    """One reply. Times are seconds from the arrival of the whole request, gaps from event to event.

    `tok_per_event` is how many tokens each event carries, `n_tok` how many the reply has (None: as many as
    the request asks for), `text` the text of a token. A list that is too short repeats its last value.
    """

    headers_s: float = 0.0
    ttft_s: float = 0.2
    gaps_s: tuple[float, ...] = (0.02,)
    tok_per_event: tuple[int, ...] = (1,)
    n_tok: int | None = None
    text: str = " tok"

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise WorkloadError(f"script: {problem}")

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        if not all(0 <= time_s < 1e9 for time_s in (self.headers_s, self.ttft_s, *self.gaps_s)):
            yield "a time is negative or not finite"
        if self.headers_s > self.ttft_s:
            yield f"headers_s {self.headers_s}, ttft_s {self.ttft_s}: expected to ascend"
        if not self.gaps_s or not self.tok_per_event:
            yield "gaps_s and tok_per_event need at least one value"
        if any(n < 1 for n in self.tok_per_event):
            yield "tok_per_event: expected at least 1 token an event"
        if self.n_tok is not None and self.n_tok < 0:
            yield f"n_tok {self.n_tok}: expected 0 or more"

    def served_tok(self, n_asked: int) -> int:
        """How many tokens a request for `n_asked` tokens gets."""
        return n_asked if self.n_tok is None else self.n_tok


S = TypeVar("S", bound=Script)


def script_from(given: object, default: S) -> S:
    """The script that a JSON object describes, laid over `default`; a single number may stand for a list."""
    if not isinstance(given, dict):
        raise WorkloadError(f"script: expected a JSON object, not {given!r:.100}")
    values = {row.name: getattr(default, row.name) for row in fields(default)}
    for name, value in given.items():
        if name not in values:
            raise WorkloadError(f"script: no field {name!r}; there are {', '.join(values)}")
        if isinstance(values[name], tuple):
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
        values[name] = value
    try:
        return type(default)(**values)
    except TypeError as error:
        raise WorkloadError(f"script: a value has the wrong type: {error}") from None


@lru_cache(maxsize=4096)
def script_from_header(text: bytes, default: Script) -> Script:
    """The script in a request's `x-burstline-script` header, over the one it would get without."""
    return script_from(_json(text), default)


def scripts_from_json(text: bytes, default: S) -> tuple[S, ...]:
    """The scripts of a file: one JSON object for all requests, or a list in the order of arrival.

    The last of a list serves every later request.
    """
    given = _json(text)
    rows = given if isinstance(given, list) else [given]
    if not rows:
        raise WorkloadError("script: expected a JSON object, or a list of them")
    return tuple(script_from(row, default) for row in rows)


def _json(text: bytes) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"script: not JSON: {error}") from None
