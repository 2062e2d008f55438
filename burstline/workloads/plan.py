"""A plan: every request of a run and when it is due, fixed before the first byte is sent.

With the prefixes that prompts share, what a prefix cache can make of them at most, and a warm-up in the
load's own shape.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burstline.workloads.lengths import Lengths, draw_both
from burstline.workloads.prompts import OF_GROUP, DrawnRequests, Segments, Vocabulary, rng
from burstline.workloads.request import GREEDY, Request, RequestKind, Sampling, WorkloadError
from burstline.workloads.spec import Sharing

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Prompt = Sequence[object] | NDArray[np.int64]

BLOCK_TOK: Final = 16
"""Caches share whole blocks; this is vLLM's and TGI's on a GPU, where the server does not say its own."""

Ints = NDArray[np.int64]


def check_shared(sharing: Sharing, n_prompt_tok: Ints) -> None:
    """WorkloadError where a prompt is shorter than the prefix that it shares."""
    if (short := n_prompt_tok < (sharing.shared_tok or 0)).any():
        raise WorkloadError(
            f"--shared-prefix {sharing.shared_tok} is longer than a prompt of "
            f"{n_prompt_tok[short][0]} tokens; the prefix is part of --prompt-tokens: raise that"
        )


def shared_segments(
    sharing: Sharing, index: Ints, n_prompt_tok: Ints, seed: int, block_tok: int
) -> tuple[Segments, list[tuple[int, int]]]:
    """The segments of each prompt, and (key, tokens) of every prefix as long as any prompt uses it."""
    n = len(index)
    group = rng(seed, "groups").integers(0, sharing.groups, n)
    if sharing.hit is None:
        shared = np.full(n, sharing.shared_tok or 0, dtype=np.int64)
        check_shared(sharing, n_prompt_tok)
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


def chain_of(prompt: Prompt, block_tok: int) -> list[int]:
    """The name of each whole block of a prompt: a hash of its tokens and of all that stands before them."""
    name, chain = 0, list[int]()
    for start in range(0, len(prompt) - block_tok + 1, block_tok):
        block = prompt[start : start + block_tok]
        name = hash((name, block.tobytes() if isinstance(block, array | np.ndarray) else tuple(block)))
        chain.append(name)
    return chain


def hits(prompts: Iterable[Prompt], block_tok: int = BLOCK_TOK) -> list[int]:
    """How many first tokens of each prompt, in order, some earlier prompt begins with: whole blocks only.

    At least one token is always left to be computed, as in every engine: the last one makes the first output.
    """
    tree: set[int] = set()
    counts = []
    for prompt in prompts:
        chain = chain_of(prompt, block_tok)
        found = takewhile(tree.__contains__, chain[: (len(prompt) - 1) // block_tok])
        counts.append(sum(block_tok for _ in found))
        tree.update(chain)
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

    def in_tokens(request: Request) -> Prompt:
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


PRIMING: Final = "priming"
"""The stage that fills the prefix cache."""
MOST_IDS: Final = 20_000_000
"""Up to this many prompt tokens (80 MB) a plan is hashed and kept as the ids themselves; beyond, as what they
are drawn from."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests sent before the measurement, and drained: a burst of warm-up, or what fills a prefix cache."""

    name: str
    requests: Sequence[Request]
    due_ns: array[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Every request of a run. `due_ns[i]` is when `requests[i]` is due, ns from the run's start, ascending;
    for a turn that follows others it is its session's start, since it is due when those have ended.

    `sha256` covers due times, prompts, lengths and sampling, not the salt: two plans with the same hash ask
    for the same work at the same times. `contents_sha256` is of the requests as they stand here, if `sha256`
    is of what they were made from (drawn prompts that became text); else None. `stages` are sent before, in
    this order; the indices of their requests go on from those of `requests`. The hash does not cover them:
    they measure nothing. `dropped` counts the rows of a data set or trace that could not be used, by reason.
    """

    requests: Sequence[Request]
    due_ns: array[int]
    seed: int
    sha256: str
    stages: tuple[Stage, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict, compare=False)
    contents_sha256: str | None = None

    @property
    def prompt_tok(self) -> NDArray[np.int64]:
        return self._lengths("n_prompt_tok")

    @property
    def output_tok(self) -> NDArray[np.int64]:
        return self._lengths("n_output_tok")

    def _lengths(self, name: str) -> NDArray[np.int64]:
        if isinstance(self.requests, DrawnRequests):
            return self.requests.column(name)
        return np.array([getattr(request, name) for request in self.requests], dtype=np.int64)

    @property
    def longest_output_tok(self) -> int:
        return int(self.output_tok.max(initial=0))


@dataclass(frozen=True, slots=True)
class Shape:
    """What every request of a synthetic workload looks like."""

    prompt_tok: Lengths
    output_tok: Lengths
    sampling: Sampling = GREEDY
    kind: RequestKind = RequestKind.GENERATE
    sharing: Sharing | None = None


def make_plan(
    shape: Shape, due_s: ArrayLike, vocabulary: Vocabulary, seed: int, block_tok: int = BLOCK_TOK
) -> Plan:
    """One request per due time (seconds from the run's start, ascending).

    `block_tok` is the size of the server's cache blocks, for prompts that share prefixes. Where a share of
    cache hits is asked for, the plan has a stage that fills the cache.
    """
    n = len(np.asarray(due_s))
    prompt_tok, output_tok = draw_both(shape.prompt_tok, shape.output_tok, n, seed)
    index = np.arange(n, dtype=np.int64)
    segments: Segments | None = None
    prefixes: list[tuple[int, int]] = []
    if shape.sharing is not None:
        segments, prefixes = shared_segments(shape.sharing, index, prompt_tok, seed, block_tok)
    if shape.kind is not RequestKind.GENERATE:
        output_tok = np.ones(n, dtype=np.int64)  # the one event that brings the answer
    rows = (index, prompt_tok, output_tok)
    requests = DrawnRequests(*rows, vocabulary, seed, segments, sampling=shape.sampling, kind=shape.kind)
    plan = plan_of(requests, due_s, seed)
    if shape.sharing is None or shape.sharing.hit is None or not prefixes:
        return plan
    return replace(plan, stages=(_priming(prefixes, n, vocabulary, seed),))


def plan_of(requests: Sequence[Request], due_s: ArrayLike, seed: int) -> Plan:
    """Requests that are due so many seconds from the run's start, each."""
    due_ns = array("q", (np.asarray(due_s, dtype=np.float64) * 1e9).round().astype(np.int64).tobytes())
    return Plan(requests, due_ns, seed, fingerprint(requests, due_ns))


def asking(plan: Plan, **fields: Any) -> Plan:
    """The same requests with these fields of `Request`, `sampling` or `ignore_eos`."""
    if isinstance(plan.requests, DrawnRequests):
        requests: Sequence[Request] = replace(plan.requests, **fields)
    else:
        requests = tuple(replace(request, **fields) for request in plan.requests)
    return replace(plan, requests=requests, sha256=fingerprint(requests, plan.due_ns))


def _priming(prefixes: list[tuple[int, int]], first: int, vocabulary: Vocabulary, seed: int) -> Stage:
    """One request for each shared prefix, a token longer: the last token of a prompt is always computed."""
    n = len(prefixes)
    index = np.arange(first, first + n, dtype=np.int64)
    keys = np.stack([[key for key, _ in prefixes], index], axis=1).astype(np.int64)
    n_tok = np.stack([[k for _, k in prefixes], np.ones(n)], axis=1).astype(np.int64)
    segments = Segments(np.arange(0, 2 * n + 1, 2, dtype=np.int64), keys.ravel(), n_tok.ravel())
    ones = np.ones(n, dtype=np.int64)
    rows = (index, n_tok.sum(axis=1), ones)
    requests = DrawnRequests(*rows, vocabulary, seed, segments, stage=PRIMING)
    return Stage(PRIMING, requests, array("q", [0] * n))


def fingerprint(requests: Sequence[Request], due_ns: array[int]) -> str:
    """The sha256 of everything a server is asked for, and when.

    Of very many drawn prompts it is that of what they are drawn from: they need not be made for it.
    """
    digest = hashlib.sha256(due_ns.tobytes())
    if isinstance(requests, DrawnRequests) and requests.n_tok > MOST_IDS:
        digest.update(requests.sha256())
        return digest.hexdigest()
    for request in requests:
        sampling, turn = request.sampling, request.turn
        facts: list[object] = [
            request.n_prompt_tok,
            request.n_output_tok,
            request.ignore_eos,
            [sampling.temperature, sampling.top_p, sampling.seed],
            request.prompt_text,
        ]
        if request.kind is not RequestKind.GENERATE or request.messages or turn:
            facts += [request.kind, request.messages, request.documents]
            facts += [[turn.session, turn.number, turn.after, turn.pause_ns]] if turn else []
        digest.update(json.dumps(facts).encode())
        if request.prompt_ids is not None:
            digest.update(array("I", request.prompt_ids).tobytes())
    return digest.hexdigest()


MOST_BURSTS: Final = 6
"""How many small bursts an automatic warm-up sends at most."""
N_BURST: Final = 8
"""Requests of one of them."""
N_BURST_OUTPUT: Final = 32
"""Output tokens of each at most: enough for every kernel to have run at this batch size."""
LEAST_PROMPT: Final = 16
"""Tokens that stand for a prompt that only the server can count."""


def with_warm_up(plan: Plan, warm_up: int | Literal["auto"], vocabulary: Vocabulary) -> Plan:
    """The plan with its warm-up in front of its other stages: the plan's own lengths, other prompts."""
    due_ns = np.frombuffer(plan.due_ns, dtype=np.int64)
    if warm_up == "auto":
        n_burst = min(N_BURST, len(due_ns))
        parts = [(f"warm-up {k}", n_burst, array("q", [0] * n_burst)) for k in range(1, MOST_BURSTS + 1)]
    else:
        parts = [("warm-up", warm_up, _due(due_ns, warm_up))]
    first = len(plan.requests) + sum(len(stage.requests) for stage in plan.stages)
    stages = []
    for name, n, own_ns in parts:
        stages.append(Stage(name, _like(plan, n, first, name, vocabulary, short=warm_up == "auto"), own_ns))
        first += n
    return replace(plan, stages=(*stages, *plan.stages))


def _due(due_ns: NDArray[np.int64], n: int) -> array[int]:
    """When each of n requests is due: as in the load, repeated where that is shorter."""
    if len(due_ns) < 2:
        return array("q", [0] * n)
    span_ns = int(due_ns[-1] - due_ns[0]) + int(np.diff(due_ns).mean())
    k = np.arange(n)
    at_ns = due_ns[k % len(due_ns)] - due_ns[0] + k // len(due_ns) * span_ns
    return array("q", at_ns.astype(np.int64).tobytes())


def _like(
    plan: Plan, n: int, first: int, name: str, vocabulary: Vocabulary, *, short: bool
) -> Sequence[Request]:
    """n requests with lengths that the plan has, and private prompts; of rerank requests copies."""
    example = plan.requests[0]
    picks = rng(plan.seed, name).integers(0, len(plan.requests), n)
    if short:  # every burst is the same work: only then can two be compared
        picks = np.arange(n)
    if example.kind is RequestKind.RERANK:
        return tuple(replace(plan.requests[int(k)], index=first + i, stage=name) for i, k in enumerate(picks))
    prompt_tok, output_tok = plan.prompt_tok[picks], plan.output_tok[picks]
    prompt_tok[prompt_tok == 0] = LEAST_PROMPT
    if short:
        output_tok = np.minimum(output_tok, N_BURST_OUTPUT)
    numbers = np.arange(first, first + n, dtype=np.int64)
    kind = example.kind
    return DrawnRequests(numbers, prompt_tok, output_tok, vocabulary, plan.seed, kind=kind, stage=name)
