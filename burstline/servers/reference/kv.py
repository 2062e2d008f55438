"""The KV cache: fixed blocks of tokens, reached through block tables, kept after use for equal prefixes."""

import mmap
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from burstline.servers.reference.weights import Array, ModelConfig

Index = npt.NDArray[np.intp]
PAGE_BYTES = mmap.PAGESIZE


class BlockPool:
    """Which blocks are in use, by how many sequences, and which free ones still hold a known prefix.

    Its content is named by the hash of its tokens and of all that stands before them. A free block keeps
    its content until it is needed for something else; the one free for longest goes first (as in vLLM).
    """

    def __init__(self, n_blocks: int, *, caches: bool = True) -> None:
        self.n_blocks, self.caches = n_blocks, caches
        self._blank = list(reversed(range(n_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._n_users: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def n_free(self) -> int:
        return len(self._blank) + len(self._kept)

    def take(self, n: int) -> list[int] | None:
        """`n` blocks of no content, or None (and nothing taken) where fewer are free."""
        if n > self.n_free:
            return None
        blocks = [self._blank.pop() for _ in range(min(n, len(self._blank)))]
        while len(blocks) < n:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            blocks.append(block)
        self._n_users.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, hashes: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known beginning of a chain of hashes, now used once more."""
        blocks = []
        for known in hashes:
            block = self._block_of.get(known)
            if block is None:
                break
            self._kept.pop(block, None)
            self._n_users[block] = self._n_users.get(block, 0) + 1
            blocks.append(block)
        return blocks

    def name(self, block: int, content: int) -> None:
        """Have a block that was computed found by its content; where another has the same, that one stays."""
        if self.caches and content not in self._block_of and block not in self._hash_of:
            self._block_of[content], self._hash_of[block] = block, content

    def give_back(self, blocks: list[int]) -> None:
        """One user less of each; the list is emptied, so that it cannot be freed twice.

        The last block goes first where room is needed: a prefix is of use without its end, not without its
        beginning.
        """
        for block in reversed(blocks):
            self._n_users[block] -= 1
            if self._n_users[block]:
                continue
            del self._n_users[block]
            if block in self._hash_of:
                self._kept[block] = None
            else:
                self._blank.append(block)
        blocks.clear()


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
