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
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int] | None:
        """`n` blocks, or None (and nothing taken) where fewer are free."""
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

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
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def n_bytes(self) -> int:
        return int(self._keys.nbytes + self._values.nbytes)

    def slots(self, table: Sequence[int], start: int, n: int) -> Index:
        """Where the tokens at positions start .. start + n live, as indices into all slots."""
        position = np.arange(start, start + n)
        return (
            np.asarray(table, np.intp)[position // self.block_size] * self.block_size
            + position % self.block_size
        )

    def write(self, layer: int, slots: Index, keys: Array, values: Array) -> None:
        """Store new tokens; `keys` and `values` are (tokens, KV heads, head size)."""
        for cache, new in ((self._keys, keys), (self._values, values)):
            for head, flat in enumerate(cache[layer].reshape(cache.shape[1], -1, self.head_dim)):
                flat[slots] = new[:, head]

    def gather(self, layer: int, tables: Index) -> tuple[Array, Array]:
        """Keys and values of `tables` (sequences, blocks): each (KV heads, sequences, tokens, head size)."""
        shape = (self._keys.shape[1], tables.shape[0], -1, self.head_dim)
        return (
            np.take(self._keys[layer], tables, axis=1, mode="clip").reshape(shape),
            np.take(self._values[layer], tables, axis=1, mode="clip").reshape(shape),
        )
