"""What one step of a model does on one device: every product, attention, elementwise pass and collective.

Formulas: a linear of [T, K] x [K, N] takes 2TKN FLOPs; a query that sees E keys takes 2hE for the scores and
2hE for the values (h: head size). Bytes are what must cross the memory bus at least: weights once, inputs and
outputs of each product once, the cache once per request. Biases and scales per channel are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from roofline.device import RooflineError
from roofline.model import ELEMENT_BYTES, Quant

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel of a step on one device. Every amount is of one run of it; the step runs it `count` times.

    `flops` counts each query against the keys it sees (causal); `flops_full` against the whole rectangle, as
    eager attention computes it and torch's FlopCounterMode counts it. A matmul is `groups` products of
    m x n x k (groups > 1: the experts a batch is expected to touch, m: rows per expert). An attention has
    `groups` requests of on average m new tokens against n keys of head size k, and its `phase`. A collective
    moves `link_bytes` (the message, by NCCL's convention: the full buffer) among `n_ranks`.
    """

    name: str
    kind: Literal["matmul", "attention", "elementwise", "collective"]
    count: int
    dtype: str
    m: float = 0
    n: float = 0
    k: float = 0
    groups: float = 1
    flops: float = 0
    flops_full: float = 0
    weight_bytes: float = 0
    activation_bytes: float = 0
    kv_bytes: float = 0
    phase: Literal["", "prefill", "decode"] = ""
    collective: Literal["", "all_reduce", "all_gather", "all_to_all", "send"] = ""
    link_bytes: float = 0
    n_ranks: int = 1

    @property
    def bytes(self) -> float:
        """What one run moves to and from memory."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory; 0 where nothing is computed."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one forward pass is asked: per request, its new tokens, its context after them, its logit rows."""

    new_tok: Ints
    context_tok: Ints
    logits: Ints

    @staticmethod
    def of(requests: Iterable[tuple[int, int, int]]) -> "Step":
        """A step of (new tokens, context after the step, rows of logits) for each request."""
        rows = np.array(list(requests), dtype=np.int64).reshape(-1, 3)
        if (
            len(rows) == 0
            or (rows[:, 0] < 1).any()
            or (rows[:, 1] < rows[:, 0]).any()
            or (rows[:, 2] < 0).any()
        ):
            raise RooflineError(
                "a step needs at least one request, each with 1 or more new tokens and a context that holds them;"
                f" got {rows.tolist()}"
            )
        return Step(rows[:, 0], rows[:, 1], rows[:, 2])

    @staticmethod
    def prefill(batch: int, n_prompt_tok: int, n_cached_tok: int = 0) -> "Step":
        """Whole prompts (or chunks after `n_cached_tok` of them); logits for the last token of each."""
        return Step.of([(n_prompt_tok, n_cached_tok + n_prompt_tok, 1)] * batch)

    @staticmethod
    def decode(batch: int, n_context_tok: int) -> "Step":
        """One new token for each of `batch` requests, `n_context_tok` with it."""
        return Step.of([(1, n_context_tok, 1)] * batch)

    @property
    def n_requests(self) -> int:
        return len(self.new_tok)

    @property
    def n_tok(self) -> int:
        """New tokens of all requests: the rows of every product but the LM head's."""
        return int(self.new_tok.sum())

    @property
    def n_logits(self) -> int:
        return int(self.logits.sum())

    def phases(self) -> list[tuple[Literal["prefill", "decode"], "Step"]]:
        """The prefill part and the decode part, where there are any.

        A request decodes when it adds one token, or several that all want logits over a cached context
        (a draft under verification).
        """
        decode = (self.new_tok == 1) | ((self.logits == self.new_tok) & (self.context_tok > self.new_tok))
        parts: list[tuple[Literal["prefill", "decode"], Step]] = []
        if not decode.all():
            parts.append(("prefill", self._where(~decode)))
        if decode.any():
            parts.append(("decode", self._where(decode)))
        return parts

    def _where(self, mask: npt.NDArray[np.bool_]) -> "Step":
        return Step(self.new_tok[mask], self.context_tok[mask], self.logits[mask])

    def keys_seen(self, window: int | None = None) -> int:
        """How many (query, key) pairs a causal mask leaves: sum of qc - q(q-1)/2, fewer with a window."""
        q, c = self.new_tok, self.context_tok
        if window is None:
            return int((q * c - q * (q - 1) // 2).sum())
        before = c - q
        growing = np.clip(window - before, 0, q)  # queries that do not fill the window yet
        return int((growing * before + growing * (growing + 1) // 2 + (q - growing) * window).sum())

    def keys_full(self, window: int | None = None) -> int:
        """(Query, key) pairs of the whole rectangle over the keys that must be read."""
        return int((self.new_tok * self._keys(window)).sum())

    def keys_read(self, window: int | None = None) -> int:
        """Distinct keys that must be read, over all requests."""
        return int(self._keys(window).sum())

    def _keys(self, window: int | None) -> Ints:
        return self.context_tok if window is None else np.minimum(self.context_tok, window - 1 + self.new_tok)


def matmul(
    name: str,
    m: float,
    n: int,
    k: int,
    quant: Quant,
    *,
    count: int = 1,
    groups: float = 1,
    quantised: bool = True,
) -> Op:
    """`groups` products of [m, k] x [k, n], each with a weight matrix of its own, read once.

    Inputs take the activations' bytes, outputs the stream's; the peak that applies is the activations' dtype
    (weights of 4 or 8 bits are unpacked to it).
    """
    stream = ELEMENT_BYTES[quant.stream]
    inputs = ELEMENT_BYTES[quant.activations] if quantised else stream
    flops = 2 * n * k * m * groups
    return Op(
        name,
        "matmul",
        count,
        quant.activations if quantised else quant.stream,
        m=m,
        n=n,
        k=k,
        groups=groups,
        flops=flops,
        flops_full=flops,
        weight_bytes=(quant.weight_bytes if quantised else stream) * n * k * groups,
        activation_bytes=m * groups * (inputs * k + stream * n),
    )
