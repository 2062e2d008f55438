"""What a prefix cache could serve: the prompts' own prefix tree, apart from any engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workloads.plan import Plan
from workloads.prompts import N_SALT_TOK
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
            node = hash((node, tuple(prompt[start : start + block_tok])))
            shared = shared and node in tree
            n_shared += block_tok if shared else 0
            tree.add(node)
        found.append(n_shared)
    return found


def expected_hit_fraction(plan: Plan, salt: str | None, block_tok: int = BLOCK_TOK) -> float:
    """The share of all prompt tokens that a cache, empty at the start, could serve at most: 0..1.

    At most, because requests that are in flight together cannot serve each other.
    """
    prompts = [_as_sent(request, salt) for request in plan.requests]
    n_tok = sum(map(len, prompts))
    return sum(hits(prompts, block_tok)) / n_tok if n_tok else 0.0


def _as_sent(request: Request, salt: str | None) -> Sequence[object]:
    """Token ids, or words of a text. A salt makes the first ids the request's own, whatever their values."""
    if request.prompt_ids is None:
        return (request.prompt_text or "").split()
    if salt is None:
        return request.prompt_ids
    return [(request.index, k) for k in range(N_SALT_TOK)][: len(request.prompt_ids)] + list(
        request.prompt_ids[N_SALT_TOK:]
    )
