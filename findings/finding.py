"""What the programs of the findings share: `observed`, and a chat server of known times on the loopback."""

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from socket import create_server


def observed(text, holds):
    """Print what was seen; exit with status 1 where it is no longer what the finding says."""
    sys.stdout.write(f"OBSERVED: {text}\n")
    sys.stdout.flush()
    if not holds:
        sys.stderr.write("CHANGED: the finding says otherwise.\n")
        sys.exit(1)


def free_port():
    with create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


@contextmanager
def running(*argv, ready):
    """A server as a child process, from the moment `ready` answers; stopped at the end."""
    with Path("server.log").open("wb") as log:
        child = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 180
        while True:
            try:
                get(ready)
                break
            except OSError:
                if child.poll() is not None or time.monotonic() > until:
                    sys.stderr.write(f"{argv[0]} did not start:\n{Path('server.log').read_text()[-2000:]}")
                    sys.exit(2)
                time.sleep(0.1)
        yield
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class ChatServer:
    """Streams `n` words, the first after `first` seconds. With `counting` each event has the usage so far."""

    def __init__(self, n=10, first=0.01, gap=0.002, counting=False):
        self.n, self.first, self.gap, self.counting = n, first, gap, counting
        self.connections = self.requests = 0
        self.url = ""
        started = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True).start()
        started.wait(10)

    async def _serve(self, started):
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        started.set()
        await server.serve_forever()

    async def _connection(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                n_bytes = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
                asked = json.loads(await reader.readexactly(n_bytes) or b"{}")
                self.requests += 1
                await (self._stream if asked.get("stream") else self._whole)(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _usage(self, n):
        return {"prompt_tokens": 20, "completion_tokens": n, "total_tokens": 20 + n}

    async def _whole(self, writer):
        message = {"role": "assistant", "content": "word"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        base = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        body = json.dumps(base | {"choices": [choice], "usage": self._usage(1)}).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def _stream(self, writer):
        def send(data):
            text = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(text), text))

        def event(delta, n, reason=None):
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
            base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            usage = {"usage": self._usage(n)} if self.counting or delta is None else {}
            send(json.dumps(base | {"choices": choices} | usage))

        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head)
        await asyncio.sleep(self.first)
        event({"role": "assistant", "content": ""}, 0)
        for n in range(1, self.n + 1):
            event({"content": "word "}, n)
            await writer.drain()
            await asyncio.sleep(self.gap)
        event({}, self.n, "stop")
        event(None, self.n)
        send("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
