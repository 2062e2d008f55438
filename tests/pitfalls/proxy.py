"""What stands between client and server in real life: it hands on everything, but replies come later."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


@contextmanager
def late_proxy(url: str, delay_s: float, change: Callable[[bytes], bytes] = bytes) -> Iterator[str]:
    """The URL of a proxy in front of `url`, in a thread of its own; `change` is made to what clients send."""
    where, told = urlsplit(url), queue.SimpleQueue[int]()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(where.hostname, where.port)

        def hand_on(data: bytes) -> None:
            writer.write(data) if data else writer.close()

        async def replies() -> None:
            data = b"-"
            while data:
                data = await theirs.read(1 << 16)
                loop.call_later(delay_s, hand_on, data)

        answering = asyncio.create_task(replies())
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                ours.write(change(data))
        ours.close()
        await answering

    async def serve() -> None:
        async with await asyncio.start_server(meet, "127.0.0.1", 0, backlog=512) as listener:
            told.put(listener.sockets[0].getsockname()[1])
            await stop.wait()
        await asyncio.sleep(2 * delay_s)  # what is under way arrives

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="proxy")
    thread.start()
    try:
        yield f"http://127.0.0.1:{told.get(timeout=10)}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
