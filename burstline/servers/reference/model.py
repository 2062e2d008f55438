"""A Llama decoder on numpy: RMSNorm, RoPE, grouped-query attention over the block KV cache, SwiGLU."""

import mmap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from burstline.compute_threads import Cores
from burstline.servers.reference.weights import Array, ModelConfig, Weights

Index = npt.NDArray[np.intp]
PAGE_BYTES = mmap.PAGESIZE
GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
QUERY_TILE = 64
"""Query rows of one prefill attention tile: fewer cost calls, more compute what the causal mask hides."""


class KVCache:
    """Keys and values of every layer, (KV heads, blocks, block size x head size): a block is one memcpy.

    All of it is touched at the start: the first write to 2 MiB takes some virtual machines 5 ms, which would
    count as that step's.
    """

    def __init__(self, config: ModelConfig, n_blocks: int, block_size: int) -> None:
        self.block_size, self.head_dim = block_size, config.head_dim
        shape = (config.num_hidden_layers, config.num_key_value_heads, n_blocks, block_size * config.head_dim)
        self.block_bytes = 4 * config.num_key_value_heads * block_size * config.head_dim
        self._caches = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for cache in self._caches:
            cache.reshape(-1)[:: PAGE_BYTES // cache.itemsize] = 0

    def n_bytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def slots(self, table: Sequence[int], start: int, n: int) -> Index:
        """Where the tokens at positions start .. start + n live, as indices into all slots."""
        block, offset = np.divmod(np.arange(start, start + n), self.block_size)
        return np.asarray(table, np.intp)[block] * self.block_size + offset

    def write(self, layer: int, slots: Index, *keys_and_values: Array) -> None:
        """Store new tokens' keys and values, each (tokens, KV heads, head size)."""
        for cache, new in zip(self._caches, keys_and_values, strict=True):
            for head, flat in enumerate(cache[layer].reshape(cache.shape[1], -1, self.head_dim)):
                flat[slots] = new[:, head]

    def gather(self, layer: int, tables: Index) -> list[Array]:
        """Keys and values of `tables` (sequences, blocks): each (KV heads, sequences, tokens, head size)."""
        blocks = [np.take(cache[layer], tables, axis=1, mode="clip") for cache in self._caches]
        return [taken.reshape(len(taken), len(tables), -1, self.head_dim) for taken in blocks]


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
    """The decoder, on `cores`: each takes some of the rows, then some of the attention, layer by layer.

    `spent_ns` adds up the time inside each GEMM, and "attention", until it is cleared: what the cores that
    took part spent, divided by their number.
    """

    def __init__(self, config: ModelConfig, weights: Weights, cores: Cores | None = None) -> None:
        self.config, self.weights, self.cores = config, weights, cores or Cores()
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
        batch = _Batch(chunks, kv, self.cores, self._inv_freq)
        x: Array = self.weights.embed[batch.ids]
        n_kv, size = self.config.num_key_value_heads, self.config.head_dim
        q = np.empty((len(x), n_kv, self.config.num_attention_heads // n_kv, size), np.float32)
        mixed = np.empty_like(q)
        for index, layer in enumerate(self.weights.layers):
            self._by_rows(len(x), partial(self._project, index, layer, x, q, batch, kv))
            began = time.monotonic_ns()
            self.cores.run([partial(task, index, q, mixed, kv) for task in batch.attention])
            self.spent_ns["attention"] += time.monotonic_ns() - began
            self._by_rows(len(x), partial(self._finish, layer, x, mixed))
        return x

    def logits(self, x: Array) -> Array:
        """(rows, vocabulary) for rows of what `forward` returned."""
        logits = np.empty((len(x), self.config.vocab_size), np.float32)

        def compute(rows: slice, clock: "_Clock") -> None:
            normed = self._norm(x[rows], self.weights.norm)
            clock.gemm("lm_head", normed, self.weights.lm_head, logits[rows])

        self._by_rows(len(x), compute)
        return logits

    def _by_rows(self, n_rows: int, compute: "Callable[[slice, _Clock], None]") -> None:
        shares = self.cores.shares(n_rows)
        clocks = [_Clock() for _ in shares]
        self.cores.run([partial(compute, *pair) for pair in zip(shares, clocks, strict=True)])
        for name in {name for clock in clocks for name in clock.spent_ns}:
            self.spent_ns[name] += sum(clock.spent_ns[name] for clock in clocks) // len(clocks)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[1])
        normed: Array = x * (1.0 / np.sqrt(mean_square + np.float32(self.config.rms_norm_eps)))[:, None]
        normed *= weight
        return normed

    def _project(
        self, index: int, layer: Mapping[str, Array], x: Array, q: Array, batch: "_Batch", kv: KVCache,
        rows: slice, clock: "_Clock",
    ) -> None:  # fmt: skip
        """Queries into `q`, rotated and scaled, and keys and values into the cache."""
        n_q, n_kv, size = self.config.num_attention_heads, self.config.num_key_value_heads, q.shape[-1]
        qkv = clock.gemm("qkv_proj", self._norm(x[rows], layer["input_norm"]), layer["qkv_proj"])
        qkv = qkv.reshape(len(qkv), n_q + 2 * n_kv, size)
        began = time.monotonic_ns()
        rotated = batch.rotate(qkv[:, : n_q + n_kv], rows)
        kv.write(index, batch.slots[rows], rotated[:, n_q:], qkv[:, n_q + n_kv :])
        np.multiply(rotated[:, :n_q], np.float32(size**-0.5), out=q[rows].reshape(len(qkv), n_q, size))
        clock.spent_ns["attention"] += time.monotonic_ns() - began

    def _finish(
        self, layer: Mapping[str, Array], x: Array, mixed: Array, rows: slice, clock: "_Clock"
    ) -> None:
        x, mixed = x[rows], mixed[rows]
        x += clock.gemm("o_proj", mixed.reshape(len(mixed), -1), layer["o_proj"])
        both = clock.gemm("gate_up_proj", self._norm(x, layer["post_norm"]), layer["gate_up_proj"])
        gate, up = np.hsplit(both, 2)
        silu = np.negative(gate)
        with np.errstate(over="ignore"):  # exp(-g) of a very negative gate is inf, and g / inf the right 0
            np.exp(silu, out=silu)
        silu += 1.0
        np.divide(gate, silu, out=silu)
        silu *= up
        x += clock.gemm("down_proj", silu, layer["down_proj"])


class _Clock:
    def __init__(self) -> None:
        self.spent_ns = Counter[str]()

    def gemm(self, name: str, x: Array, weight: Array, out: Array | None = None) -> Array:
        began = time.monotonic_ns()
        product: Array = np.matmul(x, weight, out=out)
        self.spent_ns[name] += time.monotonic_ns() - began
        return product


class _Batch:
    """What all layers share: the new tokens' ids and slots, their rotation, and who attends how.

    `attention` are tasks that any core may take, called with the layer, queries, results and cache: some
    queries of a prompt, or single tokens of sequences with contexts of like length.
    """

    def __init__(self, chunks: Sequence[Chunk], kv: KVCache, cores: Cores, inv_freq: Array) -> None:
        self.ids = np.concatenate([np.asarray(chunk.ids, np.intp) for chunk in chunks])
        self.slots = np.concatenate([kv.slots(chunk.table, chunk.start, len(chunk.ids)) for chunk in chunks])
        position = np.concatenate([np.arange(c.start, c.context, dtype=np.float32) for c in chunks])
        angle = np.outer(position, inv_freq)[:, None, :]
        self._cos, self._sin = np.cos(angle), np.sin(angle)
        ends = np.cumsum([len(chunk.ids) for chunk in chunks]).tolist()
        placed = [(end - len(chunk.ids), chunk) for end, chunk in zip(ends, chunks, strict=True)]
        self.attention: list[Callable[[int, Array, Array, KVCache], None]] = []
        for row, chunk in placed:
            if len(chunk.ids) > 1:
                parts = cores.prompt_parts(len(chunk.ids))
                self.attention += [partial(_attend_prefill, chunk, row, *part) for part in parts]
        singles = [(row, chunk) for row, chunk in placed if len(chunk.ids) == 1]
        singles.sort(key=lambda single: single[1].context, reverse=True)
        n_blocks = sum(-(-chunk.context // kv.block_size) for _, chunk in singles)
        at_once = cores.gather_bytes(n_blocks * kv.block_bytes)
        while singles:
            n_blocks = -(-singles[0][1].context // kv.block_size)
            n_fit = max(1, -(-at_once // (n_blocks * kv.block_bytes)))
            group, singles = singles[:n_fit], singles[n_fit:]
            tables = np.zeros((len(group), n_blocks), np.intp)
            for line, (_, chunk) in zip(tables, group, strict=True):
                line[: len(chunk.table)] = chunk.table[:n_blocks]
            contexts = np.array([chunk.context for _, chunk in group])[:, None]
            beyond = np.arange(n_blocks * kv.block_size) >= contexts
            hidden = np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None, :]
            rows = np.array([row for row, _ in group])
            self.attention.append(partial(_attend_decode, rows, tables, hidden))

    def rotate(self, x: Array, rows: slice) -> Array:
        """Rotary embedding in transformers' layout: the two halves of a head form the pairs."""
        first, second = np.split(x, 2, axis=-1)
        rotated = np.empty(x.shape, np.float32)
        cos, sin = self._cos[rows], self._sin[rows]
        low, high = np.split(rotated, 2, axis=-1)
        np.multiply(first, cos, out=low)
        low -= second * sin
        np.multiply(second, cos, out=high)
        high += first * sin
        return rotated


def _attend_prefill(
    chunk: Chunk, row: int, first: int, last: int, layer: int, q: Array, mixed: Array, kv: KVCache
) -> None:
    """Causal attention of the new tokens `first` to `last` of a chunk, which begins at `row`."""
    _, n_kv, group, head_dim = q.shape
    n_blocks = -(-(chunk.start + last) // kv.block_size)
    keys, values = (half[:, 0] for half in kv.gather(layer, np.asarray([chunk.table[:n_blocks]], np.intp)))
    for low in range(first, last, QUERY_TILE):
        high = min(low + QUERY_TILE, last)
        size, seen = high - low, chunk.start + high
        tile = q[row + low : row + high].transpose(1, 2, 0, 3).reshape(n_kv, group * size, head_dim)
        scores = tile @ keys[:, :seen].transpose(0, 2, 1)
        diagonal = scores.reshape(n_kv, group, size, seen)[..., chunk.start + low :]
        diagonal += np.triu(np.full((size, size), -np.inf, np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = scores @ values[:, :seen]
        out /= scores.sum(axis=-1, keepdims=True)  # after the matmul: fewer divisions
        mixed[row + low : row + high] = out.reshape(n_kv, group, size, head_dim).transpose(2, 0, 1, 3)


def _attend_decode(
    rows: Index, tables: Index, hidden: Array, layer: int, q: Array, mixed: Array, kv: KVCache
) -> None:
    """Attention of one new token each of the sequences in `rows`, whose blocks are padded to one length.

    `hidden` is -inf for a gathered position beyond a sequence's context, 0 for the others.
    """
    keys, values = kv.gather(layer, tables)
    # A matrix times a vector a head: BLAS takes half as long over two of those as over one with two columns.
    scores = (keys[:, :, None] @ q[rows].transpose(1, 0, 2, 3)[..., None])[..., 0]
    scores += hidden
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = (scores[..., None, :] @ values[:, :, None])[..., 0, :] / scores.sum(axis=-1, keepdims=True)
    mixed[rows] = out.transpose(1, 0, 2, 3)
