"""The wire to one server, for its tests."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from urllib.parse import urlsplit

from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.wire import Wire
from burstline.servers.destination import addresses_of


class Client:
    """A wire whose exchanges are posts; `tls` for an https URL, else as `Wire`."""

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float | None = None,
        concurrency: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        assert where.port is not None
        self.ended: list[Exchange] = []
        self.wire = Wire(
            addresses_of(where.hostname, where.port),
            self.ended.extend,
            tls=tls,
            host=where.hostname,
            deadline_s=deadline_s,
            concurrency=concurrency,
        )

    def __enter__(self) -> Client:
        self.wire.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def park(self, *exchanges: Exchange, body: bytes | None = None) -> None:
        """The body is the exchange's number, unless told."""
        for exchange in exchanges:
            own = b"%d" % exchange.index if body is None else body
            exchange.payload = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(own), own)
        self.wire.park(*exchanges)

    async def opened(self) -> None:
        """Wait until those due in the first second have a connection."""
        settled = threading.Event()
        self.wire.when_open(settled.set)
        while not settled.is_set():  # noqa: ASYNC110 another thread sets it
            await asyncio.sleep(0.005)

    async def until_ended(self, *exchanges: Exchange) -> None:
        while not set(exchanges) <= set(self.ended):  # noqa: ASYNC110 another thread adds them
            await asyncio.sleep(0.002)

    async def asked(self, *exchanges: Exchange, after_ns: int = 0) -> None:
        """Send these now, or so much later, and wait until they have ended."""
        for exchange in exchanges:
            exchange.due_ns = time.monotonic_ns() + after_ns  # of a run that began when the clock did
        self.wire.release(0)
        self.park(*exchanges)
        await self.until_ended(*exchanges)
