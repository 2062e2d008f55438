"""A Llama decoder on numpy: RMSNorm, RoPE, grouped-query attention over the block KV cache, SwiGLU."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from servers.reference.config import ModelConfig
from servers.reference.kv import Index, KVCache
from servers.reference.weights import Array, Layer, Weights

GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
QUERY_TILE = 64
"""Query rows of one prefill attention tile: fewer cost calls, more compute what the causal mask hides."""
GATHER_BYTES = 1 << 21
"""Keys gathered at once in decode: fewer cost calls, more leave the cache between the copy and the matmul."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence: `ids` stand at positions start .. start + len(ids), in blocks `table`."""

    ids: Sequence[int]
    start: int
    table: Sequence[int]

    @property
    def context(self) -> int:
        """Tokens the last new one attends to, itself included."""
        return self.start + len(self.ids)


class Model:
    """The decoder. `spent_ns` adds up the time inside each GEMM, and "attention", until it is cleared."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        # Rounded where transformers rounds: one bit of a frequency is 3e-5 in a logit at position 300.
        exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        power = config.rope_theta ** exponent.astype(np.float64)
        self._inv_freq = np.float32(1) / power.astype(np.float32)
        self.spent_ns: dict[str, int] = {}
        self.clear_clock()

    def clear_clock(self) -> None:
        self.spent_ns = dict.fromkeys((*GEMMS, "attention"), 0)

    def forward(self, chunks: Sequence[Chunk], kv: KVCache) -> Array:
        """The last layer's output for every new token, (tokens, hidden), chunk after chunk.

        Writes the new tokens' keys and values into `kv`, whose tables must have room for them.
        """
        ids = np.concatenate([np.asarray(chunk.ids, np.intp) for chunk in chunks])
        slots = np.concatenate([kv.slots(chunk.table, chunk.start, len(chunk.ids)) for chunk in chunks])
        position = np.concatenate([np.arange(c.start, c.context, dtype=np.float32) for c in chunks])
        angle = np.outer(position, self._inv_freq)[:, None, :]
        rotation = (np.cos(angle), np.sin(angle))
        plan = _AttentionPlan.of(chunks, kv.block_size, self.config)
        x: Array = self.weights.embed[ids]
        with np.errstate(over="ignore"):  # exp(-g) of a very negative gate is inf, and g / inf the right 0
            for index, layer in enumerate(self.weights.layers):
                x += self._attend(index, layer, self._norm(x, layer.input_norm), rotation, slots, plan, kv)
                x += self._mlp(layer, self._norm(x, layer.post_norm))
        return x

    def logits(self, x: Array) -> Array:
        """(rows, vocabulary) for rows of what `forward` returned."""
        return self._gemm("lm_head", self._norm(x, self.weights.norm), self.weights.lm_head)

    def _gemm(self, name: str, x: Array, weight: Array) -> Array:
        began = time.monotonic_ns()
        product: Array = x @ weight
        self.spent_ns[name] += time.monotonic_ns() - began
        return product

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[1])
        normed: Array = x * (1.0 / np.sqrt(mean_square + np.float32(self.config.rms_norm_eps)))[:, None]
        normed *= weight
        return normed

    def _mlp(self, layer: Layer, x: Array) -> Array:
        gate_up = self._gemm("gate_up_proj", x, layer.gate_up)
        gate, up = np.hsplit(gate_up, 2)
        silu = np.negative(gate)
        np.exp(silu, out=silu)
        silu += 1.0
        np.divide(gate, silu, out=silu)
        silu *= up
        return self._gemm("down_proj", silu, layer.down)

    def _attend(
        self,
        index: int,
        layer: Layer,
        x: Array,
        rotation: tuple[Array, Array],
        slots: Index,
        plan: "_AttentionPlan",
        kv: KVCache,
    ) -> Array:
        config = self.config
        n_q, n_kv = config.num_attention_heads, config.num_key_value_heads
        qkv = self._gemm("qkv_proj", x, layer.qkv).reshape(len(x), n_q + 2 * n_kv, config.head_dim)
        began = time.monotonic_ns()
        rotated = _rotate(qkv[:, : n_q + n_kv], rotation)
        kv.write(index, slots, rotated[:, n_q:], qkv[:, n_q + n_kv :])
        q = rotated[:, :n_q] * np.float32(config.head_dim**-0.5)
        q = q.reshape(len(x), n_kv, n_q // n_kv, config.head_dim)
        mixed = np.empty_like(q)
        for first, chunk in plan.prefills:
            _attend_prefill(q, mixed, first, chunk, kv.gather(index, np.asarray([chunk.table], np.intp)))
        for rows, tables, hidden in plan.decodes:
            _attend_decode(q, mixed, rows, hidden, kv.gather(index, tables))
        self.spent_ns["attention"] += time.monotonic_ns() - began
        return self._gemm("o_proj", mixed.reshape(len(x), -1), layer.o)


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """Who attends how, worked out once for all layers.

    `prefills`: (first row, chunk). `decodes`: groups of sequences of like length, as (rows, padded block
    tables, which of the gathered positions lie beyond each sequence).
    """

    prefills: list[tuple[int, Chunk]]
    decodes: list[tuple[Index, Index, Array]]

    @staticmethod
    def of(chunks: Sequence[Chunk], block_size: int, config: ModelConfig) -> "_AttentionPlan":
        prefills: list[tuple[int, Chunk]] = []
        singles: list[tuple[int, Chunk]] = []
        row = 0
        for chunk in chunks:
            (prefills if len(chunk.ids) > 1 else singles).append((row, chunk))
            row += len(chunk.ids)
        singles.sort(key=lambda single: single[1].context)
        block_bytes = 4 * block_size * config.num_key_value_heads * config.head_dim
        groups = _groups(singles, block_size, GATHER_BYTES // block_bytes)
        return _AttentionPlan(prefills, [_padded(group, block_size) for group in groups])


def _groups(
    singles: list[tuple[int, Chunk]], block_size: int, n_blocks: int
) -> Iterator[list[tuple[int, Chunk]]]:
    """Cut `singles`, shortest first, into groups of at most `n_blocks` padded blocks (or of one sequence)."""
    group: list[tuple[int, Chunk]] = []
    for single in singles:
        if group and (len(group) + 1) * -(-single[1].context // block_size) > n_blocks:
            yield group
            group = []
        group.append(single)
    if group:
        yield group


def _padded(group: list[tuple[int, Chunk]], block_size: int) -> tuple[Index, Index, Array]:
    contexts = np.array([chunk.context for _, chunk in group])
    width = -(-int(contexts.max()) // block_size)
    tables = np.zeros((len(group), width), np.intp)
    for line, (_, chunk) in zip(tables, group, strict=True):
        used = chunk.table[:width]
        line[: len(used)] = used
    beyond = np.arange(width * block_size) >= contexts[:, None]
    hidden = np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None, :]
    return np.array([row for row, _ in group]), tables, hidden


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotary embedding in transformers' layout: the two halves of a head form the pairs."""
    cos, sin = rotation
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    rotated = np.empty(x.shape, np.float32)
    np.multiply(first, cos, out=rotated[..., :half])
    rotated[..., :half] -= second * sin
    np.multiply(second, cos, out=rotated[..., half:])
    rotated[..., half:] += first * sin
    return rotated


