"""Wait until a server, started or attached to, has generated a token; send it GET requests."""

import contextlib
import http.client
import math
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import orjson

from burstline.servers.destination import Destination, dressed
from burstline.servers.engine import Engine
from burstline.servers.host.process import Server
from burstline.servers.identity import Identity
from burstline.servers.introspection import json_at, log_message
from burstline.servers.launch import StartStage
from burstline.servers.messages import WITH_TOKENS, Call, EngineError, Get, HttpReply, Reply, Target
from burstline.servers.openai import path_under
from burstline.servers.replies import refusal, understood
from burstline.wording import counted

POLL_S = 0.25
"""How often a starting server is asked whether it is there, and its log whether the start has failed."""
PAGE_TIMEOUT_S = 5.0
"""How long a server may take for a small page: its health, its metrics."""
MAX_REPLY_BYTES = 8 << 20
"""No page that is asked for here (metrics, an OpenAPI schema, one completion) comes near it."""

LONGEST_LINE = 400
"""Longer lines list a configuration, in which any word may occur."""

Progress = Callable[[float, str], None]
"""Called while a server starts, with the seconds so far and what it does: `loading weights, 40 s`."""


class RefusalError(EngineError):
    """The server refuses what it is asked; asking again would not help."""


@dataclass(frozen=True, slots=True)
class Startup:
    """How long a start took: until the first token, and when each stage began that the log names."""

    ready_s: float
    stages: tuple[StartStage, ...] = ()


