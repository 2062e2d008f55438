"""Count the tokens of replies without a count, from their text.

The counts are taken while the server is still there and kept with the run, so that everything else can be
made again from its files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from burstline.bench.plan_for_server import local_tokenizer, tokenizer_for
from burstline.bench.server_session import Site
from burstline.loadgen.record.decode import uncounted
from burstline.loadgen.record.record import RECOUNTS
from burstline.loadgen.record.rundir import RunDir
from burstline.loadgen.record.tables import COUNTS
from burstline.servers.messages import HttpReply
from burstline.servers.protocol.destination import Destination
from burstline.servers.protocol.openai import count_in, tokenize_call

if TYPE_CHECKING:
    from tokenizers import Tokenizer


ASKING_S = 60.0
"""The server is asked for so long: what is left then has a local tokenizer's word, or none."""
ASK_TIMEOUT_S = 10.0
LEAST_REPLY_BYTES, REPLY_BYTES_PER_TOKEN = 1 << 20, 64
"""A reply may list an id and a piece of text for each token, of which a text has fewer than bytes."""
N_ASKED_AT_ONCE = 8
MOST_ASKED_PER_S = 500
N_BATCH = 1000

Say = Callable[[str], None]
Count = Callable[[Sequence[str]], Sequence[int | None]]


def recount(
    run: RunDir, site: Site, tokenizer: Path | None, model: str | None, say: Say, *, ask: bool
) -> None:
    """Write `counts.parquet`, where the server left replies uncounted and their text can be counted.

    `ask` says whether the server is there to be asked. A person's interrupt ends the counting, not the run.
    """
    texts = uncounted(run.captures, site.engine.decode)
    counters: dict[str, Count] = {}
    parts: list[pa.Table] = []
    with suppress(KeyboardInterrupt):
        for batch in iter(lambda: list(islice(texts, N_BATCH)), []):
            if not parts:
                say("Replies came without a token count: tokenizing their text")
                counters = {"tokenize": _server(site, ask), "tokenizer": _local(site, tokenizer, model, say)}
            indices, replies = zip(*batch, strict=True)
            counts = {name: count(replies) for name, count in counters.items()}
            parts.append(pa.table({"index": indices, **counts}, schema=COUNTS))
            say(f"  {sum(map(len, parts)):,} replies")
            if not any(part.column(name).null_count < len(part) for part in parts for name in RECOUNTS):
                say("Cannot count tokens: no /tokenize endpoint and no local tokenizer (--tokenizer DIR)")
                return
    if parts:
        run.save("counts.parquet", parts)


def _server(site: Site, ask: bool) -> Count:
    """The server's own tokenizer, for a minute; silent for good once it does not answer.

    Limits concurrency and rate, because the server may have other users.
    """
    import asyncio  # these here: a run whose server counts never needs them

    import httpx
    from asyncio_throttle.throttler import Throttler

    target = site.target
    until_s = time.monotonic() + ASKING_S if ask and site.engine.tokenizes else 0.0

    async def one(client: httpx.AsyncClient, throttler: Throttler, text: str) -> int | None:
        nonlocal until_s
        async with throttler:
            if time.monotonic() >= until_s:
                return None
            call = tokenize_call(text, target)
            most_bytes = LEAST_REPLY_BYTES + REPLY_BYTES_PER_TOKEN * len(call.body)
            headers = {**dict(call.headers), "Accept-Encoding": "identity"}
            try:
                async with (
                    asyncio.timeout(ASK_TIMEOUT_S),
                    client.stream("POST", call.path, content=call.body, headers=headers) as reply,
                ):
                    body = bytearray()
                    async for piece in reply.aiter_raw():
                        body += piece
                        if len(body) > most_bytes:
                            break
                count = count_in(HttpReply(reply.status_code, reply.headers, bytes(body)))
            except (httpx.HTTPError, TimeoutError):
                count = None
        if count is None:
            until_s = 0.0
        return count

    async def every(texts: Sequence[str]) -> list[int | None]:
        throttler = Throttler(MOST_ASKED_PER_S // 10, 0.1)
        login = tuple(target.login.split(":", 1)) if target.login else None
        client = httpx.AsyncClient(
            base_url=target.url,
            headers=list(target.headers),
            auth=(login[0], login[1]) if login else None,
            verify=Destination.of_target(target).tls() or False,
            timeout=ASK_TIMEOUT_S,
            limits=httpx.Limits(max_connections=N_ASKED_AT_ONCE),
            trust_env=False,
        )
        async with client:
            return await asyncio.gather(*(one(client, throttler, text) for text in texts))

    def count(texts: Sequence[str]) -> list[int | None]:
        nonlocal until_s
        if not until_s:
            return [None] * len(texts)
        with ThreadPoolExecutor(1) as apart:  # in a notebook this thread has a loop of its own
            try:
                return apart.submit(asyncio.run, every(texts)).result()
            except KeyboardInterrupt:
                until_s = 0.0
                raise

    return count


def _local(site: Site, folder: Path | None, model: str | None, say: Say) -> Count:
    """The tokenizer that is at hand: the one by which prompts were measured, else the folder's or model's."""
    found: Tokenizer | None = None
    try:
        found = local_tokenizer(folder, model)
        if found is None and not site.capabilities.token_id_prompts:
            found = tokenizer_for(folder, model, site)
    except Exception as error:  # whatever the library makes of a file that is none of its own
        say(f"The local tokenizer cannot be read: {error}")
    if found is None:
        return lambda texts: [None] * len(texts)
    tokenizer = found
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> list[int | None]:
        return [len(got.ids) for got in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    return count
