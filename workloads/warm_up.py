"""Warm-up: requests in the load's own shape, sent before what is measured."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.plan import Plan, Stage
from burstline.workloads.prompts import DrawnRequests, Vocabulary
from burstline.workloads.request import Request, RequestKind
from burstline.workloads.seeds import rng
from burstline.workloads.spec import WarmUp

MOST_BURSTS: Final = 6
"""How many small bursts an automatic warm-up sends at most."""
N_BURST: Final = 8
"""Requests of one of them."""
N_BURST_OUTPUT: Final = 32
"""Output tokens of each at most: enough for every kernel to have run at this batch size."""
LEAST_PROMPT: Final = 16
"""Tokens that stand for a prompt that only the server can count."""


def with_warm_up(plan: Plan, warm_up: WarmUp, vocabulary: Vocabulary) -> Plan:
    """The plan with its warm-up in front of its other stages: the plan's own lengths, other prompts.

    Seconds are those of the load's own schedule: as many requests as it has in its first so many seconds,
    all of them in a burst.
    """
    due_ns = np.frombuffer(plan.due_ns, dtype=np.int64)
    if warm_up.is_automatic:
        bursts = range(1, MOST_BURSTS + 1)
        names, sizes = [f"warm-up {k}" for k in bursts], [min(N_BURST, len(due_ns))] * MOST_BURSTS
    else:
        n = warm_up.n
        if n is None:
            n = int(np.searchsorted(due_ns, due_ns[0] + int((warm_up.seconds or 0) * 1e9), side="right"))
        names, sizes = ["warm-up"], [n]
    first = len(plan.requests) + sum(len(stage.requests) for stage in plan.stages)
    stages = []
    for name, n in zip(names, sizes, strict=True):
        requests = _like(plan, n, first, name, vocabulary, short=warm_up.is_automatic)
        stages.append(Stage(name, requests, _due(due_ns, n, warm_up)))
        first += n
    return replace(plan, stages=(*stages, *plan.stages))


def _due(due_ns: NDArray[np.int64], n: int, warm_up: WarmUp) -> array[int]:
    """When each of n requests is due: as in the load, repeated where that is shorter."""
    if warm_up.is_automatic or len(due_ns) < 2:
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
    if isinstance(plan.requests, DrawnRequests):
        prompt_tok, output_tok = (plan.requests.column(c)[picks] for c in ("n_prompt_tok", "n_output_tok"))
    else:
        some = [plan.requests[int(k)] for k in picks]
        prompt_tok = np.array([r.n_prompt_tok or LEAST_PROMPT for r in some], dtype=np.int64)
        output_tok = np.array([r.n_output_tok for r in some], dtype=np.int64)
    if short:
        output_tok = np.minimum(output_tok, N_BURST_OUTPUT)
    numbers = np.arange(first, first + n, dtype=np.int64)
    return DrawnRequests.of(
        numbers, prompt_tok, output_tok, vocabulary, plan.seed, kind=example.kind, stage=name
    )
