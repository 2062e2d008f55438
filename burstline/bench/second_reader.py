"""Send the requests of an audit through clients that others wrote, in a process of its own.

httpx reads OpenAI's endpoints, huggingface_hub's client reads TGI, and asyncio-throttle limits the rate: the
server may have other users. Each exchange passes a relay on the loopback device, which keeps the bytes of the
reply: Burstline's own reader gets what the client got.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Final

import httpx
from asyncio_throttle.throttler import Throttler
from huggingface_hub import AsyncInferenceClient, constants

from burstline.loadgen.capture.capture import Capture, CaptureWriter, reply_limit_bytes
from burstline.loadgen.capture.masking import masked
from burstline.loadgen.driver.job import Job
from burstline.loadgen.wire.exchange import Exchange
from burstline.measure.record.decode import Reading
from burstline.measure.record.record import Outcome
from burstline.servers.destination import Destination
from burstline.servers.messages import Call, EngineError, Read
from burstline.servers.redact import words_of_server
from burstline.servers.registry import ENGINES

MOST_PER_S: Final = 100
Reader = Callable[[str, Call], Awaitable[Reading]]
"""Sends a call to the relay at a URL and reads the reply; raises where the client makes nothing of it."""


class _Relay:
    """Sends a client's body under the load's own head, and keeps the bytes of the reply that it hands back.

    The client's head names the relay as host, and may hold a token that is meant for the Hub.
    """

    def __init__(self, destination: Destination, call: Call, most_bytes: int) -> None:
        self._destination, self._call, self._most_bytes = destination, call, most_bytes
        self.reads: list[Read] = []
        self.reply = Exchange()
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    async def pass_on(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.is_idle.clear()
        with suppress(OSError, EngineError):
            head = await client.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
            call = replace(self._call, body=await client.readexactly(int(length[1]) if length else 0))
            where = self._destination
            server, to_server = await asyncio.open_connection(where.host, where.port, ssl=where.tls())
            to_server.write(where.serialised(call))
            while not self.reply.is_whole() and len(self.reply.data) < self._most_bytes:
                if not (data := await server.read(1 << 16)):
                    break
                self.reads.append(Read(time.monotonic_ns(), None, data))
                self.reply.data += data
                to_client.write(data)
            to_server.close()
        to_client.close()
        self.is_idle.set()


def main(home: Connection, task: tuple[str, Job]) -> None:
    """With this client send each of the job's requests; home get the `Reading` of each reply, then None."""
    client, job = task
    os.environ["no_proxy"] = "*"  # the relay is on this machine
    constants.HF_HUB_OFFLINE = False  # which is about the Hub, and this is the server under test
    asyncio.run(_read_all(home, CLIENTS[client], job))


async def _read_all(home: Connection, read: Reader, job: Job) -> None:
    engine, destination = ENGINES[job.engine], Destination.of(job.target)
    pace, spool = Throttler(MOST_PER_S // 10, 0.1), CaptureWriter(job.captures)
    for request in job.requests:
        call = job.call(request, engine)
        relay = _Relay(destination, call, reply_limit_bytes(request.n_prompt_tok, request.n_output_tok))
        listener = await asyncio.start_server(relay.pass_on, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}{call.path}"
        began_ns, reading = time.monotonic_ns(), Reading(error="no reply in time")
        with suppress(TimeoutError):
            async with pace, asyncio.timeout(job.deadline_s):
                try:
                    reading = await read(url, call)
                except Exception as error:  # whatever a client makes of a reply
                    reading = Reading(error=words_of_server(f"{type(error).__name__}: {error}", 300))
                await relay.is_idle.wait()
        listener.close()
        failure = None if relay.reply.is_whole_at_eof() else Outcome.TRUNCATED
        times_ns = (began_ns, began_ns, began_ns, time.monotonic_ns())
        spool.put(partial(Capture, request.index, began_ns, *times_ns, relay.reads, failure))
        home.send(replace(reading, index=request.index))
    spool.close()
    home.send(None)


async def read_openai(url: str, call: Call) -> Reading:
    """A completion or a chat, streamed or plain, by OpenAI's API reference; vLLM's token ids if they came."""
    async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client:  # noqa: S113, S501
        reply = await client.post(url, content=call.body)
    text = reply.raise_for_status().content.decode(errors="replace")
    # Not by httpx's aiter_lines, which also ends a line at U+2028 and other characters of a JSON string.
    lines = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")] or [text]
    said, ids, n_tok, reason = "", None, None, None
    for answer in map(json.loads, takewhile(lambda line: line != "[DONE]", lines)):
        n_tok = (answer.get("usage") or {}).get("completion_tokens", n_tok)
        for choice in answer["choices"][:1]:
            part = choice.get("delta") or choice.get("message") or choice
            said += part.get("reasoning_content") or part.get("reasoning") or ""
            said += part.get("content") or part.get("text") or ""
            reason = choice.get("finish_reason") or reason
            if choice.get("token_ids") is not None:
                ids = [*(ids or ()), *choice["token_ids"]]
    said = masked(said.encode()).decode()
    return Reading(tuple(ids) if ids else said, n_tok if ids is None else len(ids), reason)


async def read_tgi(url: str, call: Call) -> Reading:
    """`/generate_stream`: the client writes the request itself, from the same prompt and parameters."""
    asked = json.loads(call.body)
    async with AsyncInferenceClient(url) as client:
        stream = await client.text_generation(asked["inputs"], stream=True, **asked["parameters"])
        outputs = [output async for output in stream]
    details = outputs[-1].details
    ids = tuple(output.token.id for output in outputs if output.token is not None)
    return Reading(ids, details.generated_tokens, details.finish_reason)


CLIENTS: Final[Mapping[str, Reader]] = {"httpx": read_openai, "huggingface_hub": read_tgi}
"""By the package that the client is of."""
