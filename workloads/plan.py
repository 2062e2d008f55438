"""A plan: every request of a run and when it is due, fixed before the first byte is sent."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burstline.workloads.lengths import Lengths, draw_both
from burstline.workloads.prefixes import BLOCK_TOK, shared_segments
from burstline.workloads.prompts import DrawnRequests, Segments, Vocabulary
from burstline.workloads.request import GREEDY, Request, RequestKind, Sampling
from burstline.workloads.spec import Sharing

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
    def output_tok(self) -> NDArray[np.int64]:
        """How many tokens each request asks for."""
        if isinstance(self.requests, DrawnRequests):
            return self.requests.column("n_output_tok")
        return np.array([request.n_output_tok for request in self.requests], dtype=np.int64)

    @property
    def longest_output_tok(self) -> int:
        return int(self.output_tok.max(initial=0))


@dataclass(frozen=True, slots=True)
class Shape:
    """What every request of a synthetic workload looks like."""

    prompt_tok: Lengths
    output_tok: Lengths
    ignore_eos: bool = True
    sampling: Sampling = GREEDY
    kind: RequestKind = RequestKind.GENERATE
    sharing: Sharing | None = None

    def draw(
        self,
        n: int,
        vocabulary: Vocabulary,
        seed: int,
        *,
        block_tok: int = BLOCK_TOK,
        first: int = 0,
        stage: str | None = None,
    ) -> tuple[DrawnRequests, list[tuple[int, int]]]:
        """`n` requests with indices from `first`, and the (key, tokens) of each prefix that they share."""
        prompt_tok, output_tok = draw_both(self.prompt_tok, self.output_tok, n, seed)
        index = np.arange(first, first + n, dtype=np.int64)
        segments: Segments | None = None
        prefixes: list[tuple[int, int]] = []
        if self.sharing is not None:
            segments, prefixes = shared_segments(self.sharing, index, prompt_tok, seed, block_tok)
        if self.kind is not RequestKind.GENERATE:
            output_tok = np.ones(n, dtype=np.int64)  # the one event that brings the answer
        rows = (index, prompt_tok, output_tok)
        more: dict[str, Any] = {
            "ignore_eos": self.ignore_eos,
            "sampling": self.sampling,
            "kind": self.kind,
            "stage": stage,
        }
        return DrawnRequests.of(*rows, vocabulary, seed, segments, **more), prefixes


def make_plan(
    shape: Shape, due_s: ArrayLike, vocabulary: Vocabulary, seed: int, block_tok: int = BLOCK_TOK
) -> Plan:
    """One request per due time (seconds from the run's start, ascending).

    `block_tok` is the size of the server's cache blocks, for prompts that share prefixes. Where a share of
    cache hits is asked for, the plan has a stage that fills the cache.
    """
    requests, prefixes = shape.draw(len(np.asarray(due_s)), vocabulary, seed, block_tok=block_tok)
    plan = plan_of(requests, due_ns_of(due_s), seed)
    if shape.sharing is None or shape.sharing.hit is None or not prefixes:
        return plan
    return replace(plan, stages=(_priming(prefixes, len(requests), vocabulary, seed),))


def plan_of(requests: Sequence[Request], due_ns: array[int], seed: int) -> Plan:
    return Plan(requests, due_ns, seed, fingerprint(requests, due_ns))


def with_sampling(plan: Plan, sampling: Sampling) -> Plan:
    """The same requests, their tokens chosen in this way."""
    if isinstance(plan.requests, DrawnRequests):
        requests: Sequence[Request] = replace(plan.requests, sampling=sampling)
    else:
        requests = tuple(replace(request, sampling=sampling) for request in plan.requests)
    return replace(plan, requests=requests, sha256=fingerprint(requests, plan.due_ns))


def due_ns_of(due_s: ArrayLike) -> array[int]:
    """Seconds as whole nanoseconds."""
    return array("q", (np.asarray(due_s, dtype=np.float64) * 1e9).round().astype(np.int64).tobytes())


def _priming(prefixes: list[tuple[int, int]], first: int, vocabulary: Vocabulary, seed: int) -> Stage:
    """One request for each shared prefix, a token longer: the last token of a prompt is always computed."""
    n = len(prefixes)
    index = np.arange(first, first + n, dtype=np.int64)
    keys = np.stack([[key for key, _ in prefixes], index], axis=1).astype(np.int64)
    n_tok = np.stack([[k for _, k in prefixes], np.ones(n)], axis=1).astype(np.int64)
    segments = Segments(np.arange(0, 2 * n + 1, 2, dtype=np.int64), keys.ravel(), n_tok.ravel())
    ones = np.ones(n, dtype=np.int64)
    rows = (index, n_tok.sum(axis=1), ones)
    requests = DrawnRequests.of(*rows, vocabulary, seed, segments, stage=PRIMING)
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
