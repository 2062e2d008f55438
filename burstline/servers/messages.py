"""Messages between Burstline and a server: its address, requests, and replies."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from burstline.servers.redact import Secret, printable, redacted


class EngineError(RuntimeError):
    """The server failed us (exit code 5): what happened, its own last words, what to try.

    Its text is printable and without secrets, whatever a server has put into it.
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(printable(redacted(str(text))))


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a socket: when our code had it and when the kernel had it.

    Both stamps are ns on the monotonic clock, counted from the run's start. `kernel_ns` is the receive stamp
    of the last segment in the read (SO_TIMESTAMPNS), None where the transport gives none (TLS, no Linux).
    """

    at_ns: int
    kernel_ns: int | None
    data: bytes


class Kind(IntEnum):
    """The kind of a stream's event. Only those of `WITH_TOKENS` carry tokens.

    EMPTY has no text and no count: it may hold a token whose UTF-8 is not complete yet, or nothing. OTHER has
    text in a field of an unknown name, UNKNOWN is no event of the dialect: a heartbeat, say.
    """

    ROLE = 0
    REASONING = 1
    ANSWER = 2
    TOOL = 3
    USAGE = 4
    FINISH = 5
    ERROR = 6
    EMPTY = 7
    OTHER = 8
    UNKNOWN = 9


WITH_TOKENS: Final = (Kind.ANSWER, Kind.REASONING, Kind.TOOL, Kind.OTHER)


@dataclass(slots=True)
class Event:
    """One decoded event of a reply.

    `end` is the offset just past the event's last byte in the body: a caller that knows when that byte was
    read knows when the event arrived, so decoding needs no clock and no split of the stream can change it.
    `n_tok` is how many generated tokens the event carries; None where the engine does not say per event.
    """

    end: int
    kind: Kind
    n_tok: int | None


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole HTTP reply with the transfer coding taken off. Header names are lower case.

    `complete` is False where the body ended before its framing said so.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool = True

    @property
    def ok(self) -> bool:
        """Whether the status says that it succeeded: some gateways answer 201."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """A server's own times of one request, by its clock, in seconds.

    None where it does not say. `queue_s` is how long the request waited in the scheduler's queue, `prefill_s`
    from the first forward pass of its prompt to the end of the last, `first_token_s` from the request's
    receipt until its first token left the server: what the network and the client add to it makes TTFT.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None


@dataclass(slots=True)
class Reply:
    """The decoded reply of an engine to one request.

    Counts are the server's own, None where it gave none: `n_output_ids` counts token ids that came
    back (the most trusted), `n_output_usage` is the usage block's figure. `terminated` says that the
    dialect's own end was seen (`[DONE]`, `finished: true`, a final event with details). `error` is the
    server's message where it sent one, in whatever status. `n_reasoning_tok` is how much of the output is
    reasoning, shown or not. `text` is what was generated, to count its
    tokens: None where the server did, or where it is not all text. `overshoots`: the server goes
    on beyond the asked length by its own rules; what is beyond is no part of the request. `own_length`: any
    length is a success, because it is not known whether this server obeys the length in a request.
    `overloaded`: it refused because it has too many requests.
    """

    events: Sequence[Event] = ()
    n_prompt_tok: int | None = None
    n_output_ids: int | None = None
    n_output_usage: int | None = None
    n_cached_tok: int | None = None
    n_reasoning_tok: int | None = None
    finish_reason: str | None = None
    terminated: bool = False
    error: str | None = None
    text: str | None = None
    times: ServerTimes | None = None
    overshoots: bool = False
    own_length: bool = False
    overloaded: bool = False


@dataclass(frozen=True, slots=True)
class ReplyContent:
    """The text of a reply, for the next turn of a conversation, and its token ids where they came back."""

    text: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to be sent. Host and Content-Length are the wire's affair."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)

    def with_header(self, name: str, value: str) -> Self:
        return replace(self, headers=(*self.headers, (name, value)))


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and under which name: `url` is scheme://host:port, with a path prefix if any.

    `url` holds no secret: `login` is the "user:password" that stood in the user's URL, `api_key` comes from
    the environment.

    `extra_body` is a JSON object laid over each request's body, `headers` ("NAME: VALUE") go with
    it, `loras` are adapters that requests name in turn. `replicas` are further base URLs of the same server,
    one for each load driver in turn: requests take turns, those of one session go to one. `ca_bundle` is a
    file of certificates to trust besides, `insecure` trusts any.

    `takes` names the extras that this server was seen to take; only adapters that probe for them look at it.
    """

    url: str
    model: str
    api_key: Secret | None = None
    takes: tuple[str, ...] = ()
    login: Secret | None = None
    extra_body: Secret | None = None
    headers: tuple[Secret, ...] = ()
    loras: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    ca_bundle: str | None = None
    insecure: bool = False


def target_at(url: str, model: str = "", api_key: Secret | None = None) -> Target:
    """The target that a user's URL names, with or without `/v1/...`; its login is taken out of it.

    Raises ValueError, which never quotes the URL, where it is not scheme://[user:password@]host[:port][/path].
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise ValueError(
            "expected something like http://127.0.0.1:8000 (special characters of a password as %XX)"
        )
    if parts.query or parts.fragment:
        raise ValueError("expected no ? or # in a base URL; pass an API key in BURSTLINE_API_KEY")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    login = None if parts.username is None else Secret(f"{user}:{password}")
    name = f"[{host}]" if ":" in host else host
    path = re.sub(r"/v1(?:/(?:chat/)?completions|/models)?$", "", parts.path.rstrip("/")).rstrip("/")
    base = f"{parts.scheme}://{name}{'' if port is None else f':{port}'}{path}"
    return Target(base, model, api_key, login=login)


Get = Callable[[str], HttpReply]
"""GET a path of the server, e.g. get("/v1/models"); raises EngineError when nothing answers."""


Ask = Callable[[Call], HttpReply]
"""Send one call and wait for its whole reply; raises EngineError when nothing answers."""
