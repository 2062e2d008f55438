"""Count the tokens of replies without a count, from their text.

The counts are taken while the server is still there and kept with the run, so that everything else can be
made again from its files.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from burstline.bench.plan_for_server import tokenizer_for
from burstline.bench.server_session import Say, Site
from burstline.measure.record.decode import uncounted
from burstline.measure.record.record import RECOUNTS
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.tables import COUNTS
from burstline.servers.host.ready import send
from burstline.servers.messages import EngineError
from burstline.servers.openai import count_in, tokenize_call
from burstline.workloads.data_sets import Server
from burstline.workloads.model_files import local_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


ASKING_S = 60.0
"""The server is asked for so long: what is left then has a local tokenizer's word, or none."""
ASK_TIMEOUT_S = 10.0
N_ASKED_AT_ONCE = 8
MOST_ASKED_PER_S = 500
N_BATCH = 1000

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
    until_s = time.monotonic() + ASKING_S if ask and site.engine.tokenizes else 0.0

    def one(text: str) -> int | None:
        nonlocal until_s
        if time.monotonic() >= until_s:
            return None
        time.sleep(N_ASKED_AT_ONCE / MOST_ASKED_PER_S)
        with suppress(EngineError):
            n = count_in(send(site.target, tokenize_call(text, site.target), ASK_TIMEOUT_S))
            if n is not None:
                return n
        until_s = 0.0
        return None

    def count(texts: Sequence[str]) -> list[int | None]:
        nonlocal until_s
        with ThreadPoolExecutor(N_ASKED_AT_ONCE) as pool:
            try:
                return list(pool.map(one, texts))
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
    server = Server(tokenizer=found)
    return lambda texts: [len(ids) for ids in server.ids_of(texts)]
