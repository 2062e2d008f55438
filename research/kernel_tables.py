"""Published kernel measurements as arrays: what each row did, and the seconds it took.

Tables: `tests/data/measured`, with their sources in `tests/data/SOURCES.md`; docs/roofline-accuracy.md says
where to get those of Blackwell, which are not in the repository. Needs pandas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from burstline.roofline.calibrate.fitting import Rows
from burstline.roofline.device.device import Device, load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.predict.bound import CACHE_REACH
from burstline.roofline.predict.kernels import Amounts, Decodes, Prefills, Products, Rates

X = TypeVar("X")

# Folder of the tables -> device id. The generic calibration is pooled from the first four; the H200's tables
# came later and test it. Blackwell's alone have products of 4 bits.
POOLED = {"a100_sxm": "a100-sxm4-80g", "h100_sxm": "h100-sxm5-80g", "l40s": "l40s", "rtx4090": "rtx4090"}
BLACKWELL = {
    "b200_sxm": "b200-sxm", "b300_sxm": "b300-sxm", "gb200": "gb200", "gb300": "gb300",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
}  # fmt: skip
FOLDERS = {**POOLED, "h200_sxm": "h200-sxm-141g", **BLACKWELL}
# Stored dtype -> ours, how many copies of the weights rotate while a product is timed, and the bytes of a
# weight and of an input: 4-bit ones have a scale of one byte for each 16.
DTYPES = {
    "bfloat16": ("bf16", 6, 2.0),
    "fp8": ("fp8", 6, 1.0),
    "fp8_block": ("fp8_block", 1, 1.0),
    "nvfp4": ("fp4", 1, 0.5 + 1 / 16),
}
ONE_COPY_BYTES = 32e6
"""Products timed with one copy of the weights, which caches may hold: only larger ones count."""


@dataclass(frozen=True, slots=True)
class GemmTable:
    """The products of one device, library and dtype."""

    device: Device
    library: str
    dtype: str
    rows: Rows[Products]

    @property
    def rates(self) -> Rates:
        """The device's ceilings for this dtype ("fp8_block" computes at fp8's)."""
        return Rates.of(self.device, self.dtype.partition("_")[0])


def device_of(folder: Path) -> Device:
    if folder.name not in FOLDERS:
        raise RooflineError(f"{folder} is none of the measured devices: {', '.join(FOLDERS)}")
    return load_device(FOLDERS[folder.name])


def measured_folders(measured: Path) -> list[str]:
    """The devices of `FOLDERS` whose tables are there."""
    return [name for name in FOLDERS if (measured / name).is_dir()]


def gemm_tables(folder: Path) -> list[GemmTable]:
    """Every GEMM table of one device's folder, large and small products alike.

    vLLM's tables time block-scaled products launch by launch, so that small ones take what Python takes:
    55 us or more on an H100, 240 on a GB200. SGLang's time them in CUDA graphs and are read for them alone.
    """
    device = device_of(folder)
    if (folder / "dense.csv").is_file():
        return [GemmTable(device, "vllm", "bf16", _layers(folder))]
    found = []
    for path in sorted(folder.glob("gemm_perf_*.parquet")):
        frame, library = _frame(path), path.stem.removeprefix("gemm_perf_")
        for stored, (dtype, copies, size) in DTYPES.items():
            if library == ("vllm" if dtype == "fp8_block" else "sglang"):
                continue
            rows = frame[frame.gemm_dtype == stored]
            if len(rows):
                found.append(GemmTable(device, library, dtype, _products(rows, size, copies)))
    return found


def versions(folder: Path) -> str:
    """Which versions of which libraries were measured, by kind of table."""
    found = []
    for path in sorted(folder.glob("*_perf_*.parquet")):
        kind, library = path.stem.split("_perf_")
        numbers = sorted(set(_frame(path)["version"].astype(str)))
        found.append(f"{kind} {library} {'/'.join(numbers)}")
    return ", ".join(found)


def _products(frame: "pd.DataFrame", size: float, copies: int) -> Rows[Products]:
    """`size`: bytes of a weight and of an input."""
    m, n, k = (frame[name].to_numpy(float) for name in ("m", "n", "k"))
    # Rows of 8 and 4 bits hold the kernel that quantises the input: bf16 read, fewer bits written.
    quantised = (0.0 if size == 2 else 2 + size) * m * k
    work = Products(m, n, k, np.ones_like(m), size * n * k, size * m * k, 2.0 * m * n, quantised)
    key = (n * 1_000_000 + k).astype(np.int64)
    return Rows(work, frame["latency"].to_numpy(float) * 1e-3, copies * size * n * k, key)


def _layers(folder: Path) -> Rows[Products]:
    """vLLM's layers of Llama-3.1-8B, timed one by one (LLMServingSim's tables, microseconds)."""
    shapes = {
        "qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "gate_up_proj": (28672, 4096),
        "down_proj": (4096, 14336), "lm_head": (128256, 4096),
    }  # fmt: skip
    dense = _frame(folder / "dense.csv").rename(columns={"tokens": "m"})
    heads = _frame(folder / "per_sequence.csv").rename(columns={"sequences": "m"})
    frame = pd.concat([dense, heads])
    frame = frame[frame.layer.isin(list(shapes))].copy()
    frame["n"] = frame.layer.map(lambda layer: shapes[layer][0])
    frame["k"] = frame.layer.map(lambda layer: shapes[layer][1])
    frame["latency"] = frame.time_us * 1e-3
    rows = _products(frame, 2.0, 1)
    return Rows(rows.work, rows.seconds, np.full(len(rows), np.inf), rows.key)  # other layers run between


def large(rows: Rows[Products], device: Device) -> Rows[Products]:
    """Products whose rotating weights no cache can keep, of the sizes that models have."""
    x = rows.work
    one_copy = rows.swept_bytes == x.weight_bytes
    cold = rows.swept_bytes > np.where(one_copy, ONE_COPY_BYTES, CACHE_REACH * device.cache_bytes)
    return rows.where(cold & (x.n >= 1024) & (x.k >= 1024))


def decode_rows(folder: Path, head_dims: Sequence[int] = (128,), kv: str = "bfloat16") -> Rows[Decodes]:
    """Decode attention without a window."""
    if (folder / "attention.csv").is_file():
        frame = _frame(folder / "attention.csv")
        frame = frame if kv == "bfloat16" else frame[:0]
        return _mixed_kernel_decodes(frame[(frame.prefill_chunk == 0) & (frame.n_decode > 0)])
    frame = _attention(folder / "generation_attention_perf_vllm.parquet", head_dims, kv)
    context = (frame.isl + frame.step).to_numpy(float)
    kv_bytes = (2.0 if kv == "bfloat16" else 1.0) * 2 * frame.batch_size * context * _wide(frame)
    queries = 4.0 * frame.batch_size * frame.num_heads * frame.head_dim
    work = Decodes(
        frame.batch_size.to_numpy(float),
        context,
        frame.num_key_value_heads.to_numpy(float),
        kv_bytes.to_numpy(float),
        queries.to_numpy(float),
    )
    key = (frame.num_heads * 1000 + frame.num_key_value_heads).to_numpy(np.int64)
    return Rows(work, frame.latency.to_numpy(float) * 1e-3, work.kv_bytes, key)


def _mixed_kernel_decodes(frame: "pd.DataFrame") -> Rows[Decodes]:
    """Llama-3.1-8B's heads: 32 of queries, 8 of keys, of 128."""
    n, context = frame.n_decode.to_numpy(float), frame.kv_decode.to_numpy(float)
    work = Decodes(n, context, np.full_like(n, 8), 2 * 2 * n * context * 8 * 128, 4.0 * n * 32 * 128)
    key = (n * 100_000 + context).astype(np.int64)
    return Rows(work, frame.time_us.to_numpy(float) * 1e-6, work.kv_bytes, key)


