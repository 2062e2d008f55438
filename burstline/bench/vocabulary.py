"""Which token ids prompts may be drawn from: the tokenizer knows best, then the server, then its errors."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from burstline.bench.server_session import Site
from servers.host.ready import send
from workloads.prompts import Vocabulary, vocabulary_from_size, vocabulary_from_tokenizer
from workloads.request import Request, WorkloadError

LARGEST_VOCABULARY = 1 << 22
"""No published model comes near it; a server that takes this id does not check ids at all."""


ASSUMED = vocabulary_from_size(32_000, "assumed: no server was there to ask")


def vocabulary_for(
    tokenizer: Path | None, vocab_size: int | None, model: str | None, site: Site
) -> Vocabulary:
    """What the user says, else what the model's folder says, else what the server says or betrays."""
    if vocab_size is not None:
        return vocabulary_from_size(vocab_size, "--vocab-size")
    if tokenizer is not None:
        vocabulary = vocabulary_of_folder(tokenizer)
        if vocabulary is None:
            raise WorkloadError(f"--tokenizer {tokenizer}: expected a folder with tokenizer.json")
        return vocabulary
    if model is not None and (vocabulary := vocabulary_of_folder(Path(model))) is not None:
        return vocabulary
    if site.identity.vocab_size is not None:
        return vocabulary_from_size(site.identity.vocab_size, "the server")
    return vocabulary_by_asking(lambda token_id: _accepts(site, token_id))


def _accepts(site: Site, token_id: int) -> bool:
    request = Request(0, array("I", [token_id]), None, 1, 1)
    reply = send(site.target, site.engine.encode(request, site.target), 60.0)
    # vLLM refuses an id of a streamed request with an error inside a reply of status 200.
    return reply.status == 200 and site.engine.decode(reply).error is None


def vocabulary_of_folder(folder: Path) -> Vocabulary | None:
    """The ordinary ids of a model or tokenizer folder, None where it has neither tokenizer.json nor a size.

    Ids beyond the model's own `vocab_size` are left out: some tokenizers have more pieces than embeddings.
    """
    size = _read_json(folder / "config.json").get("vocab_size")
    tokenizer = _read_json(folder / "tokenizer.json")
    if tokenizer:
        vocabulary = vocabulary_from_tokenizer(tokenizer, str(folder / "tokenizer.json"))
        if size is None:
            return vocabulary
        return Vocabulary(vocabulary.ids[vocabulary.ids < size].astype(np.uint32), vocabulary.source)
    return vocabulary_from_size(size, f"vocab_size in {folder / 'config.json'}") if size else None


def vocabulary_by_asking(accepts: Callable[[int], bool]) -> Vocabulary:
    """The vocabulary found by bisection; `accepts(id)` says whether the server takes a prompt of that id."""
    if accepts(LARGEST_VOCABULARY):
        raise WorkloadError(
            "the server does not refuse token ids beyond its vocabulary, so its size cannot be found; "
            "give --tokenizer DIR or --vocab-size N"
        )
    low, high = 0, LARGEST_VOCABULARY
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    if low == 0:
        raise WorkloadError(
            "the server refuses every token id; give --tokenizer DIR or --vocab-size N, "
            "or --model if it serves more than one"
        )
    return vocabulary_from_size(high, "the server's out-of-range errors")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise WorkloadError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed
