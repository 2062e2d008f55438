"""What one reply does and when: the script that the known-truth server follows."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import orjson

from workloads.request import WorkloadError

USAGE = ("final", "last", "cumulative", "lagging", "null", "off")
FAULTS = ("error", "stall", "half_close", "close", "reset")


@dataclass(frozen=True, slots=True)
class Script:
    """One reply. Times are seconds from the arrival of the whole request, gaps from event to event.

    A list that is too short repeats its last value. Tokens and gaps:
    - `role_s`: when an event without tokens (chat: the role) is sent; None: there is none.
    - `tok_per_event`: tokens in each event; `n_tok`: how many in all, None: as many as the request asks for;
      `n_reasoning_tok`: how many of them, from the first, are reasoning (chat only); `text`: a token's text.
    - `usage`: where the count stands. "final": in an event of its own; "last": in the last token's event;
      "cumulative": in every event; "lagging": in every event, one event behind but for the last; "null": the
      key is there and empty; "off": nowhere.
    - `finish`: the finish reason, None: none is ever given.
    - `round_tok`: the server generates whole rounds of so many tokens where more than one round is asked for
      (TGI: 1,024), and before each further round the request waits `round_gap_s` longer.
    Failures:
    - `status`: other than 200 refuses the request after `headers_s`; `message` is what errors say.
    - `fault`, when the event after `fault_after_tok` tokens would be due (-1: before the headers): "error"
      sends an error inside the stream and ends it, "stall" never sends again, "half_close" ends only our
      direction, "close" ends the connection amid the reply, "reset" does so with RST.
    Framing:
    - `comments_s`: when comments (keep-alives) are sent; `crlf`, `space`: CR LF line ends, `data: ` with a
      space (None: as the dialect has it); `chunked`: chunked coding, else the reply ends with the connection.
    - `events_per_write`: so many token events are held back and written at once.
    - `split_at`: offsets at which each event's bytes are cut, negative from its end; `drip_bytes`: everything
      is sent so many bytes at a time (slow loris), 0: not; `split_gap_s`: the time between the parts.
    - `stamp`: every event carries `sent_ns` and `seq`; without it the bytes are the engine's own.
    """

    headers_s: float = 0.0
    role_s: float | None = None
    ttft_s: float = 0.2
    gaps_s: tuple[float, ...] = (0.02,)
    tok_per_event: tuple[int, ...] = (1,)
    n_tok: int | None = None
    n_reasoning_tok: int = 0
    text: str = " tok"
    usage: str = "final"
    finish: str | None = "length"
    status: int = 200
    message: str = "scripted failure"
    fault: str | None = None
    fault_after_tok: int = 0
    comments_s: tuple[float, ...] = ()
    crlf: bool = False
    space: bool | None = None
    chunked: bool = True
    events_per_write: int = 1
    split_at: tuple[int, ...] = ()
    drip_bytes: int = 0
    split_gap_s: float = 0.0005
    stamp: bool = True
    round_tok: int | None = None
    round_gap_s: float = 0.0

    def __post_init__(self) -> None:
        first_s = self.ttft_s if self.role_s is None else self.role_s
        gaps_s = (*self.gaps_s, self.split_gap_s, self.round_gap_s)
        times_s = (self.headers_s, first_s, self.ttft_s, *gaps_s, *self.comments_s)
        faults = [
            (self.usage not in USAGE, f"usage {self.usage!r}: expected one of {', '.join(USAGE)}"),
            (self.fault not in (None, *FAULTS), f"fault {self.fault!r}: expected one of {', '.join(FAULTS)}"),
            (not all(0 <= time_s < 1e9 for time_s in times_s), "a time is negative or not finite"),
            (
                not self.headers_s <= first_s <= self.ttft_s,
                f"headers_s {self.headers_s}, role_s {self.role_s}, ttft_s {self.ttft_s}: expected to ascend",
            ),
            (not self.gaps_s or not self.tok_per_event, "gaps_s and tok_per_event need at least one value"),
            (any(n < 1 for n in self.tok_per_event), "tok_per_event: expected at least 1 token an event"),
            (self.round_tok is not None and self.round_tok < 1, "round_tok: expected at least 1"),
            (not 100 < self.status < 600, f"status {self.status}: expected an HTTP status"),
            (self.n_tok is not None and self.n_tok < 0, f"n_tok {self.n_tok}: expected 0 or more"),
            (self.events_per_write < 1 or self.drip_bytes < 0, "events_per_write from 1, drip_bytes from 0"),
        ]
        for wrong, message in faults:
            if wrong:
                raise WorkloadError(f"script: {message}")

    def served_tok(self, n_asked: int) -> int:
        """How many tokens a request for so many gets."""
        if self.n_tok is not None:
            return self.n_tok
        if self.round_tok is None or n_asked <= self.round_tok:
            return n_asked
        return -(-n_asked // self.round_tok) * self.round_tok

    @property
    def arranged(self) -> bool:
        """Whether the writes are anything but one per event."""
        return bool(self.comments_s or self.split_at or self.drip_bytes or self.events_per_write > 1)


_TUPLES = ("gaps_s", "tok_per_event", "comments_s", "split_at")


def script_from(given: Mapping[str, Any], default: Script | None = None) -> Script:
    """The script that a JSON object describes, laid over `default`; a single number may stand for a list."""
    default = default or Script()
    names = [row.name for row in fields(Script)]
    values = {name: getattr(default, name) for name in names}
    for name, value in given.items():
        if name not in names:
            raise WorkloadError(f"script: no field {name!r}; there are {', '.join(names)}")
        if name in _TUPLES:
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
        values[name] = value
    try:
        return Script(**values)
    except TypeError as error:
        raise WorkloadError(f"script: a value has the wrong type: {error}") from None


@lru_cache(maxsize=4096)
def script_from_header(text: bytes, default: Script) -> Script:
    """The script in a request's `x-burstline-script` header, over the one it would get without."""
    return script_from(_json_object(text), default)


def scripts_from_json(text: bytes) -> tuple[Script, ...]:
    """The scripts of a file: one JSON object for all requests, or a list in the order of arrival.

    The last of a list serves every later request.
    """
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"script: not JSON: {error}") from None
    rows = given if isinstance(given, list) else [given]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise WorkloadError("script: expected a JSON object, or a list of them")
    return tuple(script_from(row) for row in rows)


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"script: not JSON: {error}") from None
    if not isinstance(given, dict):
        raise WorkloadError(f"script: expected a JSON object, not {given!r:.100}")
    return given
