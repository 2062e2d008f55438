"""How long a kernel takes, as a function of what it does and the model's constants. Everything is seconds.

One formula a kind, used alike by fits (arrays of measured rows) and by predictions (one op). `difference`
says where published kernels of an op differ by so much that no constant tells which of two is faster.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from burstline.roofline.device.calibration import Constants, shipped
from burstline.roofline.device.device import Device
from burstline.roofline.model.ops import Op

Amounts = npt.NDArray[np.float64]
Amount = Any
"""A float, or an array of one for each row."""

_TILE = 128.0  # rows of a usual tile of queries, and the fewest keys that are read
_ROW_TILES = 64.0, 256.0  # of a product of up to 128 rows, and of more


Work = namedtuple(
    "Work",
    "m n k groups bits bytes flops kv_bytes activation_bytes keys n_heads peak bytes_per_s n_units"
    " ideal_s message_bytes n_ranks in_switch link_bytes_per_s",
    defaults=(0, 0, 0, 1, 16, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0),
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
    if kind == "matmul":
        tile = np.where(x.m > _TILE, _ROW_TILES[1], _ROW_TILES[0])
        idle = np.where(x.bits <= 8, of.pad_8, 0.0) * (np.ceil(x.m / tile) * tile - x.m)
        share = np.where(x.bits == 4, of.product_4, np.where(x.bits == 8, of.product_8, of.product))
        compute_s = 2 * x.groups * (x.m + idle) * x.n * x.k / (share * x.peak)
        return of.launch_s, {"product": compute_s, "memory": x.bytes / (of.memory * x.bytes_per_s)}
    if kind in ("decode", "index"):
        floor_s = of.attention_s + (of.sparse_s + of.sparse_request_s * x.groups) * (kind == "index")
        moved = x.kv_bytes * np.maximum(1, _TILE / x.n) + x.activation_bytes
        read_s = moved / (of.cache * x.bytes_per_s)
        return floor_s, {"cache": read_s, "prompt": x.flops / (of.prompt * x.peak)}
    if kind == "prefill":
        whole = x.flops * (1 + _TILE / 2 / np.maximum(x.keys, 1))  # a tile of queries sees half a tile more
        read_s = x.kv_bytes / (of.cache * x.bytes_per_s)
        return of.attention_s, {"prompt": whole / (of.prompt * x.peak), "cache": read_s}
    if kind == "exchange":
        slower = np.maximum(1.0, x.link_bytes_per_s / of.exchange_bytes_per_s)
        return of.exchange_s, {"link": x.ideal_s * slower / of.link}
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
    n, size, rate = x.n_ranks, x.message_bytes, np.maximum(x.link_bytes_per_s, 1.0)
    ranks_s = of.rank_s * n
    switch_s = 2 * of.shot_s + 3 * ranks_s + size / (of.link * rate)
    ways = {
        "one_link": of.shot_s + ranks_s + (n - 1) * size / (of.one_link * rate),
        "two_link": of.shot_s + 2 * ranks_s + 2 * (n - 1) / n * size / (of.two_link * rate),
        "link": np.where((x.in_switch > 0) & (n >= 4), switch_s, np.inf),
    }
    least_s = reduce(np.minimum, ways.values())
    own = (x.link_bytes_per_s > 0) & (n > 2) & (size <= _MOST_OWN_BYTES)
    floor_s = np.where(own, np.maximum(of.launch_s, of.shot_s + ranks_s), of.launch_s)
    rest_s = np.maximum(0.0, least_s - floor_s)
    rest = {name: np.where(own & (way_s == least_s), rest_s, 0.0) for name, way_s in ways.items()}
    return floor_s, rest | {"link": np.where(own, rest["link"], x.ideal_s / of.link)}


def op_s(kind: str, of: Any, x: Work) -> Amount:
    """Seconds of one run: the floor, and what takes longest of the rest.

    Compute and memory of a product overlap, but not perfectly: a smooth max.
    """
    floor_s, rest = parts(kind, of, x)
    if kind == "matmul":
        return floor_s + sum(part_s**4 for part_s in rest.values()) ** 0.25
    return floor_s + reduce(np.maximum, rest.values())


def seconds_of(kind: str, x: Work) -> Callable[[Constants], Amounts]:
    """Seconds of rows of one kind of kernel, as a function of the constants."""
    return lambda of: np.asarray(op_s(kind, of, x))


_NARROW = 768 * 2048  # weights of `down` in Qwen3-30B-A3B, whose int4 and fp8 experts were slower than bf16


def difference(op: Op, device: Device) -> tuple[float, float, str]:
    """Factors of the fastest and slowest published kernel, and which those are; (1, 1, ""): they agree.

    Of an exchange, an indexer and a pass that quantises the factors are the floor's.
    """
    blackwell, decodes, index = device.arch == "sm100", op.phase == "decode", op.name == "indexer"
    weights = op.n * op.k * op.groups if op.kind == "matmul" and op.name.startswith("experts_") else 0
    narrow = op.n * op.k <= _NARROW * (1 if op.name == "experts_down" else 2)
    cache_8 = op.kind == "attention" and decodes and not index and op.kv_element_bytes <= 1
    pcie = op.collective == "all_reduce" and op.n_ranks > 2 and device.links[-1].kind.startswith("PCIe")
    rows = {
        "exchange": op.collective == "all_to_all",
        "pcie": pcie,
        "index-blackwell": index and decodes and blackwell,
        "index": index and decodes,
        "experts-4": op.weight_bytes < weights and (narrow or blackwell),
        "experts-8": op.weight_bytes < 2 * weights and narrow,
        "quantise": op.name == "quantise" and op.m <= 16 and blackwell,
        "cache-ada": cache_8 and device.arch == "sm89",
        "cache-hopper": cache_8 and device.arch == "sm90" and op.kv_bytes < 200e6,
    }
    found = next((name for name, holds in rows.items() if holds), None)
    if found is None:
        return 1.0, 1.0, ""
    row = shipped()["differs"][found]
    return row["fastest"] / row["predicted"], row["slowest"] / row["predicted"], row["said"]
