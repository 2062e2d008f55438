"""What a prefix cache could serve: the prompts' own prefix tree, apart from any engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from workloads.request import Request

BLOCK_TOK = 16
"""Caches share whole blocks; this is vLLM's and TGI's on a GPU, where the server does not say its own."""


def hits(prompts: Iterable[Sequence[object]], block_tok: int = BLOCK_TOK) -> list[int]:
    """How many first tokens of each prompt, in order, some earlier prompt begins with: whole blocks only.

    At least one token is always left to be computed, as in every engine: the last one makes the first output.
    """
    tree: set[int] = set()
    found = []
    for prompt in prompts:
        node, n_shared, shared = 0, 0, True
        for start in range(0, len(prompt) - block_tok, block_tok):
            block = prompt[start : start + block_tok]
            node = hash((node, block.tobytes() if isinstance(block, array) else tuple(block)))
            shared = shared and node in tree
            n_shared += block_tok if shared else 0
            tree.add(node)
        found.append(n_shared)
    return found


def expected_hit_fraction(requests: Sequence[Request], salt: str | None, block_tok: int = BLOCK_TOK) -> float:
    """The share of all prompt tokens that a cache, empty at the start, could serve at most: 0..1.

    At most, because requests that are in flight together cannot serve each other. A salt makes the first ids
    of each request its own: then only texts can share, and nobody looks at ids.
    """
    words = {r.index: (r.prompt_text or "").split() for r in requests if r.prompt_ids is None}
    n_tok = sum(len(words[r.index]) if r.prompt_ids is None else r.n_prompt_tok for r in requests)
    ids = () if salt is not None else (r.prompt_ids for r in requests if r.prompt_ids is not None)
    return sum(hits(chain(ids, words.values()), block_tok)) / n_tok if n_tok else 0.0
