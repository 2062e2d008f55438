"""Which token ids prompts may be drawn from: only ids that are known to be in the server's vocabulary.

An id beyond it kills some servers (SGLang's scheduler, a CUDA kernel's assertion), so none is ever sent to
learn the size from the error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from burstline.bench.server_session import Site
from burstline.machine.host_facts import cached_config
from burstline.servers.host.ready import send
from burstline.servers.messages import EngineError
from burstline.servers.protocol.openai import tokenize_call, tokens_in
from burstline.workloads.prompts import Vocabulary, vocabulary_from_size, vocabulary_from_tokenizer
from burstline.workloads.request import WorkloadError

ASSUMED = vocabulary_from_size(32_000, "assumed: no server was there to ask")
"""For plans that are never sent as ids."""
LEAST_IDS = 64
"""Fewer different ids make prompts that are no longer random."""
ASK_TIMEOUT_S = 60.0
N_WORDS_A_TEXT = 400
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def vocabulary_for(
    tokenizer: Path | None, vocab_size: int | None, model: str | None, site: Site
) -> Vocabulary:
    """The user's word first, then the model's folder, the server's own size, its folder, its tokenizer."""
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
    if site.identity.model and (folder := local_folder(site.identity.model)) is not None:
        vocabulary = vocabulary_of_folder(folder)
        if vocabulary is not None:
            return vocabulary
    return _vocabulary_by_tokenizing(site)


def _vocabulary_by_tokenizing(site: Site) -> Vocabulary:
    """The ids that the server's own tokenizer makes of some text: a sample, but each of them is valid."""
    ids: set[int] = set()
    with suppress(EngineError):  # it has no such endpoint, and closes the connection
        for text in _texts() if site.engine.tokenizes else ():
            made = tokens_in(send(site.target, tokenize_call(text, site.target), ASK_TIMEOUT_S))
            if made is None:
                break
            ids |= set(made)
    # The lowest ids are control tokens and bytes in many vocabularies; a tokenizer may add one to each text.
    ordinary = sorted(token_id for token_id in ids if token_id > 2)
    if len(ordinary) < LEAST_IDS:
        raise WorkloadError(
            f"the vocabulary of {site.engine.title} at {site.target.url} is not known: the server does not "
            "tell its size, and no tokenizer of its model is on this machine; give --tokenizer DIR or "
            "--vocab-size N"
        )
    return Vocabulary(np.array(ordinary, dtype=np.uint32), "the server's /tokenize")


def _texts() -> Sequence[str]:
    """Syllables, words of two of them, and numbers: short texts that break into many different tokens."""
    syllables = [first + vowel + last for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS]
    pairs = [a + b for a, b in zip(syllables, reversed(syllables), strict=True)]
    words = syllables + pairs[::2] + [word.capitalize() for word in syllables[::3]]
    words += [str(n) for n in range(0, 2000, 7)]
    return [" ".join(words[k : k + N_WORDS_A_TEXT]) for k in range(0, len(words), N_WORDS_A_TEXT)]


def local_folder(model: str) -> Path | None:
    """The folder of a model on this machine: a path, or a snapshot in Hugging Face's cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    config = cached_config(model)
    return config.parent if config else None


def vocabulary_of_folder(folder: Path) -> Vocabulary | None:
    """The ordinary ids of a model or tokenizer folder, None where it has neither tokenizer.json nor a size.

    Ids beyond the model's own `vocab_size` are left out: some tokenizers have more pieces than embeddings.
    """
    if not folder.is_dir():
        return None  # a name, or a file of weights
    size = _read_json(folder / "config.json").get("vocab_size")
    tokenizer = _read_json(folder / "tokenizer.json")
    if tokenizer:
        vocabulary = vocabulary_from_tokenizer(tokenizer, str(folder / "tokenizer.json"))
        if size is None:
            return vocabulary
        return Vocabulary(vocabulary.ids[vocabulary.ids < size].astype(np.uint32), vocabulary.source)
    return vocabulary_from_size(size, f"vocab_size in {folder / 'config.json'}") if size else None


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
