"""Published tables of single kernels: what each row did, the seconds it took, and what the model says of it.

Tables: `tests/data/measured`, with their sources in `tests/data/SOURCES.md`; docs/roofline.md says where to
get those of Blackwell, which are not in the repository. Needs pandas.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from burstline.roofline.device.calibration import Constants
from burstline.roofline.device.device import Device, collective_s, load_device
from burstline.roofline.model.shapes import ELEMENT_BYTES
from burstline.roofline.predict.kernels import Amounts, Work, seconds_of
from burstline.roofline.predict.predict import CACHE_REACH

FOLDERS = {
    "a100_sxm": "a100-sxm4-80g", "h100_sxm": "h100-sxm5-80g", "h200_sxm": "h200-sxm-141g", "l40s": "l40s",
    "rtx4090": "rtx4090", "b200_sxm": "b200-sxm", "b300_sxm": "b300-sxm", "gb200": "gb200",
    "gb300": "gb300", "rtx_pro_6000_server": "rtx-pro-6000-server",
}  # fmt: skip
# Stored dtype -> ours, how many copies of the weights rotate while a product is timed, and the bytes of a
# weight and of an input: 4-bit ones have a scale of one byte for each 16.
DTYPES = {"bfloat16": ("bf16", 6, 2.0), "fp8": ("fp8", 6, 1.0), "nvfp4": ("fp4", 1, 0.5 + 1 / 16)}
ONE_COPY_BYTES = 32e6
"""Products timed with one copy of the weights, which caches may hold: only larger ones count."""


@dataclass(frozen=True)
class Table:
    """Rows of one kind of kernel on one device. `predict` gives the seconds of each for any constants.

    `least_s`: its ceilings, of compute alone where a cache may hold what is swept. `cold`: rows of the sizes
    that models have, which no cache can keep: those that errors are told of. `sizes` of products: m, a number
    for n and k, and the bound's compute time over its memory time.
    """

    device: Device
    kind: str
    seconds: Amounts
    predict: Callable[[Constants], Amounts]
    least_s: Amounts
    cold: np.ndarray
    sizes: tuple[Amounts, Amounts, Amounts] | None = None

    def ratios(self, of: Constants) -> Amounts:
        """Predicted over measured, of the cold rows."""
        return np.asarray((self.predict(of) / self.seconds)[self.cold])


def read_tables(measured: Path) -> list[Table]:
    """Every table of every device's folder that is there."""
    return [
        table
        for folder, id_ in FOLDERS.items()
        if (measured / folder).is_dir()
        for table in _of(measured / folder, load_device(id_))
    ]


def _of(folder: Path, device: Device) -> Iterator[Table]:
    if (folder / "dense.csv").is_file():  # vLLM's layers on an RTX 4090 (LLMServingSim, microseconds)
        yield _products(_layers(folder), device, "bf16", 1, 2.0, np.inf)
        return
    frame = pd.read_parquet(folder / "gemm_perf_vllm.parquet")
    for stored, (dtype, copies, size) in DTYPES.items():
        rows = frame[frame.gemm_dtype == stored]
        if len(rows):
            reach = ONE_COPY_BYTES if copies == 1 else CACHE_REACH * device.cache_bytes
            yield _products(rows, device, dtype, copies, size, reach)
    yield _decodes(folder, device)
    yield _prefills(folder, device)
    if (folder / "custom_allreduce_perf_vllm.parquet").is_file():
        yield from _all_reduces(folder, device)


def _products(
    frame: pd.DataFrame, device: Device, dtype: str, copies: int, size: float, reach: float
) -> Table:
    m, n, k, seconds = (frame[name].to_numpy(float) for name in ("m", "n", "k", "latency"))
    weights = size * n * k
    # Rows of 8 and 4 bits hold the kernel that quantises the input: 16 bits read, fewer written.
    quantised = (0.0 if size == 2 else 2 + size) * m * k
    rates = {"peak": device.peak_flops_per_s(dtype), "bytes_per_s": device.bytes_per_s}
    moved, bits = weights + size * m * k + 2.0 * m * n, 8 * ELEMENT_BYTES[dtype]
    product = seconds_of("matmul", Work(m, n, k, bits=bits, bytes=moved, **rates))
    before = seconds_of("elementwise", Work(bytes=quantised, **rates))

    def predict(of: Constants) -> Amounts:
        return np.asarray(product(of) + np.where(quantised > 0, before(of), 0.0))

    swept = copies * weights if np.isfinite(reach) else np.full_like(m, np.inf)
    compute_s, memory_s = 2 * m * n * k / rates["peak"], moved / device.bytes_per_s
    cold = (swept > reach) | ~np.isfinite(swept)
    least_s = np.maximum(compute_s, np.where(swept > CACHE_REACH * device.cache_bytes, memory_s, 0.0))
    of_models = cold & (n >= 1024) & (k >= 1024)
    sizes = (m, n * 1e6 + k, compute_s / memory_s)
    return Table(device, f"{dtype} products", seconds * 1e-3, predict, least_s, of_models, sizes)


