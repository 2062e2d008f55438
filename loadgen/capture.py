"""What the wire did for one request, before anybody looked inside."""

from dataclasses import dataclass

from servers.engine import Read


@dataclass(frozen=True, slots=True)
class Capture:
    """Everything seen on the wire for one planned request; nothing is parsed.

    All times are ns from the run's start on the monotonic clock, None where it never happened: `dispatched_ns`
    a slot was granted, `connected_ns` the connection stood, `sent_ns` the request was fully written,
    `closed_ns` the reply ended or failed. `failure` names what broke the exchange: connect, reset, truncated,
    timeout, cancelled, not_sent; None where the reply is whole in HTTP's own terms. `detail` is the error's
    own text.
    """

    index: int
    due_ns: int
    dispatched_ns: int | None
    connected_ns: int | None
    sent_ns: int | None
    closed_ns: int | None
    reads: tuple[Read, ...]
    failure: str | None = None
    detail: str | None = None