def prefill_rows(folder: Path, head_dims: Sequence[int] = (128,), kv: str = "bfloat16") -> Rows[Prefills]:
    """Causal attention over prompts of 512 tokens or more (or chunks after a context), without a window."""
    if (folder / "attention.csv").is_file():
        frame = _frame(folder / "attention.csv")
        return _chunks(frame if kv == "bfloat16" else frame[:0])
    frame = _attention(folder / "context_attention_perf_vllm.parquet", head_dims, kv)
    frame = frame[frame.isl >= 512]
    s, heads, dim = (frame[name].to_numpy(float) for name in ("isl", "num_heads", "head_dim"))
    queries = frame.batch_size.to_numpy(float) * s
    seen = (s + 1) / 2
    work = Prefills(4 * heads * dim * queries * seen, seen, s, dim, 4 * queries * heads * dim)
    key = (frame.num_heads * 1000 + frame.num_key_value_heads).to_numpy(np.int64)
    return Rows(work, frame.latency.to_numpy(float) * 1e-3, np.zeros_like(s), key)


def _chunks(frame: "pd.DataFrame") -> Rows[Prefills]:
    frame = frame[(frame.n_decode == 0) & (frame.prefill_chunk + frame.kv_prefill >= 512)]
    q, before = frame.prefill_chunk.to_numpy(float), frame.kv_prefill.to_numpy(float)
    seen = before + (q + 1) / 2
    dim = np.full_like(q, 128)
    work = Prefills(4 * 32 * 128 * q * seen, seen, q + before, dim, 4 * q * 32 * 128)
    key = (q * 100_000 + before).astype(np.int64)
    return Rows(work, frame.time_us.to_numpy(float) * 1e-6, np.zeros_like(q), key)


