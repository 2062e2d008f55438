"""Captures to records, in child processes: what decoding costs is not the driver's nor the caller's."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq

from loadgen.record.capture import Capture
from loadgen.record.capture_store import read_captures
from loadgen.record.record import Counts, Decode, Record, record_of, record_without_capture
from loadgen.record.tables import RECORDS, counts_of, record_table
from workloads.plan_table import WITHOUT_PROMPTS, requests_without_prompts
from workloads.request import Request

_N_AT_ONCE = 500


def decode_run(directory: Path, decode: Decode, n_processes: int | None = None) -> pa.Table:
    """The records of a run's folder: one row per request of `plan.parquet`, in its order.

    `decode` is the engine's. Requests without a capture are `cancelled`. What the server did not count is
    read from `counts.parquet`, where somebody did (see `retokenize`). `n_processes` children share the
    captures (as many as CPUs unless told, fewer for small runs); each streams its share through a file, so
    that no more raw bytes than one reply's are in memory at once, and no more records than a batch.
    """
    requests, due_ns = _read_asked(directory)
    if n_processes is None:
        n_processes = min(_n_cpus(), 1 + len(requests) // 2000)
    return with_cancelled(_seen(directory, decode, n_processes), requests, due_ns)


def _seen(directory: Path, decode: Decode, n_processes: int) -> pa.Table:
    """The records of what was captured, in no order."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as parts, ProcessPoolExecutor(n_processes, spawn) as pool:
        paths = [Path(parts, f"{k}.arrow") for k in range(n_processes)]
        shares = [pool.submit(_decode_share, directory, decode, paths, k) for k in range(n_processes)]
        for share in shares:
            share.result()
        # Read by copy: a file that is mapped cannot be removed everywhere.
        return pa.concat_tables(feather.read_table(path, memory_map=False) for path in paths)


def with_cancelled(seen: pa.Table, requests: list[Request], due_ns: array[int]) -> pa.Table:
    """One row per request, in order: those of `seen`, and `cancelled` ones for the rest."""
    # A request that was captured twice is a bug elsewhere; the first capture stands.
    _, first = np.unique(seen.column("index").to_numpy(), return_index=True)
    seen = seen.take(first)
    there = set(seen.column("index").to_pylist())
    missing = [
        record_without_capture(request, due)
        for request, due in zip(requests, due_ns, strict=True)
        if request.index not in there
    ]
    if not missing:
        return seen
    whole = pa.concat_tables([seen, record_table(missing)])
    return whole.take(pc.sort_indices(whole, [("index", "ascending")]))


def decoded_batches(
    captures: Iterable[Capture],
    requests: list[Request],
    decode: Decode,
    counts: Mapping[int, Counts] = MappingProxyType({}),
) -> Iterator[list[Record]]:
    """The records of `captures`, 500 at a time, in the order of the captures."""
    captures = iter(captures)
    while batch := list(islice(captures, _N_AT_ONCE)):
        yield [
            record_of(requests[capture.index], capture, decode, counts.get(capture.index, ()))
            for capture in batch
        ]


def _decode_share(directory: Path, decode: Decode, paths: Sequence[Path], k: int) -> None:
    # Each child walks the whole file and decodes every n-th capture: walking costs a tenth of decoding, and
    # nothing crosses a pipe.
    requests, _ = _read_asked(directory)
    captures = islice(read_captures(directory / "captures"), k, None, len(paths))
    with pa.ipc.new_file(paths[k], RECORDS) as part:
        for records in decoded_batches(captures, requests, decode, _read_counts(directory)):
            part.write_table(record_table(records))


def _read_counts(directory: Path) -> dict[int, Counts]:
    path = directory / "counts.parquet"
    return counts_of(pq.read_table(path)) if path.exists() else {}


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _read_asked(directory: Path) -> tuple[list[Request], array[int]]:
    """The plan's requests without their prompts, and when each was due."""
    names = [name for name in pq.read_schema(directory / "plan.parquet").names if name in WITHOUT_PROMPTS]
    table = pq.read_table(directory / "plan.parquet", columns=names)
    return requests_without_prompts(table), array("q", table.column("due_ns").to_numpy().tobytes())
