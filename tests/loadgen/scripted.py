"""A server that does as it is told, for the tests of the wire: each reply is a script over the raw stream."""

from __future__ import annotations

import asyncio
import re
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from burstline.servers.engine import Engine
from burstline.servers.messages import Call, Target
from burstline.workloads.request import Request

Script = Callable[[asyncio.StreamWriter, "Asked"], Awaitable[None]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Asked:
    """One request as it arrived. `nth` counts the requests of its connection from 0."""

    at_ns: int
    line: str
    head: bytes
    body: bytes
    nth: int


@dataclass
class Scripted:
    url: str
    asked: list[Asked] = field(default_factory=list)
    n_connections: int = 0
    first_byte_ns: int | None = None


@asynccontextmanager
async def serving(script: Script, context: ssl.SSLContext | None = None) -> AsyncIterator[Scripted]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.n_connections += 1
        writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        nth = 0
        # Cancelled at the end of `serving`: asyncio's streams would log that as an error.
        with suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                server.first_byte_ns = server.first_byte_ns or time.monotonic_ns()
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                asked = Asked(time.monotonic_ns(), head.split(b"\r\n")[0].decode(), head, body, nth)
                server.asked.append(asked)
                await script(writer, asked)
                await writer.drain()
                if writer.is_closing():
                    break
                nth += 1
        writer.close()

    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[None]] = []
    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context, backlog=2048)
    port = listener.sockets[0].getsockname()[1]
    server = Scripted(f"http{'s' if context else ''}://127.0.0.1:{port}")
    try:
        yield server
    finally:
        listener.close()
        for writer in writers:
            writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def stream(writer: asyncio.StreamWriter, asked: Asked, n: int = 3) -> None:
    """`n` events, each in a chunk and a write of its own."""
    writer.write(STREAM_HEAD)
    for i in range(n):
        writer.write(chunk(b"data: %d\n\n" % i))
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST: whatever is on its way is lost."""
    writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))
    writer.transport.abort()


class FakeEngine(Engine):
    """Sends the prompt's text as the body."""

    name = "fake"

    def encode(self, request: Request, target: Target) -> Call:
        return Call("POST", "/generate", (request.prompt_text or "").encode())
