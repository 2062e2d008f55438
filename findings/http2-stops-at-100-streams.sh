#!/bin/sh
# httpx 0.28.1 with HTTP/2 against hypercorn 0.18.0 and granian 2.8.9: 150 requests at once are 100.
#
# Expected: a client without a limit on connections has as many requests at the server as were started.
# Seen: httpx sends all requests to one server over one connection. Both servers allow 100 streams on it. httpx
# holds the other 50 back without a word until streams end. With HTTP/1.1, all 150 reach the same servers.
# For a benchmark: a burst of 150 is measured as a burst of 100. The other 50 queue in the client, and their wait
# counts as TTFT of a server that has not seen them. Check the peak of requests in flight at the server.
. "$(dirname "$0")/lib.sh"

needs 'httpx[http2]==0.28.1' httpcore==1.0.9 h2==4.4.1 hypercorn==0.18.0 granian==2.8.9

check <<'EOF'
import asyncio
import sys
import time
from pathlib import Path

import httpx
from finding import free_port, get, observed, running

# A reply streams until /release; /now tells how many stream.
Path("app.py").write_text("""
import asyncio

now, gate = 0, asyncio.Event()

async def app(scope, receive, send):
    global now, gate
    if scope["type"] != "http":
        return
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/now":
        await send({"type": "http.response.body", "body": b"%d" % now})
        return
    if scope["path"] == "/release":
        gate.set()
        gate = asyncio.Event()
        await send({"type": "http.response.body", "body": b"null"})
        return
    mine, now = gate, now + 1
    await send({"type": "http.response.body", "body": b"data: first\\n\\n", "more_body": True})
    await mine.wait()
    now -= 1
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})
""")


def streaming(url, wanted):
    """How many replies stream: as soon as it is `wanted`, with two seconds for more; or after 25 seconds."""
    until = time.monotonic() + 25
    while get(f"{url}/now") != wanted and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(2)
    return get(f"{url}/now")


async def burst(url, version, wanted):
    """How many of 150 requests at once stream, and how many once those have ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(http1=version == 1, http2=version == 2, timeout=60, limits=limits) as client:
        requests = [asyncio.create_task(client.post(url, content=b"{}")) for _ in range(150)]
        first = await asyncio.to_thread(streaming, url, wanted)
        await asyncio.to_thread(get, f"{url}/release")
        then = await asyncio.to_thread(streaming, url, 150 - wanted)
        await asyncio.to_thread(get, f"{url}/release")
        await asyncio.gather(*requests)
        return first, then


folder = Path(sys.executable).parent
for server, options in (("hypercorn", ["-b"]), ("granian", ["--interface", "asgi", "--host", "127.0.0.1", "--port"])):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    address = f"127.0.0.1:{port}" if server == "hypercorn" else str(port)
    with running(str(folder / server), *options, address, "app:app", ready=f"{url}/now"):
        for version, wanted in ((1, 150), (2, 100)):
            first, then = asyncio.run(burst(url, version, wanted))
            seen = f"{server}, HTTP/{version}: {first} of 150 stream at once, and once those have ended {then}"
            observed(seen, (first, then) == (wanted, 150 - wanted))
EOF
