"""Prefixes that prompts share: planned on purpose, and what a prefix cache can make of them at most."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.prompts import OF_GROUP, DrawnRequests, Segments
from burstline.workloads.request import Request, WorkloadError
from burstline.workloads.seeds import rng
from burstline.workloads.spec import Sharing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK_TOK: Final = 16
"""Caches share whole blocks; this is vLLM's and TGI's on a GPU, where the server does not say its own."""

Ints = NDArray[np.int64]


def shared_segments(
    sharing: Sharing, index: Ints, n_prompt_tok: Ints, seed: int, block_tok: int
) -> tuple[Segments, list[tuple[int, int]]]:
    """The segments of each prompt, and (key, tokens) of every prefix as long as any prompt uses it."""
    n = len(index)
    group = rng(seed, "groups").integers(0, sharing.groups, n)
    if sharing.hit is None:
        shared = np.full(n, sharing.shared_tok or 0, dtype=np.int64)
        if (short := n_prompt_tok < shared).any():
            raise WorkloadError(
                f"--shared-prefix {sharing.shared_tok} is longer than a prompt of "
                f"{n_prompt_tok[short][0]} tokens; the prefix is part of --prompt-tokens: raise that"
            )
    else:
        shared = _blocks_for(sharing.hit, n_prompt_tok, block_tok) * block_tok
    keys = np.stack([group + OF_GROUP, index], axis=1)
    n_tok = np.stack([shared, n_prompt_tok - shared], axis=1)
    used = n_tok > 0
    starts = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    longest = [(int(g), int(shared[group == g].max())) for g in np.unique(group)]
    return Segments(starts, keys[used], n_tok[used]), [(OF_GROUP + g, k) for g, k in longest if k]


def _blocks_for(hit: float, n_prompt_tok: Ints, block_tok: int) -> Ints:
    """Whole cached blocks of each prompt, so that their running sum follows `hit` times the tokens' sum."""
    room = (n_prompt_tok - 1) // block_tok  # the last token is always computed
    most = float((room * block_tok).sum() / n_prompt_tok.sum())
    if hit > most + 0.005:
        raise WorkloadError(
            f"--shared-prefix {hit * 100:.4g}%: a cache with blocks of {block_tok} tokens serves at most "
            f"{most:.1%} of these prompts, since a block counts whole and the last token is always computed; "
            "lower it, or ask for longer --prompt-tokens"
        )
    wanted, given = np.cumsum(n_prompt_tok) * hit / block_tok, 0
    blocks = np.empty(len(room), dtype=np.int64)
    for k, (until, least) in enumerate(zip(wanted.tolist(), room.tolist(), strict=True)):
        blocks[k] = min(max(round(until - given), 0), least)
        given += int(blocks[k])
    return blocks


def hits(prompts: Iterable[Sequence[object]], block_tok: int = BLOCK_TOK) -> list[int]:
    """How many first tokens of each prompt, in order, some earlier prompt begins with: whole blocks only.

    At least one token is always left to be computed, as in every engine: the last one makes the first output.
    """
    tree: set[int] = set()
    counts = []
    for prompt in prompts:
        node, n_shared, shared = 0, 0, True
        for start in range(0, len(prompt) - block_tok + 1, block_tok):
            block = prompt[start : start + block_tok]
            node = hash((node, block.tobytes() if isinstance(block, array) else tuple(block)))
            shared = shared and node in tree and start + block_tok < len(prompt)
            n_shared += block_tok if shared else 0
            tree.add(node)
        counts.append(n_shared)
    return counts


class PrefixTree:
    """An infinite prefix cache over prompts made of segments: what it holds, without any token."""

    def __init__(self) -> None:
        # (node, tokens of the segment before, key) -> (child, most tokens of this segment seen)
        self._edges: dict[tuple[int, int, int], tuple[int, int]] = {}

    def add(self, requests: DrawnRequests, block_tok: int = BLOCK_TOK) -> list[int]:
        """How many first tokens of each request stood before, as whole blocks; then holds them all."""
        segments, counts = requests.segments, []
        if segments is None:
            return [0] * len(requests)
        for row in requests.rows.tolist():
            part = slice(int(segments.starts[row]), int(segments.starts[row + 1]))
            n_shared = self._walk(segments.keys[part].tolist(), segments.n_tok[part].tolist())
            counts.append(min(n_shared, int(requests.n_prompt_tok[row]) - 1) // block_tok * block_tok)
        return counts

    def _walk(self, keys: list[int], n_toks: list[int]) -> int:
        node, n_before, n_shared, shared = 0, 0, 0, True
        for key, n_tok in zip(keys, n_toks, strict=True):
            edge = (node, n_before, key)
            child, seen = self._edges.get(edge, (len(self._edges) + 1, 0))
            if shared:
                n_shared += min(n_tok, seen)
                shared = seen >= n_tok
            self._edges[edge] = child, max(seen, n_tok)
            node, n_before = child, n_tok
        return n_shared


def expected_hit_fraction(
    requests: Sequence[Request],
    salt: str | None,
    block_tok: int = BLOCK_TOK,
    primed: Sequence[Request] = (),
    tokenizer: Tokenizer | None = None,
) -> float:
    """The share of all prompt tokens that a cache, empty at the start, could serve at most: 0..1.

    At most, because requests that are in flight together cannot serve each other. A salt makes the first ids
    of each family its own: then nothing is shared beyond what was planned. Texts carry their salt in
    themselves; `tokenizer` makes ids of them, without one they count by the word. `primed` were served before
    and count for nothing themselves.
    """
    if isinstance(requests, DrawnRequests):
        tree = PrefixTree()
        if isinstance(primed, DrawnRequests):
            tree.add(primed, block_tok)
        n_tok = int(requests.column("n_prompt_tok").sum())
        return sum(tree.add(requests, block_tok)) / n_tok if n_tok else 0.0

    def in_tokens(request: Request) -> Sequence[object]:
        text = request.prompt_text or ""
        if request.prompt_ids is not None:
            return request.prompt_ids
        return text.split() if tokenizer is None else tokenizer.encode(text).ids

    prompts = [in_tokens(r) for r in requests]
    n_tok = sum(map(len, prompts))
    if salt is not None and all(r.family is None and not r.verbatim for r in requests):
        prompts = [own for own, r in zip(prompts, requests, strict=True) if r.prompt_ids is None]
    before = [in_tokens(r) for r in primed]
    return sum(hits([*before, *prompts], block_tok)[len(before) :]) / n_tok if n_tok else 0.0
