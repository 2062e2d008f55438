"""A Llama decoder on numpy: RMSNorm, RoPE, grouped-query attention over the block KV cache, SwiGLU."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from burstline.servers.reference.kv import Index, KVCache
from burstline.servers.reference.weights import Array, ModelConfig, Weights

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


class Transformer:
    """The decoder. `spent_ns` adds up the time inside each GEMM, and "attention", until it is cleared."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        # Rounded where transformers rounds: one bit of a frequency is 3e-5 in a logit at position 300.
        exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        power = config.rope_theta ** exponent.astype(np.float64)
        self._inv_freq = np.float32(1) / power.astype(np.float32)
        self.clear_clock()

    def clear_clock(self) -> None:
        self.spent_ns = dict.fromkeys((*GEMMS, "attention"), 0)

    def forward(self, chunks: Sequence[Chunk], kv: KVCache) -> Array:
        """The last layer's output for every new token, (tokens, hidden), chunk after chunk.

        Writes the new tokens' keys and values into `kv`, whose tables must have room for them.
        """
        batch = _Batch(chunks, kv, self._inv_freq)
        x: Array = self.weights.embed[batch.ids]
        with np.errstate(over="ignore"):  # exp(-g) of a very negative gate is inf, and g / inf the right 0
            for index, layer in enumerate(self.weights.layers):
                x += self._attend(index, layer, self._norm(x, layer["input_norm"]), batch, kv)
                x += self._mlp(layer, self._norm(x, layer["post_norm"]))
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

    def _mlp(self, layer: Mapping[str, Array], x: Array) -> Array:
        gate, up = np.hsplit(self._gemm("gate_up_proj", x, layer["gate_up_proj"]), 2)
        silu = np.negative(gate)
        np.exp(silu, out=silu)
        silu += 1.0
        np.divide(gate, silu, out=silu)
        silu *= up
        return self._gemm("down_proj", silu, layer["down_proj"])

    def _attend(
        self, index: int, layer: Mapping[str, Array], x: Array, batch: "_Batch", kv: KVCache
    ) -> Array:
        n_q, n_kv = self.config.num_attention_heads, self.config.num_key_value_heads
        size = self.config.head_dim
        qkv = self._gemm("qkv_proj", x, layer["qkv_proj"]).reshape(len(x), n_q + 2 * n_kv, size)
        began = time.monotonic_ns()
        rotated = batch.rotate(qkv[:, : n_q + n_kv])
        kv.write(index, batch.slots, rotated[:, n_q:], qkv[:, n_q + n_kv :])
        q = (rotated[:, :n_q] * np.float32(size**-0.5)).reshape(len(x), n_kv, n_q // n_kv, size)
        mixed = np.empty_like(q)
        for rows, chunk in batch.prefills:
            keys, values = kv.gather(index, np.asarray([chunk.table], np.intp))
            _attend_prefill(q[rows], mixed[rows], chunk.start, keys[:, 0], values[:, 0])
        for decode_rows, tables, hidden in batch.decodes:
            keys, values = kv.gather(index, tables)
            mixed[decode_rows] = _attend_decode(q[decode_rows], keys, values, hidden)
        self.spent_ns["attention"] += time.monotonic_ns() - began
        return self._gemm("o_proj", mixed.reshape(len(x), -1), layer["o_proj"])


class _Batch:
    """What all layers share: the new tokens' ids and slots, their rotation, and who attends how.

    `prefills` are (rows, chunk). `decodes` are groups of single tokens with contexts of like length, as
    (rows, padded block tables, -inf for a gathered position beyond its sequence's context, 0 for the others).
    """

    def __init__(self, chunks: Sequence[Chunk], kv: KVCache, inv_freq: Array) -> None:
        self.ids = np.concatenate([np.asarray(chunk.ids, np.intp) for chunk in chunks])
        self.slots = np.concatenate([kv.slots(chunk.table, chunk.start, len(chunk.ids)) for chunk in chunks])
        position = np.concatenate([np.arange(c.start, c.context, dtype=np.float32) for c in chunks])
        angle = np.outer(position, inv_freq)[:, None, :]
        self._cos, self._sin = np.cos(angle), np.sin(angle)
        ends = np.cumsum([len(chunk.ids) for chunk in chunks]).tolist()
        rows = [slice(end - len(chunk.ids), end) for end, chunk in zip(ends, chunks, strict=True)]
        self.prefills = [(at, c) for at, c in zip(rows, chunks, strict=True) if len(c.ids) > 1]
        singles = [(at.start, c) for at, c in zip(rows, chunks, strict=True) if len(c.ids) == 1]
        singles.sort(key=lambda single: single[1].context, reverse=True)
        self.decodes: list[tuple[Index, Index, Array]] = []
        while singles:
            n_blocks = -(-singles[0][1].context // kv.block_size)
            n_fit = max(1, GATHER_BYTES // (n_blocks * kv.block_bytes))
            group, singles = singles[:n_fit], singles[n_fit:]
            tables = np.zeros((len(group), n_blocks), np.intp)
            for line, (_, chunk) in zip(tables, group, strict=True):
                line[: len(chunk.table)] = chunk.table[:n_blocks]
            contexts = np.array([chunk.context for _, chunk in group])[:, None]
            beyond = np.arange(n_blocks * kv.block_size) >= contexts
            hidden = np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None, :]
            self.decodes.append((np.array([row for row, _ in group]), tables, hidden))

    def rotate(self, x: Array) -> Array:
        """Rotary embedding in transformers' layout: the two halves of a head form the pairs."""
        first, second = np.split(x, 2, axis=-1)
        rotated = np.empty(x.shape, np.float32)
        low, high = np.split(rotated, 2, axis=-1)
        np.multiply(first, self._cos, out=low)
        low -= second * self._sin
        np.multiply(second, self._cos, out=high)
        high += first * self._sin
        return rotated


def _attend_prefill(q: Array, mixed: Array, start: int, keys: Array, values: Array) -> None:
    """Causal attention of one chunk, a tile of queries at a time, into `mixed`."""
    n, n_kv, group, head_dim = q.shape
    for low in range(0, n, QUERY_TILE):
        high = min(low + QUERY_TILE, n)
        size, seen = high - low, start + high
        tile = q[low:high].transpose(1, 2, 0, 3).reshape(n_kv, group * size, head_dim)
        scores = tile @ keys[:, :seen].transpose(0, 2, 1)
        diagonal = scores.reshape(n_kv, group, size, seen)[..., start + low :]
        diagonal += np.triu(np.full((size, size), -np.inf, np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = scores @ values[:, :seen]
        out /= scores.sum(axis=-1, keepdims=True)  # after the matmul: fewer divisions
        mixed[low:high] = out.reshape(n_kv, group, size, head_dim).transpose(2, 0, 1, 3)


def _attend_decode(q: Array, keys: Array, values: Array, hidden: Array) -> Array:
    """Attention of one new token each of a group of sequences."""
    # A matrix times a vector a head: BLAS takes half as long over two of those as over one with two columns.
    scores = (keys[:, :, None] @ q.transpose(1, 0, 2, 3)[..., None])[..., 0]
    scores += hidden
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = (scores[..., None, :] @ values[:, :, None])[..., 0, :] / scores.sum(axis=-1, keepdims=True)
    mixed: Array = out.transpose(1, 0, 2, 3)
    return mixed
