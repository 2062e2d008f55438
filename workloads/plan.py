"""A plan: every request of a run and when it is due, fixed before the first byte is sent."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workloads.lengths import Lengths
from workloads.prompts import Vocabulary, draw_prompt
from workloads.request import GREEDY, Request, Sampling
from workloads.seeds import rng


@dataclass(frozen=True, slots=True)
class Plan:
    """Every request of a run. `due_ns[i]` is when `requests[i]` is due, ns from the run's start, ascending.

    `sha256` covers due times, prompts, lengths and sampling, not the salt: two plans with the same hash ask
    for the same work at the same times.
    """

    requests: tuple[Request, ...]
    due_ns: array[int]
    seed: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What every request of a workload looks like."""

    prompt_tok: Lengths
    output_tok: Lengths
    ignore_eos: bool = True
    sampling: Sampling = GREEDY


def make_plan(shape: Shape, due_s: Sequence[float], vocabulary: Vocabulary, seed: int) -> Plan:
    """One request per due time (seconds from the run's start, ascending)."""
    n = len(due_s)
    prompt_tok = shape.prompt_tok.draw(n, rng(seed, "prompt lengths"))
    output_tok = shape.output_tok.draw(n, rng(seed, "output lengths"))
    prompts = rng(seed, "prompts")
    requests = tuple(
        Request(
            index=i,
            prompt_ids=draw_prompt(int(prompt_tok[i]), vocabulary, prompts),
            prompt_text=None,
            n_prompt_tok=int(prompt_tok[i]),
            n_output_tok=int(output_tok[i]),
            ignore_eos=shape.ignore_eos,
            sampling=shape.sampling,
        )
        for i in range(n)
    )
    due_ns = array("q", (np.asarray(due_s, dtype=np.float64) * 1e9).round().astype(np.int64).tobytes())
    return Plan(requests, due_ns, seed, fingerprint(requests, due_ns))


def fingerprint(requests: Sequence[Request], due_ns: array[int]) -> str:
    """The sha256 of everything a server is asked for, and when."""
    digest = hashlib.sha256(due_ns.tobytes())
    for request in requests:
        sampling = request.sampling
        facts = [
            request.n_prompt_tok,
            request.n_output_tok,
            request.ignore_eos,
            [sampling.temperature, sampling.top_p, sampling.seed],
            request.prompt_text,
        ]
        digest.update(json.dumps(facts).encode())
        if request.prompt_ids is not None:
            digest.update(array("I", request.prompt_ids).tobytes())
    return digest.hexdigest()
