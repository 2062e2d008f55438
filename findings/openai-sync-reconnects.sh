#!/bin/sh
# openai 3.57.0 (Python client): OpenAI opens a new connection for each streamed reply, AsyncOpenAI does not.
#
# Expected: both keep the connection, as they do for replies that are not streamed.
# Seen: ten streamed requests of OpenAI in turn, each read to its end, need ten connections. AsyncOpenAI needs
# one. In 2.0.0 both need one, in 2.8.1 to 3.0.0 both need ten.
# For a benchmark: each TTFT of a client that uses OpenAI contains a TCP handshake, and with https a TLS
# handshake: two more round trips. Two scripts of the same library differ by that much, and so do two versions.
. "$(dirname "$0")/lib.sh"

needs openai==3.57.0

check <<'EOF'
import asyncio

from finding import ChatServer, observed
from openai import AsyncOpenAI, OpenAI

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def sync(stream):
    server = ChatServer()
    with OpenAI(base_url=server.url, api_key="none") as client:
        for _ in range(10):
            reply = client.chat.completions.create(stream=stream, **ASK)
            assert not stream or sum(1 for _ in reply) == 13
    return server.connections


async def asynchronous():
    server = ChatServer()
    async with AsyncOpenAI(base_url=server.url, api_key="none") as client:
        for _ in range(10):
            assert len([event async for event in await client.chat.completions.create(stream=True, **ASK)]) == 13
    return server.connections


n = sync(stream=False)
observed(f"OpenAI, 10 requests without streaming: {n} connection", n == 1)
n = asyncio.run(asynchronous())
observed(f"AsyncOpenAI, 10 streamed requests: {n} connection", n == 1)
n = sync(stream=True)
observed(f"OpenAI, 10 streamed requests: {n} connections", n == 10)
EOF
