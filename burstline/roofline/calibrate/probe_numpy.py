"""Kernels on the CPU as an engine on numpy runs them, each returned as a function to be timed.

All in fp32. Weights rotate over what one step sweeps through. So do activations, over as many as a layer
has: a large batch's are out of the cache, a small one's in it.
"""

import itertools
import math
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil

from burstline.compute_threads import Cores
from burstline.roofline.device.device import cpu_model

Kernel = Callable[[], object]
Array = np.ndarray[Any, np.dtype[np.float32]]
_ELEMENT = 4
_MOST_BYTES = 1 << 30  # that one measurement may hold
_QUERY_TILE = 64
_BLOCK = 16  # tokens
_ACTIVATIONS = 8  # arrays of a layer: normed, projected, rotated, attended, ... down to its output


class NumpyProbe:
    """The CPU: `threads` cores take parts of each kernel, as the embedded engine's do."""

    dtype = "fp32"
    element_bytes = _ELEMENT
    passes: tuple[str, ...] = ("norm", "act", "rope", "write")

    def __init__(self, threads: int, vocab: int = 0) -> None:
        self.n_units, self._cores = threads, Cores(threads)
        self._vocab = vocab
        self._rng = np.random.default_rng(0)
        self._weights: tuple[tuple[int, int, int], list[Array]] = ((0, 0, 0), [])

    @property
    def name(self) -> str:
        return f"{cpu_model() or platform.machine()}, {self.n_units} core(s)"

    @property
    def memory_bytes(self) -> float:
        return float(psutil.virtual_memory().total)

    def product(self, m: int, n: int, k: int, copies: int) -> Kernel:
        """Weights are (in, out); the vocabulary's (out, in), as the embeddings that may be tied to them."""
        copies = max(1, min(copies, _MOST_BYTES // (_ELEMENT * n * k)))
        x = self._array(m, k)
        if self._weights[0] != (n, k, copies):  # kept from one number of rows to the next
            weight = self._array(n, k) if n == self._vocab else self._array(k, n)
            self._weights = (n, k, copies), [weight.copy() for _ in range(copies)]
        weights = itertools.cycle([each.T if n == self._vocab else each for each in self._weights[1]])
        return self._by_rows(m, lambda: (x, next(weights)), lambda rows, x, weight: x[rows] @ weight)

    def read(self, n_bytes: int) -> Kernel:
        parts = np.array_split(self._array(n_bytes // _ELEMENT), self.n_units)
        return lambda: self._cores.run([partial(np.dot, part, part) for part in parts])

    def decode(
        self, batch: int, context: int, heads: int, kv_heads: int, dim: int, copies: int = 1
    ) -> Kernel:
        """Blocks gathered from the cache, a few requests at a time; scores, softmax, values."""
        n_blocks = -(-context // _BLOCK)
        shape = (2, kv_heads, batch * n_blocks, _BLOCK * dim)
        copies = max(1, min(copies, _MOST_BYTES // (_ELEMENT * math.prod(shape))))
        caches = itertools.cycle([np.full(shape, 0.01, np.float32) for _ in range(copies)])
        tables = self._rng.permutation(batch * n_blocks).reshape(batch, n_blocks)
        q = self._array(kv_heads, batch, heads // kv_heads, dim)
        block_bytes = _ELEMENT * kv_heads * _BLOCK * dim
        n_at_once = -(-self._cores.gather_bytes(batch * n_blocks * block_bytes) // (n_blocks * block_bytes))

        def attend(low: int, cache: Array, mixed: Array) -> None:
            table = tables[low : low + n_at_once]
            taken = [np.take(half, table, axis=1, mode="clip") for half in cache]
            keys, values = (half.reshape(kv_heads, len(table), 1, -1, dim) for half in taken)
            scores = (keys @ q[:, low : low + n_at_once, :, :, None])[..., 0]
            np.exp(scores - scores.max(axis=-1, keepdims=True), out=scores)
            out = (scores[..., None, :] @ values)[..., 0, :]
            mixed[:, low : low + n_at_once] = out / scores.sum(axis=-1, keepdims=True)

        def run() -> Array:
            cache, mixed = next(caches), np.empty_like(q)
            self._cores.run([partial(attend, low, cache, mixed) for low in range(0, batch, n_at_once)])
            return mixed

        return run

    def prefill(self, tok: int, heads: int, kv_heads: int, dim: int) -> Kernel:
        """Causal attention of one prompt: queries scaled, blocks gathered, a tile of queries at a time."""
        n_blocks = -(-tok // _BLOCK)
        cache = self._array(2, kv_heads, n_blocks, _BLOCK * dim)
        table = self._rng.permutation(n_blocks)
        unscaled = self._swept(tok, kv_heads, heads // kv_heads, dim)

        def attend(first: int, end: int, unscaled: Array, mixed: Array) -> None:
            q = unscaled[first:end] * np.float32(dim**-0.5)
            taken = [np.take(half, table[: -(-end // _BLOCK)], axis=1, mode="clip") for half in cache]
            keys, values = (half.reshape(kv_heads, -1, dim) for half in taken)
            for low in range(first, end, _QUERY_TILE):
                high = min(low + _QUERY_TILE, end)
                tile = q[low - first : high - first].transpose(1, 2, 0, 3).reshape(kv_heads, -1, dim)
                scores = tile @ keys[:, :high].transpose(0, 2, 1)
                diagonal = scores.reshape(kv_heads, -1, high - low, high)[..., low:]
                diagonal += np.triu(np.full((high - low, high - low), -np.inf, np.float32), 1)
                np.exp(scores - scores.max(axis=-1, keepdims=True), out=scores)
                out = (scores @ values[:, :high]) / scores.sum(axis=-1, keepdims=True)
                mixed[low:high] = out.reshape(kv_heads, -1, high - low, dim).transpose(2, 0, 1, 3)

        def run() -> Array:
            q = next(unscaled)
            mixed = np.empty_like(q)
            self._cores.run([partial(attend, *part, q, mixed) for part in self._cores.prompt_parts(tok)])
            return mixed

        return run

    def norm(self, rows: int, width: int) -> Kernel:
        """An RMSNorm and the addition to the residual stream before it."""
        streams, added, weight = self._swept(rows, width), self._swept(rows, width), self._array(width)

        def normed(rows: slice, stream: Array, added: Array) -> object:
            stream = stream[rows]
            np.add(stream, added[rows], out=stream)
            mean_square = np.einsum("ij,ij->i", stream, stream) / np.float32(width)
            return stream * (1 / np.sqrt(mean_square + np.float32(1e-5)))[:, None] * weight

        return self._by_rows(rows, lambda: (next(streams), next(added)), normed)

    def activation(self, rows: int, width: int) -> Kernel:
        """SiLU of one half, times the other."""
        both = self._swept(rows, 2 * width)

        def activated(rows: slice, both: Array) -> object:
            gate, up = np.hsplit(both[rows], 2)
            return gate / (1 + np.exp(-gate)) * up

        return self._by_rows(rows, lambda: (next(both),), activated)

    def rope(self, rows: int, heads: int, dim: int) -> Kernel:
        """Queries and keys turned by their position, the two halves of a head as pairs."""
        # Between one token's and the next one's lie values.
        swept, angle = self._swept(rows, heads + heads // 3, dim), self._array(rows, 1, dim // 2)
        all_cos, all_sin = np.cos(angle), np.sin(angle)

        def rotated(rows: slice, x: Array) -> object:
            x, cos, sin = x[rows, :heads], all_cos[rows], all_sin[rows]
            first, second = x[..., : dim // 2], x[..., dim // 2 :]
            turned = np.empty(x.shape, np.float32)
            np.multiply(first, cos, out=turned[..., : dim // 2])
            turned[..., : dim // 2] -= second * sin
            np.multiply(second, cos, out=turned[..., dim // 2 :])
            turned[..., dim // 2 :] += first * sin
            return turned

        return self._by_rows(rows, lambda: (next(swept),), rotated)

    def kv_write(self, rows: int, kv_heads: int, dim: int) -> Kernel:
        """New keys and values scattered over the cache's slots."""
        new = self._array(2, rows, kv_heads, dim)
        caches = np.full((2, kv_heads, 8 * rows, dim), 0.01, np.float32)
        slots = self._rng.permutation(8 * rows)[:rows]

        def write(rows: slice) -> None:
            for cache, part in zip(caches, new, strict=True):
                for head, flat in enumerate(cache):
                    flat[slots[rows]] = part[rows, head]

        return self._by_rows(rows, tuple, write)

    def once(self, kernel: Kernel, clock: Callable[[], float]) -> float:
        """Seconds of one run: on one core in CPU time, in which other processes do not count."""
        clock = time.process_time if self.n_units == 1 else clock
        began = clock()
        kernel()
        return clock() - began

    def _by_rows(
        self, n_rows: int, arrays: Callable[[], tuple[Array, ...]], compute: Callable[..., object]
    ) -> Kernel:
        """`compute` of each core's rows, on what `arrays` gives for this run."""
        shares = self._cores.shares(n_rows)

        def run() -> list[object]:
            taken = arrays()
            return self._cores.run([partial(compute, rows, *taken) for rows in shares])

        return run

    def _swept(self, *shape: int) -> Iterator[Array]:
        """Such arrays in turn, for ever."""
        return itertools.cycle([self._array(*shape) for _ in range(_ACTIVATIONS)])

    def _array(self, *shape: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(0.01)
