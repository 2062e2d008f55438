"""All that one reply of the tests' server can do: the product's script, failures, framing and usage."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import orjson

import burstline.servers.truth.replies as product
from burstline.workloads.request import WorkloadError

USAGE = (
    "final", "last", "cumulative", "lagging", "null", "off", "zeros", "prompt", "choice", "stale", "role",
    "gateway", "bare",
)  # fmt: skip
FAULTS = ("error", "stall", "half_close", "close", "reset")


@dataclass(frozen=True, slots=True)
class Script(product.Script):
    """The product's script, and what only tests need. Times are seconds from the arrival of the request.

    - `role_s`: when an event without tokens (chat: the role) is sent; None: there is none.
    - `n_reasoning_tok`: how many tokens, from the first, are reasoning (chat only).
    - `usage`: where the count stands. "final": in an event of its own; "last": in the last token's event;
      "cumulative": in every event; "lagging": in every event, one event behind but for the last; "null": the
      key is there and empty; "off": nowhere; "zeros", "prompt": in every event, of no tokens or of the prompt
      alone but for the last; "choice": in the last event's choice; "stale": as of every third token;
      "role": in every event, and the role counts the first token; "gateway", "bare": in an event of its own,
      in `x_groq` or without `choices`.
    - `opens`: the status of a stream that begins well.
    - `field`: the field of a chat's delta in which the text stands.
    - `finish`: the finish reason, None: none is ever given.
    - `round_tok`: the server generates whole rounds of so many tokens where more than one round is asked for
      (TGI: 1,024), and before each further round the request waits `round_gap_s` longer.
    - `swapped`: the token at this place is another one than it ought to be; None: none is.
    Failures:
    - `message` is what errors say.
    - `fault`, when the event after `fault_after_tok` tokens would be due (-1: before the headers): "error"
      sends an error inside the stream and ends it, "stall" never sends again, "half_close" ends only our
      direction, "close" ends the connection amid the reply, "reset" does so with RST.
    Framing:
    - `comments_s`: when keep-alives are sent; `beat`: what one is, a comment or another event; `crlf`,
      `space`: CR LF line ends, `data: ` with a space (None: as the dialect has it); `chunked`: chunked
      coding, else the reply ends with the connection.
    - `split_at`: offsets at which each event's bytes are cut, negative from its end; `drip_bytes`: everything
      is sent so many bytes at a time (slow loris), 0: not; `split_gap_s`: the time between the parts.
    - `stamp`: every event carries `sent_ns` and `seq`; without it the bytes are the engine's own.
    """

    role_s: float | None = None
    n_reasoning_tok: int = 0
    usage: str = "final"
    opens: int = 200
    field: str = "content"
    finish: str | None = "length"
    swapped: int | None = None
    message: str = "scripted failure"
    fault: str | None = None
    fault_after_tok: int = 0
    comments_s: tuple[float, ...] = ()
    beat: str = ": keep-alive"
    crlf: bool = False
    space: bool | None = None
    chunked: bool = True
    split_at: tuple[int, ...] = ()
    drip_bytes: int = 0
    split_gap_s: float = 0.0005
    stamp: bool = True
    round_tok: int | None = None
    round_gap_s: float = 0.0

    def problems(self) -> Iterator[str]:
        yield from product.Script.problems(self)
        times_s = (self.split_gap_s, self.round_gap_s, *self.comments_s)
        if not all(0 <= time_s < 1e9 for time_s in times_s):
            yield "a time is negative or not finite"
        if self.usage not in USAGE:
            yield f"usage {self.usage!r}: expected one of {', '.join(USAGE)}"
        if self.fault not in (None, *FAULTS):
            yield f"fault {self.fault!r}: expected one of {', '.join(FAULTS)}"
        if self.round_tok is not None and self.round_tok < 1:
            yield "round_tok: expected at least 1"
        if self.drip_bytes < 0:
            yield "drip_bytes: expected 0 or more"

    def served_tok(self, n_asked: int) -> int:
        """How many tokens a request for `n_asked` tokens gets."""
        if self.n_tok is not None:
            return self.n_tok
        if self.round_tok is None or n_asked <= self.round_tok:
            return n_asked
        return -(-n_asked // self.round_tok) * self.round_tok

    @property
    def arranged(self) -> bool:
        """Whether the writes are anything but one per event."""
        return bool(self.comments_s or self.split_at or self.drip_bytes or self.events_per_write > 1)


def script_from(given: object, default: Script = Script()) -> Script:
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
        return Script(**values)
    except TypeError as error:
        raise WorkloadError(f"script: a value has the wrong type: {error}") from None


@lru_cache(maxsize=4096)
def script_from_header(text: bytes, default: Script) -> Script:
    """The script in a request's `x-burstline-script` header, over the one it would get without."""
    return script_from(_json(text), default)


def scripts_from_json(text: bytes) -> tuple[Script, ...]:
    """The scripts of a file: one JSON object for all requests, or a list in the order of arrival.

    The last of a list serves every later request.
    """
    given = _json(text)
    rows = given if isinstance(given, list) else [given]
    if not rows:
        raise WorkloadError("script: expected a JSON object, or a list of them")
    return tuple(map(script_from, rows))


def _json(text: bytes) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"script: not JSON: {error}") from None
