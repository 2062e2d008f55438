"""How long a kernel takes, as a function of what it does and the model's constants. Everything is seconds.

One formula a family, used alike by fits (arrays of measured rows) and by predictions (one op).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from burstline.roofline.device.calibration import Constants

Amounts = npt.NDArray[np.float64]
Amount = Any
"""A float, or an array of one for each row."""

_TILE = 128.0  # rows of a usual tile of queries, and the fewest keys that are read
_ROW_TILES = 64.0, 256.0  # of a product of up to 128 rows, and of more


@dataclass(frozen=True, slots=True)
class Products:
    """`groups` products of [m, k] x [k, n]; `moved_bytes` of all of them."""

    m: Amount
    n: Amount
    k: Amount
    groups: Amount
    moved_bytes: Amount


def product_parts(
    of: Constants, rates: tuple[Amount, Amount], share: Amount, pad: Amount, x: Products
) -> tuple[Amount, Amount]:
    """(compute, memory) at their shares of the ceilings; `rates`: FLOP/s and byte/s."""
    tile = np.where(x.m > _TILE, _ROW_TILES[1], _ROW_TILES[0])
    rows = x.m + pad * (np.ceil(x.m / tile) * tile - x.m)
    return 2 * x.groups * rows * x.n * x.k / (share * rates[0]), x.moved_bytes / (of.memory * rates[1])


def product_s(of: Constants, rates: tuple[Amount, Amount], share: Amount, pad: Amount, x: Products) -> Amount:
    """A launch, and what takes longer of compute and memory, where neither hides the other whole."""
    return of.launch_s + joined(*product_parts(of, rates, share, pad, x))


def joined(a: Amount, b: Amount) -> Amount:
    """A smooth max: what two pipes that overlap, but not perfectly, take together."""
    return (a**4 + b**4) ** 0.25


def decode_s(
    of: Constants, bytes_per_s: Amount, context_tok: Amount, kv_bytes: Amount, other_bytes: Amount
) -> Amount:
    """Attention of one new token a request over `kv_bytes` of keys and values, `context_tok` a request."""
    moved = kv_bytes * np.maximum(1, _TILE / context_tok) + other_bytes
    return of.attention_s + moved / (of.cache * bytes_per_s)


def prefill_s(of: Constants, flops_per_s: Amount, flops: Amount, keys_per_query: Amount) -> Amount:
    """Attention over prompts, of causal FLOPs and how many keys a query sees on average.

    A tile of queries sees half a tile of keys more than the mask leaves it.
    """
    whole = flops * (1 + _TILE / 2 / np.maximum(keys_per_query, 1))
    return of.attention_s + whole / (of.prompt * flops_per_s)
