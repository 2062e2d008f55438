"""The wire as an httpx transport, for its tests: each request is a task, its reply a response."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import AsyncIterator, MutableSequence

import httpx

from burstline.loadgen.record.http1 import body_of
from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.wire import Wire
from burstline.servers.protocol.destination import addresses_of

OPENING_LIMIT_S = 60.0
"""How long opening connections may delay the start of a load."""

_ERRORS: dict[str, type[httpx.TransportError]] = {
    "connect": httpx.ConnectError,
    "timeout": httpx.ReadTimeout,
    "reset": httpx.ReadError,
    "truncated": httpx.RemoteProtocolError,
    "too_large": httpx.RemoteProtocolError,
}


class Transport(httpx.AsyncBaseTransport):
    """An httpx transport to one server, with a barrier and a schedule.

        transport = Transport("http://127.0.0.1:8000", barrier=True)
        async with httpx.AsyncClient(transport=transport) as client:
            exchange = Exchange(index=0, due_ns=0)
            request = client.build_request("POST", url, json=..., extensions={"exchange": exchange})
            task = asyncio.create_task(client.send(request, stream=True))
            await transport.opened(1)
            transport.release(time.monotonic_ns() + 50_000_000)
            response = await task

    A request carries its due time in `extensions["exchange"]`; the same Exchange holds every stamped read
    afterwards, also where httpx raises (ConnectError, ReadTimeout, ReadError, RemoteProtocolError). A
    response is returned once its last byte is there: this transport measures, it does not stream. Without
    `barrier` requests go out at once. `wire` and `wire.traffic` have the counts. See `Wire` for the other
    arguments.
    """

    def __init__(
        self,
        url: str,
        *,
        barrier: bool = False,
        deadline_s: float | None = None,
        concurrency: int | None = None,
        verify: ssl.SSLContext | bool = True,
        counters: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise httpx.UnsupportedProtocol(f"expected http://host:port or https://host:port, got {url!r}")
        self._origin = (parsed.scheme, parsed.host, parsed.port)
        is_tls = parsed.scheme == "https"
        self.wire = Wire(
            addresses_of(parsed.host, parsed.port or (443 if is_tls else 80)),
            self._on_ended,
            tls=_tls_context(verify) if is_tls else None,
            host=parsed.host,
            deadline_s=deadline_s,
            concurrency=concurrency,
            counters=counters,
        )
        self._barrier = barrier
        self._loop: asyncio.AbstractEventLoop | None = None
        self._futures: dict[Exchange, asyncio.Future[None]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if (request.url.scheme, request.url.host, request.url.port) != self._origin:
            raise httpx.UnsupportedProtocol(f"this transport goes to {self._origin}, not to {request.url}")
        exchange: Exchange = request.extensions.get("exchange") or Exchange()
        exchange.payload = _serialised(request, await request.aread())
        if not self._barrier:
            exchange.due_ns = time.monotonic_ns()  # due at once, on a run that began when the clock did
        future = self._futures[exchange] = self._running_loop().create_future()
        self.wire.park(exchange)
        try:
            await future
        except asyncio.CancelledError:
            self.wire.cancel(exchange)
            raise
        return _response(exchange)

    async def opened(self, n_parked: int, limit_s: float = OPENING_LIMIT_S) -> None:
        """Wait until `n_parked` requests are parked and those due in the first second have a connection.

        Returns early after `stop`, and after `limit_s` of opening connections: requests that still lack one
        then wait for it within their own deadline. Raises what brought the wire down, if anything did.
        """
        self._running_loop()
        wire, stand = self.wire, threading.Event()

        def going() -> bool:
            return wire.error is None and not wire.traffic.stopped

        while wire.traffic.n_parked < n_parked and going():  # noqa: ASYNC110 another thread counts
            await asyncio.sleep(0.005)
        wire.when_open(stand.set)
        until_s = time.monotonic() + limit_s
        while not stand.is_set() and going() and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if wire.error is not None:
            raise wire.error

    def release(self, t0_ns: int) -> None:
        """Let the run begin at `t0_ns` (monotonic); nothing leaves before."""
        self.wire.release(t0_ns)

    def stop(self) -> None:
        """Send nothing more: requests in flight end "cancelled", parked ones "not_sent"."""
        self.wire.stop()

    async def aclose(self) -> None:
        if self._loop is not None:
            await asyncio.to_thread(self.wire.close)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self.wire.start()
            if not self._barrier:
                self.wire.release(0)
        return self._loop

    def _on_ended(self, ended: list[Exchange]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resolve, ended)

    def _resolve(self, ended: list[Exchange]) -> None:
        for exchange in ended:
            future = self._futures.pop(exchange, None)
            if future is not None and not future.done():
                future.set_result(None)


class _Body(httpx.AsyncByteStream):
    """The body without its transfer coding, decoded when it is read."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        head = self._exchange.head
        if head is not None:
            yield body_of(head, self._exchange.whole()[1])
        if self._exchange.failure is not None:
            raise _error(self._exchange)


def _response(exchange: Exchange) -> httpx.Response:
    head = exchange.head
    if head is None:
        raise _error(exchange)
    return httpx.Response(
        head.status,
        headers=dict(head.headers),
        stream=_Body(exchange),
        extensions={"http_version": b"HTTP/1.1", "exchange": exchange},
    )


def _error(exchange: Exchange) -> httpx.TransportError:
    failure = exchange.failure or "truncated"
    error = _ERRORS.get(failure, httpx.TransportError)
    return error(f"{failure}: {exchange.detail}" if exchange.detail else failure)


def _serialised(request: httpx.Request, body: bytes) -> bytes:
    # The body is at hand, so that it goes out under Content-Length however the request was built.
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % field for field in request.headers.raw if field[0].lower() != b"transfer-encoding"]
    if body and "content-length" not in request.headers:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def _tls_context(verify: ssl.SSLContext | bool) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        return verify
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