def _attend_prefill(q: Array, mixed: Array, first: int, chunk: Chunk, kv: tuple[Array, Array]) -> None:
    """Causal attention of one chunk, a tile of queries at a time, into its rows of `mixed`."""
    keys, values = kv[0][:, 0], kv[1][:, 0]
    n, (_, n_kv, group, head_dim) = len(chunk.ids), q.shape
    for low in range(0, n, QUERY_TILE):
        high = min(low + QUERY_TILE, n)
        size, seen = high - low, chunk.start + high
        tile = q[first + low : first + high].transpose(1, 2, 0, 3).reshape(n_kv, group * size, head_dim)
        scores = tile @ keys[:, :seen].transpose(0, 2, 1)
        diagonal = scores.reshape(n_kv, group, size, seen)[..., seen - size :]
        diagonal += np.triu(np.full((size, size), -np.inf, np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = (scores @ values[:, :seen]) / scores.sum(
            axis=-1, keepdims=True
        )  # after the matmul: fewer divisions
        mixed[first + low : first + high] = out.reshape(n_kv, group, size, head_dim).transpose(2, 0, 1, 3)


def _attend_decode(q: Array, mixed: Array, rows: Index, hidden: Array, kv: tuple[Array, Array]) -> None:
    """Attention of one new token each of a group of sequences, into their rows of `mixed`."""
    keys, values = (cache[:, :, None] for cache in kv)
    # A matrix times a vector a head: BLAS takes half as long over two of those as over one with two columns.
    scores = (keys @ q[rows].transpose(1, 0, 2, 3)[..., None])[..., 0]
    scores += hidden
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = (scores[..., None, :] @ values)[..., 0, :] / scores.sum(axis=-1, keepdims=True)
    mixed[rows] = out.transpose(1, 0, 2, 3)
