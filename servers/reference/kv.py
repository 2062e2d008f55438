"""The KV cache: fixed blocks of tokens, handed out from a free list, reached through block tables."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from servers.reference.config import ModelConfig
from servers.reference.weights import Array

Index = npt.NDArray[np.intp]


class BlockPool:
    """Which blocks are free. A block belongs to one sequence or to the free list, never to both."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks, self._free = n_blocks, list(reversed(range(n_blocks)))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int] | None:
        """`n` blocks, or None (and nothing taken) where fewer are free."""
        return [self._free.pop() for _ in range(n)] if n <= self.n_free else None

    def give_back(self, blocks: list[int]) -> None:
        """Free a sequence's whole table; its list is emptied, so that it cannot be freed twice."""
        self._free.extend(reversed(blocks))
        blocks.clear()


class KVCache:
    """Keys and values of every layer, (KV heads, blocks, block size x head size): a block is one memcpy.

    The memory is only touched, and so only resident, once a block is written.
    """

    def __init__(self, config: ModelConfig, n_blocks: int, block_size: int) -> None:
        self.block_size, self.head_dim = block_size, config.head_dim
        shape = (config.num_hidden_layers, config.num_key_value_heads, n_blocks, block_size * config.head_dim)
        self.block_bytes = 4 * config.num_key_value_heads * block_size * config.head_dim
        self._caches = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

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
