"""Waiting for a server, started or found, until it has generated a real token; and asking it by GET."""

import functools
import ssl
import time
from collections.abc import Callable

import httpx

from servers.engine import Call, Engine, EngineError, Get, HttpReply, Kind, Reply, Target
from servers.host.process import Server
from servers.protocol.openai import path_under

POLL_S = 0.25
"""How often a starting server is asked whether it is there."""
PROBE_TIMEOUT_S = 5.0

Progress = Callable[[float, str], None]
"""Called while a server starts, with the seconds so far and what is known: its log's last line, if any."""


class RefusalError(EngineError):
    """The server refuses what it is asked; asking again would not help."""


def wait_ready(
    engine: Engine,
    server: Server | None,
    target: Target,
    *,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> float:
    """Waits until the server has generated a real token, and returns how many seconds that took.

    `server` is None for one that we did not start. Raises EngineError, with the server's own words, as soon
    as it has ended or refuses the request, and after `timeout_s`.
    """
    began = time.monotonic()
    get = getter(target, timeout_s=PROBE_TIMEOUT_S)
    state: str | None = "nothing answers yet"
    while (waited_s := time.monotonic() - began) < timeout_s:
        if server is not None and not server.alive():
            raise EngineError(_why_it_ended(engine, server))
        state = _state(engine, target, get, timeout_s - waited_s)
        if state is None:
            return time.monotonic() - began
        if progress is not None:
            progress(waited_s, (server and server.last_line()) or state)
        time.sleep(POLL_S)
    said = f"; its log ends: {server.last_line()}" if server else ""
    raise EngineError(f"{engine.title} at {target.url} is not ready after {timeout_s:g} s: {state}{said}")


def getter(target: Target, *, timeout_s: float = 30.0) -> Get:
    """GET for this server: what `Engine.identify` and probes ask with."""

    def get(path: str) -> HttpReply:
        return send(target, Call("GET", path, headers=()), timeout_s)

    return get


def _state(engine: Engine, target: Target, get: Get, timeout_s: float) -> str | None:
    """None when the server has generated a token, else what it did instead.

    Raises RefusalError where the request for one token is refused for good.
    """
    try:
        if engine.probe_path is not None and (status := get(engine.probe_path).status) >= 500:
            return f"{engine.probe_path} answers {status}"  # anything else is settled by the token
        reply = _one_token(engine, target, timeout_s)
    except RefusalError:
        raise
    except EngineError as error:
        return str(error)
    if reply.error:
        return f"a request for one token fails: {reply.error}"
    counted = reply.n_output_ids or reply.n_output_usage
    generated = counted or any(event.kind in (Kind.ANSWER, Kind.REASONING) for event in reply.events)
    return None if generated else "a request for one token brings none"


def _one_token(engine: Engine, target: Target, timeout_s: float) -> Reply:
    if (told := engine.ready(target, timeout_s)) is not None:
        return told
    raw = send(target, engine.ready_call(target), timeout_s)
    reply = engine.decode(raw)
    if 400 <= raw.status < 500 and raw.status != 429:
        refused = f"refuses a request for one token (HTTP {raw.status})"
        raise RefusalError(f"{engine.title} at {target.url} {refused}: {reply.error}")
    return reply


def _why_it_ended(engine: Engine, server: Server) -> str:
    code = server.exit_code
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    if code == -9:
        how += " (often: out of memory)"
    cause = engine.root_cause(server.log()) or server.last_line() or "it printed nothing"
    return f"{engine.title} {how} before it was ready: {cause}\nIts whole log: {server.log_path}"


@functools.cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()


def _certificates(url: str) -> ssl.SSLContext | bool:
    """Loading certificates takes 20 ms of CPU: once, and only where there is TLS."""
    return _trusted() if url.startswith("https:") else False


def send(target: Target, call: Call, timeout_s: float) -> HttpReply:
    """The whole reply to one call; EngineError where nothing answers."""
    url = target.url.rstrip("/") + path_under(target.url, call.path)
    headers = dict(call.headers)
    if target.api_key:
        headers.setdefault("authorization", f"Bearer {target.api_key}")
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s, verify=_certificates(url)) as client:
            reply = client.request(call.method, url, content=call.body, headers=headers)
    except httpx.HTTPError as error:
        raise EngineError(f"{call.method} {url}: {error or type(error).__name__}") from error
    return HttpReply(reply.status_code, {k.lower(): v for k, v in reply.headers.items()}, reply.content)