def mixed_ratios(folder: Path) -> Amounts:
    """How many times longer decode attention takes inside a step that prefills too (KV over 50 MB)."""
    frame = _frame(folder / "attention.csv")
    prefills = frame[frame.n_decode == 0].set_index(["prefill_chunk", "kv_prefill"]).time_us
    decodes = frame[frame.prefill_chunk == 0].set_index(["n_decode", "kv_decode"]).time_us
    both = frame[(frame.n_decode * frame.kv_decode * 4096 > 50e6) & (frame.prefill_chunk > 0)]
    both = both.join(prefills.rename("prefill_us"), on=["prefill_chunk", "kv_prefill"])
    both = both.join(decodes.rename("decode_us"), on=["n_decode", "kv_decode"]).dropna()
    return ((both.time_us - both.prefill_us) / both.decode_us).to_numpy(float)


def pass_rows(folder: Path) -> tuple[Amounts, Amounts]:
    """Bytes and seconds of norm, rotary embedding and activation passes of Llama-3.1-8B."""
    elements = {"layernorm": 4 * 4096, "rotary_emb": 2 * 40 * 128, "act_fn": 3 * 14336}
    frame = _frame(folder / "dense.csv")
    frame = frame[frame.layer.isin(list(elements))]
    moved = 2.0 * frame.tokens * frame.layer.map(elements)
    return moved.to_numpy(float), frame.time_us.to_numpy(float) * 1e-6


def all_reduce_rows(folder: Path, *, nccl: bool = False) -> dict[int, tuple[Amounts, Amounts]]:
    """Message bytes and seconds by number of ranks: vLLM's own kernel in a CUDA graph, or NCCL's."""
    path = folder / ("nccl_perf_nccl.parquet" if nccl else "custom_allreduce_perf_vllm.parquet")
    if not path.is_file():
        return {}
    frame = _frame(path)
    if nccl:
        frame = frame[(frame.op_name == "all_reduce") & (frame.nccl_dtype == "half")]
    else:
        frame = frame[frame.backend == "vllm_graph"]
    by_ranks = {n: frame[frame.num_gpus == n] for n in sorted(frame.num_gpus.unique().tolist())}
    return {
        n: (2.0 * rows.message_size.to_numpy(float), rows.latency.to_numpy(float) * 1e-3)
        for n, rows in by_ranks.items()
    }


def _attention(path: Path, head_dims: Sequence[int], kv: str) -> "pd.DataFrame":
    frame = _frame(path)
    keep = frame.head_dim.isin(head_dims) & (frame.kv_cache_dtype == kv)
    if "window_size" in frame:
        keep &= frame.window_size == 0
    return frame[keep]


def _wide(frame: "pd.DataFrame") -> Any:
    return frame.num_key_value_heads * frame.head_dim


def _frame(path: Path) -> "pd.DataFrame":
    if not path.is_file():
        raise RooflineError(f"no measured table at {path}; give the folder that holds `measured`")
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