def wait_ready(
    engine: Engine,
    server: Server | None,
    target: Target,
    *,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> Startup:
    """Wait until the server has generated a real token.

    `server` is None for one that was not started here. Raises EngineError, with the server's own cause, as
    soon as the server has ended, refuses the request, or its log shows that the start has failed although
    its launcher lives; and after `timeout_s`.
    """
    began = time.monotonic()
    attempts = _attempts(engine, target, timeout_s)
    stages: list[StartStage] = []
    state = "no token has come yet"
    while (waited_s := time.monotonic() - began) < timeout_s:
        if server is not None and not server.alive():
            if {"-h", "--help"} & {*server.launch.argv}:
                raise EngineError(server.log())
            known = engine.root_cause(server.log()) or log_message(server.last_line())
            ended = f"{engine.title} {server.how_it_ended()} before it was ready"
            raise EngineError(f"{ended}: {known or 'it printed nothing'}\nIts whole log: {server.log_path}")
        if server is not None and (cause := engine.doomed(log := server.log())):
            raise EngineError(f"{engine.title} cannot start: {cause}\nIts whole log: {server.log_path}")
        outcome = next(attempts)
        if isinstance(outcome, RefusalError):
            raise outcome
        if outcome == "":
            return Startup(time.monotonic() - began, tuple(stages))
        state = outcome or state
        if server is not None:
            name = stage_of(engine, log)
            if name is not None and (not stages or stages[-1].name != name):
                stages.append(StartStage(name, waited_s))
        if progress is not None:
            progress(waited_s, state if server is None else _doing(stages, log, waited_s))
    what = f"{engine.title} at {target.url} is not ready after {timeout_s:g} s"
    if server is None:
        raise EngineError(f"{what}: {state}")
    if (cause := engine.root_cause(server.log())) is not None:
        raise EngineError(f"{what}: {cause}\nIts whole log: {server.log_path}")
    doing = f" while {stages[-1].name}" if stages else ""
    raise EngineError(f"{what}{doing}: {state}; its log ends: {log_message(server.last_line())}")


def _attempts(engine: Engine, target: Target, timeout_s: float) -> Iterator[str | RefusalError | None]:
    """Ask for one token again and again: "" for a token, else what went wrong; None while none has come.

    It asks in parallel to the loop that watches the process and its log: a hung server may keep one request
    for minutes, in which its log already says why.
    """
    get, until_s = getter(target, timeout_s=PAGE_TIMEOUT_S), time.monotonic() + timeout_s
    outcomes: queue.SimpleQueue[str | RefusalError] = queue.SimpleQueue()

    def ask() -> None:
        left_s = max(0.1, until_s - time.monotonic())
        if left_s < 1.0 < timeout_s:
            return  # it would come to nothing, and hide what the attempt before says
        try:
            outcomes.put(_state(engine, target, get, left_s) or "")
        except RefusalError as refusal:
            outcomes.put(refusal)
        except Exception as error:
            outcomes.put(f"{type(error).__name__}: {error}")

    while True:
        threading.Thread(target=ask, daemon=True).start()
        outcome: str | RefusalError | None = None
        while outcome is None:
            with contextlib.suppress(queue.Empty):
                outcome = outcomes.get(timeout=POLL_S)
            if outcome:
                time.sleep(POLL_S)
            yield outcome


def stage_of(engine: Engine, log: str) -> str | None:
    """The stage that the last telling line of a log belongs to; None where no line tells."""
    lines = (line for line in reversed(log.splitlines()) if len(line) <= LONGEST_LINE)
    return next((name for line in lines for pattern, name in engine.stages if re.search(pattern, line)), None)


def _doing(stages: list[StartStage], log: str, waited_s: float) -> str:
    """The stage and its age; before the first most lines tell no progress, and the last is marked as one."""
    if stages:
        return f"{stages[-1].name}, {waited_s - stages[-1].begin_s:.0f} s"
    lines = reversed(log.splitlines())
    # Indented lines quote source code, Python's warnings are about that code.
    telling = (line for line in lines if line[:1].strip() and not re.search(r"\wWarning: ", line))
    last = log_message(next(telling, ""), 60)
    return f"starting; its log ends: {last}" if last else "nothing in its log yet"


def getter(target: Target, *, timeout_s: float = 30.0, within_s: float = math.inf) -> Get:
    """GET for this server: what `Engine.identify` and probes ask with.

    Each request may take `timeout_s`, and none may end later than `within_s` from now.
    """
    until_s = time.monotonic() + within_s

    def get(path: str) -> HttpReply:
        left_s = min(timeout_s, until_s - time.monotonic())
        if left_s <= 0:
            raise EngineError(f"GET {target.url}{path}: no answers within {within_s:.3g} s")
        return send(target, Call("GET", path, headers=()), left_s)

    return get


_PROXIES = ("nginx", "openresty", "envoy", "istio-envoy", "caddy", "apache", "lighttpd", "cloudflare")


def passed_through(target: Target, *, of_sessions: bool) -> tuple[str, ...]:
    """What the heads of replies say of who is between, and of what `of_sessions` is lost on the way."""
    get, headers = getter(target, timeout_s=PAGE_TIMEOUT_S), dict[str, str]()
    with contextlib.suppress(EngineError):
        headers = dict(get("/v1/models").headers)
        workers = json_at(get, "/workers").get("workers")
        if isinstance(workers, list):  # as sglang-router and vllm-router list them
            headers["via"] = f"router with {counted(len(workers), 'worker')}"
    names = ["via", "x-litellm-version", "x-envoy-upstream-service-time", "x-kong-response-latency"]
    names += ["server"] * headers.get("server", "").lower().startswith(_PROXIES)
    own = ", ".join(f"{name}: {headers[name]}" for name in names if name in headers)
    between = f"a gateway is between ({own}): its time is in each latency, and it may change requests"
    cookie = "the server sets a cookie, which Burstline does not send back: turns may go to other workers"
    return (between,) * bool(own) + (cookie,) * (of_sessions and "set-cookie" in headers)


def identified(engine: Engine, get: Get, log: str) -> Identity:
    """Who the server is; EngineError also where what it says of itself makes no sense."""
    try:
        return engine.identify(get, log)
    except EngineError:
        raise
    except Exception as error:  # whatever a server's words can make an adapter do
        what = f"{type(error).__name__}: {error}"
        raise EngineError(f"{engine.title} sent invalid information about itself: {what}") from error


def _state(engine: Engine, target: Target, get: Get, timeout_s: float) -> str | None:
    """None when the server has generated a token, else what it did instead.

    Raises RefusalError where the request for one token is refused for good.
    """
    try:
        if engine.probe_path is not None and (page := get(engine.probe_path)).status >= 500:
            return f"{engine.probe_path} answers {page.status}: {refusal(page).error}"  # else the token tells
        reply = _one_token(engine, target, get, timeout_s)
    except RefusalError:
        raise
    except EngineError as error:
        return str(error)
    if reply.error:
        return f"a request for one token failed: {reply.error}"
    counted = reply.n_output_ids or reply.n_output_usage
    generated = counted or any(event.kind in WITH_TOKENS for event in reply.events)
    return None if generated else "a request for one token returns none"


def _one_token(engine: Engine, target: Target, get: Get, timeout_s: float) -> Reply:
    call = dressed(engine.ready_call(target), target, 0, engine.lora_path)
    try:
        raw = send(target, call, timeout_s)
    except EngineError as error:
        if not (isinstance(error.__cause__, http.client.IncompleteRead) and b'"stream":true' in call.body):
            raise
        # A gateway may say 200 before it asks: without a stream it says what went wrong.
        fields = orjson.loads(call.body) | {"stream": False, "stream_options": None}
        raw = send(target, replace(call, body=orjson.dumps(fields)), timeout_s)
        if raw.ok:
            raise
    reply = understood(engine.decode, raw)
    hint = _hint(raw, call.path, str(reply.error), get, target)
    if hint or (400 <= raw.status < 500 and raw.status != 429):
        refused = f"refuses a request for one token (HTTP {raw.status})"
        raise RefusalError(f"{engine.title} at {target.url} {refused}: {reply.error}{hint}")
    return reply


def _hint(raw: HttpReply, path: str, error: str, get: Get, target: Target) -> str:
    """What helps against this refusal, where the reply says so much."""
    if 300 <= raw.status < 400:
        return f"; it redirects to {raw.headers.get('location')}: pass that address as --url"
    if raw.status in (401, 403):
        return f"; {'its key is wrong' if target.api_key else 'it wants a key'}: export BURSTLINE_API_KEY=..."
    if not raw.ok and "chat template" in error.lower():
        return "; its model has none: pass --endpoint completions"
    if raw.status not in (404, 405) or "model" in error.lower():
        return ""
    if name := json_at(get, "/v2").get("name"):
        return f"; it is {name} with KServe's protocol: start its front end that speaks OpenAI's"
    below = urlsplit(target.url).path
    above = replace(target, url=target.url.removesuffix(below))
    if below and json_at(getter(above, timeout_s=PAGE_TIMEOUT_S), "/v1/models"):
        return f"; --url has the wrong path {below}: models are listed without it, so pass --url {above.url}"
    wrong = f"; check the path {below} of --url" if below else ""
    return wrong if "/chat/" in path else f"{wrong}; if it serves chats alone, pass --endpoint chat"


def send(target: Target, call: Call, timeout_s: float, most_bytes: int = 0) -> HttpReply:
    """The whole reply to one call, of at most `most_bytes` or MAX_REPLY_BYTES; EngineError where none comes.

    The standard library's client, because importing httpx would take as long as the rest of a start. The
    timeout bounds the call as a whole: a server that sends a byte a second does not hold us.
    """
    url = target.url.rstrip("/") + path_under(target.url, call.path)
    most_bytes = most_bytes or MAX_REPLY_BYTES
    destination = Destination.of(target)
    connection = http.client.HTTPConnection(destination.host, destination.port, timeout=timeout_s)
    until_s = time.monotonic() + timeout_s
    alarm = threading.Timer(timeout_s, _hang_up, [connection])
    alarm.daemon = True
    try:
        connection.sock = destination.connected(timeout_s)
        alarm.start()
        if (tls := destination.tls()) is not None:
            connection.sock = tls.wrap_socket(connection.sock, server_hostname=destination.host)
        connection.sock.sendall(destination.serialised(replace(call, path=path_under(target.url, call.path))))
        with http.client.HTTPResponse(connection.sock, method=call.method) as reply:
            reply.begin()
            while reply.status < 200:  # the standard library knows 100 alone, not 103
                reply.headers = reply.msg = None  # type: ignore[assignment]
                reply.begin()
            body = reply.read(most_bytes + 1)
            if len(body) <= most_bytes and (reply.length or time.monotonic() >= until_s):
                raise http.client.IncompleteRead(body, reply.length)
            headers = {name.lower(): value for name, value in reply.getheaders()}
    except (OSError, ValueError, http.client.HTTPException) as error:
        late = connection.sock is not None and time.monotonic() >= until_s
        why = f"no complete answer within {timeout_s:g} s" if late else _why(error)
        if late and destination.tls() is not None and not isinstance(connection.sock, ssl.SSLSocket):
            why += ", not even a greeting in TLS: try http:// instead of https://"
        raise EngineError(f"{call.method} {url}: {why}") from error
    finally:
        alarm.cancel()
        connection.close()
    if len(body) > most_bytes:
        raise EngineError(f"{call.method} {url}: the answer is longer than {most_bytes:,} bytes")
    return HttpReply(reply.status, headers, body)


def _why(error: Exception) -> str:
    """Why there is no reply, in the words of who can change it where the error's own are of bytes."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}: pass --ca-bundle FILE to trust its authority, or --insecure"
    if "CERTIFICATE_REQUIRED" in str(error):
        return "it wants a certificate of the client, and Burstline has none: ask through a proxy that has"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"it does not speak TLS ({error.reason}): try http:// instead of https://"
    # Behind its length, so begins the first frame of an HTTP/2 server: its settings (RFC 9113, 6.5).
    if isinstance(error, http.client.BadStatusLine) and str(error)[3:9] == "\x04\0\0\0\0\0":
        return "it speaks HTTP/2 alone, and Burstline HTTP/1.1: ask through a proxy, or turn HTTP/1.1 on"
    if isinstance(error, http.client.IncompleteRead) and not error.partial:
        return "it sent the head of a reply and closed: a gateway in front may hide why; read its log"
    return str(error) or type(error).__name__


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError):
        connection.sock.shutdown(socket.SHUT_RDWR)
