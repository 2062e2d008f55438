"""How long a kernel takes, as a function of what it does and the model's constants. Everything is seconds.

One formula a family, used alike by fits (arrays of measured rows) and by predictions (one op).
"""

from collections import namedtuple
from collections.abc import Mapping
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


Work = namedtuple(
    "Work",
    "m n k groups bits bytes flops kv_bytes activation_bytes keys n_heads peak bytes_per_s n_units"
    " ideal_s message_bytes n_ranks in_switch link_bytes_per_s",
)
"""What one run of an op does, on a device of these ceilings; or a column of each for many ops.

`bits` of a product's inputs; `keys` that a query sees on average; `ideal_s`: a collective's least time;
`link_bytes_per_s`: NVLink's, where one tier of it joins the ranks, else 0; `n_units`: multiprocessors.
"""
_MOST_OWN_BYTES = 16 * 2.0**20  # larger all-reduces are NCCL's


def parts(kind: str, of: Any, x: Work) -> tuple[Amount, Mapping[str, Amount]]:
    """(the floor, the seconds beyond it by the constant that sets them) of one run of this kind of op.

    A "scan" is linear attention over prompts: each request's heads are one unit of work for a multiprocessor,
    which goes through its tokens one after another, so that units run in waves and more ranks help no more
    than there are heads (vLLM 0.24, H100: 102 us of 2,048 tokens and 4 heads; 98 and 8 here). An "index" is
    what sparse attention adds to a layer that decodes: choosing keys, and gathering them (vLLM 0.24, H200).
    An "exchange" sends tokens to experts, on Blackwell no faster than on the H100.
    """
    rates = x.peak, x.bytes_per_s
    if kind == "matmul":
        share = np.where(x.bits == 4, of.product_4, np.where(x.bits == 8, of.product_8, of.product))
        pad = np.where(x.bits <= 8, of.pad_8, 0.0)
        products = Products(x.m, x.n, x.k, x.groups, x.bytes)
        return of.launch_s, dict(
            zip(("product", "memory"), product_parts(of, rates, share, pad, products), strict=True)
        )
    if kind in ("decode", "index"):
        floor_s = of.attention_s + (of.sparse_s + of.sparse_request_s * x.groups) * (kind == "index")
        read_s = decode_s(of, x.bytes_per_s, x.n, x.kv_bytes, x.activation_bytes) - of.attention_s
        return floor_s, {"cache": read_s, "prompt": x.flops / (of.prompt * x.peak)}
    if kind == "prefill":
        compute_s = prefill_s(of, x.peak, x.flops, x.keys) - of.attention_s
        return of.attention_s, {"prompt": compute_s, "cache": x.kv_bytes / (of.cache * x.bytes_per_s)}
    if kind == "exchange":
        slower = np.maximum(1.0, x.link_bytes_per_s / of.exchange_bytes_per_s)
        return of.exchange_s, {"exchange": x.ideal_s * slower / of.exchange}
    if kind == "collective":
        return _collective(of, x)
    passes_s = x.bytes / (of.passes * x.bytes_per_s)
    if kind == "scan":
        waves = np.ceil(x.groups * x.n_heads / x.n_units)
        return of.pass_s + of.scan_s, {"scan_tok_s": passes_s + of.scan_tok_s * x.m * waves}
    return of.pass_s, {"passes": passes_s}


def _collective(of: Any, x: Work) -> tuple[Amount, Mapping[str, Amount]]:
    """An all-reduce of over 2 ranks and up to 16 MB on NVLink is the least of three kernels; else NCCL's.

    One-shot: every rank reads all buffers. Two-shot: it reduces its share and gathers the others'. In-switch
    (from 4 ranks): the switches add. Compared with vLLM, SGLang, TensorRT-LLM on H100, H200, GB200.
    """
    n, rate = x.n_ranks, np.maximum(x.link_bytes_per_s, 1.0)
    one_s = of.shot_s + of.one_rank_s * n + (n - 1) * x.message_bytes / (of.one_link * rate)
    two_s = of.shot_s + of.two_rank_s * n + 2 * (n - 1) / n * x.message_bytes / (of.two_link * rate)
    switch_s = of.switch_s + of.switch_rank_s * n + x.message_bytes / (of.link * rate)
    ways = one_s, two_s, np.where((x.in_switch > 0) & (n >= 4), switch_s, np.inf)
    least_s = np.minimum.reduce(ways)
    own = (x.link_bytes_per_s > 0) & (n > 2) & (x.message_bytes <= _MOST_OWN_BYTES)
    floor_s = np.where(own, np.maximum(of.launch_s, of.shot_s + of.one_rank_s * n), of.launch_s)
    rest_s = np.maximum(0.0, least_s - floor_s)
    one, two, link = (np.where(own & (each_s == least_s), rest_s, 0.0) for each_s in ways)
    return floor_s, {"one_link": one, "two_link": two, "link": np.where(own, link, x.ideal_s / of.link)}


def op_s(kind: str, of: Any, x: Work) -> Amount:
    """Seconds of one run: the floor, and what takes longest of the rest."""
    floor_s, rest = parts(kind, of, x)
    return floor_s + (joined(*rest.values()) if kind == "matmul" else np.maximum.reduce([*rest.values()]))