def _layers(folder: Path) -> pd.DataFrame:
    """The products of Llama-3.1-8B; other layers run between them, so that no cache keeps their weights."""
    shapes = {
        "qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "gate_up_proj": (28672, 4096),
        "down_proj": (4096, 14336), "lm_head": (128256, 4096),
    }  # fmt: skip
    dense = pd.read_csv(folder / "dense.csv").rename(columns={"tokens": "m"})
    heads = pd.read_csv(folder / "per_sequence.csv").rename(columns={"sequences": "m"})
    frame = pd.concat([dense, heads])
    frame = frame[frame.layer.isin(list(shapes))].copy()
    frame["n"], frame["k"] = zip(*frame.layer.map(shapes), strict=True)
    return frame.assign(latency=frame.time_us * 1e-3)


def _attention(path: Path) -> pd.DataFrame:
    frame = pd.read_parquet(path)
    frame = frame[(frame.head_dim == 128) & (frame.kv_cache_dtype == "bfloat16")]
    return frame[frame.window_size == 0] if "window_size" in frame else frame


def _decodes(folder: Path, device: Device) -> Table:
    frame = _attention(folder / "generation_attention_perf_vllm.parquet")
    context = (frame.isl + frame.step).to_numpy(float)
    kv = (4.0 * frame.batch_size * context * frame.num_key_value_heads * frame.head_dim).to_numpy(float)
    queries = (4.0 * frame.batch_size * frame.num_heads * frame.head_dim).to_numpy(float)
    cold = kv > CACHE_REACH * device.cache_bytes
    least_s = np.where(cold, (kv + queries) / device.bytes_per_s, 0.0)
    x = Work(n=context, kv_bytes=kv, activation_bytes=queries, bytes_per_s=device.bytes_per_s)
    predict = seconds_of("decode", x)
    return Table(device, "decode attention", frame.latency.to_numpy(float) * 1e-3, predict, least_s, cold)


def _prefills(folder: Path, device: Device) -> Table:
    frame = _attention(folder / "context_attention_perf_vllm.parquet")
    frame = frame[frame.isl >= 512]
    tok = frame.isl.to_numpy(float)
    seen, peak = (tok + 1) / 2, device.peak_flops_per_s("bf16")
    flops = (4.0 * frame.num_heads * frame.head_dim * frame.batch_size).to_numpy(float) * tok * seen
    predict = seconds_of("prefill", Work(flops=flops, keys=seen, peak=peak))
    cold = np.ones(len(tok), bool)
    seconds = frame.latency.to_numpy(float) * 1e-3
    return Table(device, "prefill attention", seconds, predict, flops / peak, cold)


def _all_reduces(folder: Path, device: Device) -> Iterator[Table]:
    """vLLM's own kernel in a CUDA graph; `message_size` counts elements."""
    frame = pd.read_parquet(folder / "custom_allreduce_perf_vllm.parquet")
    frame = frame[frame.backend == "vllm_graph"]
    sizes = zip(2.0 * frame.message_size, frame.num_gpus, strict=True)
    link = device.links[0]
    ideal_s = np.array([collective_s("all_reduce", size, int(n), device.links)[0] for size, n in sizes])
    message, n = 2.0 * frame.message_size.to_numpy(float), frame.num_gpus.to_numpy(float)
    known = {"ideal_s": ideal_s, "message_bytes": message, "n_ranks": n}
    predict = seconds_of(
        "collective", Work(**known, in_switch=link.in_switch, link_bytes_per_s=link.bytes_per_s)
    )
    seconds = frame.latency.to_numpy(float) * 1e-3
    yield Table(device, "all-reduces", seconds, predict, ideal_s, np.ones(len(frame), bool))
    middle = (n == 8) & (message >= 2**16) & (message <= 2**24)
    yield Table(device, "all-reduces, 8 ranks, 64 kB to 16 MB", seconds, predict, ideal_s, middle)


TOLERANCE = 0.02
_EXPLAINED = {
    ("l40s", "bf16 products"): "one product's six weight copies are 3.1 x L2, just past the filter",
    ("rtx-pro-6000-server", "bf16 products"): "one product's six copies are 4.6 x L2",
}


def beaten(tables: list[Table]) -> list[str]:
    """Tables with rows that beat their ceiling by more than 2%, but for those whose reason is known."""
    found = []
    for table in tables:
        n = int((table.least_s / table.seconds > 1 + TOLERANCE).sum())
        if n > ((table.device.id, table.kind) in _EXPLAINED):
            found.append(f"{table.device.name} {table.kind}: {n}")
    return found


def slopes(table: Table) -> tuple[Amounts, np.ndarray]:
    """(How a product's time grows from m to 2m, as a power; whether its bound is compute), of powers of two.

    Pairs within 25% of the ridge are left out.
    """
    assert table.sizes is not None
    m, key, over = (column[table.cold] for column in table.sizes)
    seconds = table.seconds[table.cold]
    at = {(a, b): i for i, (a, b) in enumerate(zip(key.tolist(), m.tolist(), strict=True))}
    found, classes = [], []
    for (k, rows), i in at.items():
        j = at.get((k, 2 * rows))
        if j is None or np.log2(rows) % 1 or (over[j] > 0.75 and over[i] < 1.25):
            continue
        found.append(float(np.log2(seconds[j] / seconds[i])))
        classes.append(bool(over[i] > 1))
    return np.array(found), np.array(classes)
