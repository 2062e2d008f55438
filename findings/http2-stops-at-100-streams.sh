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

# A reply streams for two seconds; /peak tells the most replies that streamed at once, and forgets it.
Path("app.py").write_text("""
import asyncio

now = peak = 0

async def app(scope, receive, send):
    global now, peak
    if scope["type"] != "http":
        return
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/peak":
        await send({"type": "http.response.body", "body": b"%d" % peak})
        peak = 0
        return
    now += 1
    peak = max(peak, now)
    await send({"type": "http.response.body", "body": b"data: first\\n\\n", "more_body": True})
    await asyncio.sleep(2)
    now -= 1
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})
""")


async def burst(url, version):
    """The time to the first event of each of 150 requests at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(http1=version == 1, http2=version == 2, timeout=60, limits=limits) as client:
        start = time.perf_counter()

        async def one():
            async with client.stream("POST", url, content=b"{}") as reply:
                times = [time.perf_counter() - start async for line in reply.aiter_lines() if line]
            return times[0]

        return await asyncio.gather(*(one() for _ in range(150)))


folder = Path(sys.executable).parent
for server, options in (("hypercorn", ["-b"]), ("granian", ["--interface", "asgi", "--host", "127.0.0.1", "--port"])):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    address = f"127.0.0.1:{port}" if server == "hypercorn" else str(port)
    with running(str(folder / server), *options, address, "app:app", ready=f"{url}/peak"):
        for version, wanted in ((1, 150), (2, 100)):
            waits = asyncio.run(burst(url, version))
            late = sum(wait > 2 for wait in waits)
            peak = get(f"{url}/peak")
            seen = f"{server}, HTTP/{version}: {peak} of 150 at once, {late} with a first event after 2 s"
            observed(seen, peak == wanted and (late >= 50) == (version == 2))
EOF
