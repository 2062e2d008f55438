"""One forward pass, and its ops on one device: products, attention, elementwise passes and collectives.

Formulas: a linear of [T, K] x [K, N] takes 2TKN FLOPs; a query that sees E keys takes 2hE for the scores and
2hE for the values (h: head size). Bytes are what must cross the memory bus at least: weights once, inputs and
outputs of each product once, the cache once per request. Biases and scales per channel are left out.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Literal

import numpy as np
import numpy.typing as npt

from burstline.errors import RooflineError
from burstline.roofline.model.shapes import (
    ELEMENT_BYTES,
    Attention,
    DeltaNet,
    Dense,
    Layer,
    Linear,
    Mla,
    ModelShape,
    Moe,
    Parallel,
    Quant,
    check_parallel,
    token_kv_bytes,
)

Ints = npt.NDArray[np.int64]
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass: per request, its new tokens, its context after them, and its logit rows."""

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
                "a step needs requests, each with a new token or more and a context that holds them;"
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

    def phases(self) -> list[tuple[Phase, "Step"]]:
        """The prefill part and the decode part, where there are any.

        A request decodes when it adds one token, or several that all want logits over a cached context
        (a draft under verification).
        """
        decode = (self.new_tok == 1) | ((self.logits == self.new_tok) & (self.context_tok > self.new_tok))
        parts: list[tuple[Phase, Step]] = []
        if not decode.all():
            parts.append(("prefill", self._where(~decode)))
        if decode.any():
            parts.append(("decode", self._where(decode)))
        return parts

    @property
    def phase(self) -> Phase:
        """Prefill where it computes any prompt."""
        return "prefill" if any(phase == "prefill" for phase, _ in self.phases()) else "decode"

    def _where(self, mask: npt.NDArray[np.bool_]) -> "Step":
        return Step(self.new_tok[mask], self.context_tok[mask], self.logits[mask])

    def keys_seen(self, window: int | None = None, chunk: int | None = None) -> int:
        """How many (query, key) pairs a causal mask leaves: sum of qc - q(q-1)/2.

        Fewer with a window, or where each chunk of positions sees itself only.
        """
        q, c = self.new_tok, self.context_tok
        if chunk is not None:
            return int((_below(c, chunk) - _below(c - q, chunk)).sum())
        if window is None:
            return int((q * c - q * (q - 1) // 2).sum())
        before = c - q
        growing = np.clip(window - before, 0, q)  # queries that do not fill the window yet
        return int((growing * before + growing * (growing + 1) // 2 + (q - growing) * window).sum())

    def keys_full(self, window: int | None = None) -> int:
        """(Query, key) pairs of the whole rectangle over the keys that must be read."""
        return int((self.new_tok * self._keys(window)).sum())

    def keys_read(self, window: int | None = None, chunk: int | None = None) -> int:
        """Distinct keys that must be read, over all requests."""
        if chunk is not None:
            return int((self.context_tok - (self.context_tok - self.new_tok) // chunk * chunk).sum())
        return int(self._keys(window).sum())

    def _keys(self, window: int | None) -> Ints:
        return self.context_tok if window is None else np.minimum(self.context_tok, window - 1 + self.new_tok)


def _below(n_tok: Ints, chunk: int) -> Ints:
    """(Query, key) pairs of the first `n_tok` positions, each seeing its chunk up to itself."""
    whole, rest = n_tok // chunk, n_tok % chunk
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel of a step on one device. Every amount is of one run of it; the step runs it `count` times.

    `flops` counts each query against the keys it sees (causal); `flops_full` against the whole rectangle, as
    eager attention computes it and torch's FlopCounterMode counts it. A matmul is `groups` products of
    m x n x k (groups > 1: the experts a batch is expected to touch, m: rows per expert). An attention has
    `groups` requests of on average m new tokens against n keys of head size k, its `phase`, and its heads on
    this device. `avoidable_bytes` are the weights of experts that a
    batch is expected to touch but need not. `kv_element_bytes` is how wide the cache is that an attention
    reads. A collective moves `link_bytes` (the whole buffer, as NCCL counts a message; for all_to_all what
    one rank sends) among `n_ranks`; a send's `n_ranks` is how many devices its two stages span.
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
    phase: Phase | Literal[""] = ""
    n_heads: int = 0
    collective: Literal["", "all_reduce", "all_gather", "all_to_all", "send"] = ""
    link_bytes: float = 0
    n_ranks: int = 1
    avoidable_bytes: float = 0
    kv_element_bytes: float = 0

    @property
    def bytes(self) -> float:
        """What one run is expected to move to and from memory."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory; 0 where nothing is computed."""
        return self.flops / self.bytes if self.bytes else 0.0


def ops(
    model: ModelShape,
    quant: Quant,
    parallel: Parallel,
    step: Step,
    *,
    expert_share: float = 1.0,
    absorb: bool = True,
) -> list[Op]:
    """Everything one device does in one step, in the order it first runs; equal ops are one row with a count.

    With pipeline stages, the ops of all stages: a step passes through each. `expert_share` is how much of the
    uniform expectation of distinct experts a batch really touches (skewed routing: 0.75-1). `absorb` decodes
    latent attention in the latent space, as engines do; without it keys and values are expanded each time.
    """
    check_parallel(model, parallel)
    run = _Pass(model, quant, parallel, step, expert_share, absorb)
    stream = ELEMENT_BYTES[quant.stream]
    rows = step.n_tok * model.d * stream
    found = [Op("embedding", "elementwise", 1, quant.stream, m=step.n_tok, n=model.d, activation_bytes=rows)]
    found += _all_reduce(run, 1)
    for layer in model.layers:
        found += _layer_ops(run, layer)
    if parallel.pp > 1:
        send = Op("send", "collective", parallel.pp - 1, quant.stream, m=step.n_tok, n=model.d)
        found.append(replace(send, collective="send", link_bytes=rows, n_ranks=2 * parallel.tp))
    found.append(_elementwise(run, "final_norm", 1, model.d, 2))
    if step.n_logits:
        found += _logits(run)
    return _merged(found)


def matmul(name: str, rows: float, n: int, k: int, quant: Quant, *, count: int = 1, groups: float = 1) -> Op:
    """`groups` products of [rows / groups, k] x [k, n], each with a weight matrix of its own, read once.

    Inputs take the activations' bytes, outputs the stream's; the peak that applies is the activations' dtype
    (weights of fewer bits are unpacked to it).
    """
    inputs, outputs = ELEMENT_BYTES[quant.activations], ELEMENT_BYTES[quant.stream]
    flops = 2 * n * k * rows
    return Op(
        name, "matmul", count, quant.activations, m=rows if groups == 1 else rows / groups, n=n, k=k,
        groups=groups, flops=flops, flops_full=flops, weight_bytes=quant.weight_bytes * n * k * groups,
        activation_bytes=rows * (inputs * k + outputs * n),
    )  # fmt: skip


def experts_hit(n_experts: int, top_k: int, n_tok: float) -> float:
    """Distinct experts that `n_tok` tokens are expected to touch, each picking `top_k` at random."""
    return float(n_experts * (1 - (1 - top_k / n_experts) ** n_tok))


@dataclass(frozen=True, slots=True)
class _Pass:
    model: ModelShape
    quant: Quant
    parallel: Parallel
    step: Step
    expert_share: float
    absorb: bool


_BUT_COUNT = attrgetter(*(slot.name for slot in fields(Op) if slot.name != "count"))


def _merged(found: Iterable[Op]) -> list[Op]:
    merged: dict[object, Op] = {}
    for op in found:
        same = merged.get(one := _BUT_COUNT(op))
        merged[one] = replace(op, count=same.count + op.count) if same else op
    return list(merged.values())


def _layer_ops(run: _Pass, layer: Layer) -> Iterator[Op]:
    model, parallel, n = run.model, run.parallel, layer.count
    linears = layer.linears(model.d, parallel.tp, parallel.moe_tp, parallel.ep)
    at = next(i for i, linear in enumerate(linears) if linear.name == "o")
    before = n * model.norms_per_layer // 2
    # A norm adds to the residual stream: two read, two written.
    yield _elementwise(run, "norm", before, model.d, 4)
    for linear in linears[:at]:
        if linear.name != "kv_b":  # belongs to the attention: what it does depends on the phase
            yield from _linear(run, linear, n)
    yield from _attention_ops(run, layer.attention, n)
    yield from _linear(run, linears[at], n)
    yield from _all_reduce(run, n)
    yield _elementwise(run, "norm", n * model.norms_per_layer - before, model.d, 4)
    if isinstance(layer.ffn, Moe):
        yield from _moe_ops(run, layer.ffn, linears[at + 1 :], n)
    else:
        yield from _dense_ops(run, layer.ffn, linears[at + 1 :], n)
    yield from _all_reduce(run, n)


def _linear(run: _Pass, linear: Linear, count: int) -> Iterator[Op]:
    quant, rows = run.quant.of(linear.name, linear.quantised), run.step.n_tok
    yield from _quantise(quant, rows, linear.k, count)
    yield matmul(linear.name, rows, linear.n, linear.k, quant, count=count)


def _quantise(quant: Quant, rows: float, width: int, count: int) -> Iterator[Op]:
    """A pass over a product's input: read in the stream's dtype, written in the activations'."""
    if quant.quantises:
        moved = (ELEMENT_BYTES[quant.stream] + ELEMENT_BYTES[quant.activations]) * rows * width
        yield Op("quantise", "elementwise", count, quant.stream, m=rows, n=width, activation_bytes=moved)


def _elementwise(
    run: _Pass, name: str, count: int, width: float, passes: int, rows: float | None = None
) -> Op:
    """A pass over `rows` (the step's tokens) x `width` elements, read or written `passes` times."""
    rows = run.step.n_tok if rows is None else rows
    moved = passes * rows * width * ELEMENT_BYTES[run.quant.stream]
    return Op(name, "elementwise", count, run.quant.stream, m=rows, n=width, activation_bytes=moved)


def _attention_ops(run: _Pass, attention: Attention | Mla | DeltaNet, count: int) -> Iterator[Op]:
    tp, step = run.parallel.tp, run.step
    if isinstance(attention, DeltaNet):
        for phase, part in step.phases():
            yield _delta_rule(run, attention, phase, part, count)
        return
    heads = attention.n_heads // tp
    kv_bytes = token_kv_bytes(attention, tp, run.quant.kv)
    if isinstance(attention, Mla):
        yield _elementwise(run, "rope", count, heads * attention.rope_dim + attention.rope_dim, 2)
    else:
        turned = (heads + attention.kv_heads(tp)) * attention.head_dim
        if attention.qk_norm:
            yield _elementwise(run, "qk_norm", count, turned, 2)
        if attention.rope:
            yield _elementwise(run, "rope", count, turned, 2)
    yield Op(
        "kv_write", "elementwise", count, run.quant.kv, m=step.n_tok, n=attention.kv_elements(tp),
        kv_bytes=step.n_tok * kv_bytes,
    )  # fmt: skip
    for phase, part in step.phases():
        if not isinstance(attention, Mla):
            h = attention.head_dim
            kv = kv_bytes * part.keys_read(attention.window, attention.chunk)
            yield _attention(run, phase, part, count, (heads, h, h), kv, attention.window, attention.chunk)
            continue
        if attention.index_topk:
            yield _index(run, attention, phase, part, count)
        if phase == "decode" and run.absorb:
            yield from _absorbed(run, attention, part, count)
        else:
            yield from _expanded(run, attention, phase, part, count)


def _attention(
    run: _Pass,
    phase: Phase,
    part: Step,
    count: int,
    dims: tuple[int, int, int],
    kv_bytes: float,
    window: int | None = None,
    chunk: int | None = None,
) -> Op:
    """Scores and values fused: queries in, outputs out, the cache once, no scores to memory.

    `dims` are query heads, a head's size in the scores, and in the values.
    """
    heads, qk_dim, v_dim = dims
    per_pair = 2 * heads * (qk_dim + v_dim)
    return Op(
        "attention", "attention", count, run.quant.stream, m=part.n_tok / part.n_requests,
        n=part.keys_read(window, chunk) / part.n_requests, k=qk_dim, groups=part.n_requests,
        flops=per_pair * part.keys_seen(window, chunk), flops_full=per_pair * part.keys_full(window),
        activation_bytes=part.n_tok * heads * (qk_dim + v_dim) * ELEMENT_BYTES[run.quant.stream],
        kv_bytes=kv_bytes, phase=phase, n_heads=heads, kv_element_bytes=ELEMENT_BYTES[run.quant.kv],
    )  # fmt: skip


def _absorbed(run: _Pass, mla: Mla, part: Step, count: int) -> Iterator[Op]:
    """Decode in the latent space: queries through W_UK, attention over the latent, results through W_UV."""
    heads, rank = mla.n_heads // run.parallel.tp, mla.kv_rank
    rows, quant = part.n_tok * heads, run.quant.of("kv_b")
    yield matmul("q_absorb", rows, rank, mla.nope_dim, quant, count=count, groups=heads)
    seen = mla.index_topk or None
    kv = part.keys_read(seen) * mla.latent * ELEMENT_BYTES[run.quant.kv]
    yield _attention(run, "decode", part, count, (heads, rank + mla.rope_dim, rank), kv, seen)
    yield matmul("v_absorb", rows, mla.v_dim, rank, quant, count=count, groups=heads)


def _expanded(run: _Pass, mla: Mla, phase: Phase, part: Step, count: int) -> Iterator[Op]:
    """Keys and values of the whole context made from the latent, then ordinary attention over them."""
    heads = mla.n_heads // run.parallel.tp
    wide = heads * (mla.nope_dim + mla.v_dim)
    keys = part.keys_read()
    yield matmul("kv_b", keys, wide, mla.kv_rank, run.quant.of("kv_b"), count=count)
    kv = keys * (wide + mla.rope_dim) * ELEMENT_BYTES[run.quant.stream]
    dims = heads, mla.nope_dim + mla.rope_dim, mla.v_dim
    yield _attention(run, phase, part, count, dims, kv, mla.index_topk or None)


def _index(run: _Pass, mla: Mla, phase: Phase, part: Step, count: int) -> Op:
    """Scores of every query against every index key of its context; both have 8 bits."""
    op = _attention(
        run, phase, part, count, (mla.index_heads, mla.index_dim, 0), part.keys_read() * mla.index_dim
    )
    return replace(op, name="indexer", kv_element_bytes=1)


def _delta_rule(run: _Pass, delta: DeltaNet, phase: Phase, part: Step, count: int) -> Op:
    """Each token decays its heads' states, reads them twice and adds one outer product: 6 FLOPs an element.

    A state is read and written once a step, in fp32. Chunked kernels compute more and move as much. `m`,
    `groups` and heads are as in an attention.
    """
    tp, n_tok = run.parallel.tp, part.n_tok
    wide = (2 * delta.n_heads * delta.key_dim + 3 * delta.n_value_heads * delta.value_dim) // tp
    flops = 6 * n_tok * delta.n_value_heads * delta.key_dim * delta.value_dim // tp
    return Op(
        "delta_rule", "elementwise", count, run.quant.stream, m=n_tok / part.n_requests, n=wide,
        groups=part.n_requests, flops=flops, flops_full=flops, phase=phase,
        activation_bytes=n_tok * wide * ELEMENT_BYTES[run.quant.stream],
        kv_bytes=2 * 4 * delta.state_elements(tp) * part.n_requests,
        n_heads=max(1, delta.n_value_heads // tp),
    )  # fmt: skip


def _dense_ops(run: _Pass, ffn: Dense, linears: list[Linear], count: int, prefix: str = "") -> Iterator[Op]:
    up, down = linears
    yield from _linear(run, up, count)
    yield _elementwise(run, prefix + "act", count, down.k, 3 if ffn.gated else 2)
    yield from _linear(run, down, count)


def _moe_ops(run: _Pass, moe: Moe, linears: list[Linear], count: int) -> Iterator[Op]:
    by_name = {linear.name: linear for linear in linears}
    up, down = by_name["experts_gate_up"], by_name["experts_down"]
    parallel, quant = run.parallel, run.quant.of(up.name)
    n_tok = run.step.n_tok * (parallel.dp if parallel.ep > 1 else 1)  # expert ranks serve every replica
    hit = max(experts_hit(moe.n_experts, moe.top_k, n_tok) * run.expert_share, moe.top_k) / parallel.ep
    least = moe.top_k / parallel.ep
    rows = n_tok * moe.top_k if parallel.ep == 1 else n_tok * moe.top_k / parallel.ep
    yield from _linear(run, by_name["router"], count)
    yield from _all_to_all(run, moe, "dispatch", ELEMENT_BYTES[quant.activations], count)
    yield from _quantise(quant, run.step.n_tok, run.model.d, count)
    yield _experts(matmul(up.name, rows, up.n, up.k, quant, count=count, groups=hit), least)
    yield _elementwise(run, "experts_act", count, down.k, 3, rows)
    quant = run.quant.of(down.name)
    yield from _quantise(quant, rows, down.k, count)
    yield _experts(matmul(down.name, rows, down.n, down.k, quant, count=count, groups=hit), least)
    yield from _all_to_all(run, moe, "combine", ELEMENT_BYTES[quant.stream], count)
    if moe.d_ff_shared:
        shared = [by_name["shared_gate_up"], by_name["shared_down"]]
        yield from _dense_ops(run, Dense(moe.d_ff_shared), shared, count, "shared_")
    if moe.shared_gate:
        yield from _linear(run, by_name["shared_gate"], count)


def _experts(op: Op, least: float) -> Op:
    """The product of the experts hit; `least` is how many of them any batch reads."""
    avoidable = op.weight_bytes * (1 - least / op.groups)
    return replace(op, avoidable_bytes=avoidable)


def _all_to_all(run: _Pass, moe: Moe, name: str, element_bytes: float, count: int) -> Iterator[Op]:
    """Tokens to the ranks of their experts, or back. Within one replica every rank has them already."""
    ep, dp = run.parallel.ep, run.parallel.dp
    if ep == 1 or dp == 1:
        return
    elsewhere = moe.n_experts - moe.n_experts // ep
    missed = math.comb(elsewhere, moe.top_k) / math.comb(moe.n_experts, moe.top_k)
    n_ranks_hit = ep * (1 - missed)  # a token goes once to each rank that has any of its experts
    sent = run.step.n_tok / run.parallel.tp * n_ranks_hit * run.model.d * element_bytes
    op = Op(name, "collective", count, run.quant.stream, m=run.step.n_tok, n=run.model.d)
    yield replace(op, collective="all_to_all", link_bytes=sent, n_ranks=ep)


def _all_reduce(run: _Pass, count: int) -> Iterator[Op]:
    if run.parallel.tp > 1:
        message = run.step.n_tok * run.model.d * ELEMENT_BYTES[run.quant.stream]
        op = Op("all_reduce", "collective", count, run.quant.stream, m=run.step.n_tok, n=run.model.d)
        yield replace(op, collective="all_reduce", link_bytes=message, n_ranks=run.parallel.tp)


def _logits(run: _Pass) -> Iterator[Op]:
    model, tp, rows = run.model, run.parallel.tp, run.step.n_logits
    yield matmul("lm_head", rows, -(-model.vocab // tp), model.d, run.quant.plain)
    if tp > 1:
        message = rows * model.vocab * ELEMENT_BYTES[run.quant.stream]
        op = Op("all_gather", "collective", 1, run.quant.stream, m=rows, n=model.vocab)
        yield replace(op, collective="all_gather", link_bytes=message, n_ranks=tp)
