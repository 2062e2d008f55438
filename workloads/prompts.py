"""Synthetic prompts: exactly the asked number of tokens, uniformly random, never a special id."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.request import Request, WorkloadError

N_SALT_TOK = 8


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The token ids that prompts are drawn from, ascending, and who said so."""

    ids: NDArray[np.uint32]
    source: str


def vocabulary_from_tokenizer(tokenizer: dict[str, Any], source: str) -> Vocabulary:
    """Every id of a parsed `tokenizer.json` but those of added and special tokens."""
    pieces = tokenizer.get("model", {}).get("vocab", {})
    # BPE and WordPiece map pieces to ids, Unigram lists [piece, score] in the order of ids.
    ids = set(pieces.values()) if isinstance(pieces, dict) else set(range(len(pieces)))
    ids -= {token["id"] for token in tokenizer.get("added_tokens", [])}
    if not ids:
        raise WorkloadError(f"{source} lists no ordinary tokens; expected a Hugging Face tokenizer.json")
    return Vocabulary(np.array(sorted(ids), dtype=np.uint32), source)


def vocabulary_from_size(n_ids: int, source: str) -> Vocabulary:
    """The middle of a vocabulary of which only the size is known.

    Special ids stand at the low end (Llama-2, Gemma, OPT: control tokens and bytes) or at the high end
    (Llama-3, Qwen, GPT-2); between an eighth and seven eighths no known tokenizer has one.
    """
    if n_ids < 16:
        raise WorkloadError(
            f"a vocabulary of {n_ids} ids is too small for synthetic prompts; expected 16 or more"
        )
    return Vocabulary(np.arange(n_ids // 8, n_ids * 7 // 8, dtype=np.uint32), source)


def draw_prompt(n_tok: int, vocabulary: Vocabulary, rng: np.random.Generator) -> array[int]:
    """`n_tok` ids, each uniform over the vocabulary: two prompts share a prefix only by chance."""
    drawn = vocabulary.ids[rng.integers(0, len(vocabulary.ids), n_tok)]
    return array("I", drawn.astype(np.uint32).tobytes())


def salted(request: Request, salt: str, vocabulary: Vocabulary) -> Request:
    """The request with its first 8 ids overwritten by ids derived from `salt` and its own index.

    The same salt gives the same bytes; another salt shares no prefix with any earlier run, so that no prefix
    cache can serve a repeat. Text prompts carry their salt in the text and are returned as they are.
    """
    if request.prompt_ids is None:
        return request
    digest = hashlib.sha256(f"{salt}/{request.index}".encode()).digest()
    picks = np.frombuffer(digest, dtype="<u4")[:N_SALT_TOK] % len(vocabulary.ids)
    head = array("I", vocabulary.ids[picks].astype(np.uint32).tobytes())
    return replace(request, prompt_ids=_overwrite_head(request.prompt_ids, head))


def _overwrite_head(prompt_ids: Sequence[int], head: array[int]) -> array[int]:
    ids = array("I", prompt_ids)
    n = min(len(head), len(ids))
    ids[:n] = head[:n]
    return ids
