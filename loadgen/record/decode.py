"""Captures to records, in child processes, so that decoding costs neither the driver nor the caller.

Also the texts of replies whose tokens the server did not count, for a tokenizer to count.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from burstline.loadgen.record import http1
from burstline.loadgen.record.capture import Capture, reply_limit_bytes
from burstline.loadgen.record.capture_store import OnDamage, read_captures, refuse
from burstline.loadgen.record.record import Counts, Decode, Record, record_of, record_without_capture
from burstline.loadgen.record.tables import RECORDS, counts_of, keep_pandas_out, record_table
from burstline.servers.host.child import Child
from burstline.servers.messages import EngineError, Reply
from burstline.servers.protocol.replies import understood
from burstline.workloads.plan_table import WITHOUT_PROMPTS, requests_without_prompts
from burstline.workloads.request import Request

_N_AT_ONCE = 500
_BYTES_PER_READ = 20


@dataclass(frozen=True, slots=True)
class Share:
    """What one process decodes: of a run's captures every n-th from the k-th on."""

    directory: Path
    decode: Decode
    k: int = 0
    n: int = 1

    def tables(self) -> Iterator[pa.Table]:
        """The records, some hundred at a time.

        Each process walks the whole file: that costs a tenth of decoding, and only records cross.
        """
        requests, _ = _read_asked(self.directory)
        captures = read_captures(self.directory / "captures", max_bytes=capture_limit_bytes(requests))
        share = islice(captures, self.k, None, self.n)
        for records in decoded_batches(share, requests, self.decode, _read_counts(self.directory)):
            yield record_table(records)


def decode_run(directory: Path, decode: Decode, n_processes: int | None = None) -> pa.Table:
    """The records of a run's folder: one row per request of `plan.parquet`, in its order.

    `decode` is the engine's. A small run is decoded here, a larger one by child processes, as many as CPUs
    unless given; each holds the raw bytes of one reply and the records of one batch. What the server did not
    count is read from `counts.parquet`, where it was counted afterwards. Requests without a capture are
    `cancelled`. Raises DamagedCapturesError.
    """
    if n_processes is None:
        n_processes = min(_n_cpus(), 1 + n_planned(directory) // 2000)
    if n_processes == 1:
        tables = list(Share(directory, decode).tables())
    else:
        tables = _by_children([Share(directory, decode, k, n_processes) for k in range(n_processes)])
    requests, due_ns = _read_asked(directory)
    seen = pa.concat_tables([RECORDS.empty_table(), *tables])
    n = sum(request.stage is None for request in requests)
    return with_cancelled(seen, requests[:n], due_ns[:n])


def _by_children(shares: list[Share]) -> list[pa.Table]:
    """What one child for each share decodes; raises what a child raised."""
    tables: list[pa.Table] = []
    children: dict[Connection, Child] = {}
    try:
        for share in shares:
            child = Child("burstline.loadgen.record.decode", f"decoder {share.k}")
            children[child.connection] = child
            child.send(share)
        pending = list(children)
        while pending:
            for connection in [each for each in wait(pending) if isinstance(each, Connection)]:
                table = children[connection].receive()
                if table is None:
                    pending.remove(connection)
                else:
                    tables.append(table)
    finally:
        for child in children.values():
            child.end(0.0)
    return tables


def main(home: Connection, share: Share) -> None:
    """Decode one share in a child process: tables of records, then None."""
    keep_pandas_out()
    for table in share.tables():
        home.send(table)
    home.send(None)


def with_cancelled(seen: pa.Table, requests: list[Request], due_ns: array[int]) -> pa.Table:
    """One row per request, in order: those of `seen`, and one without a reply for each of the rest.

    A run that was ended by force leaves no capture of what it had in flight (`cancelled`), nor of what was
    due after the last capture (`not_sent`).
    """
    # A request that was captured twice is a bug elsewhere; the first capture stands.
    _, first = np.unique(seen.column("index").to_numpy(), return_index=True)
    seen = seen.take(first)
    there = set(seen.column("index").to_pylist())
    last_ns = pc.max(seen.column("closed_ns")).as_py()
    missing = [
        record_without_capture(request, due, sent=last_ns is None or due <= last_ns)
        for request, due in zip(requests, due_ns, strict=True)
        if request.index not in there
    ]
    if not missing:
        return seen
    whole = pa.concat_tables([seen, record_table(missing)])
    return whole.sort_by("index")


def decoded_batches(
    captures: Iterable[Capture],
    requests: list[Request],
    decode: Decode,
    counts: Mapping[int, Counts] = MappingProxyType({}),
    on_damage: OnDamage = refuse,
) -> Iterator[list[Record]]:
    """The records of `captures`, 500 at a time, in the order of the captures."""
    captures = _planned(captures, len(requests), on_damage)
    while batch := list(islice(captures, _N_AT_ONCE)):
        yield [
            record_of(requests[capture.index], capture, decode, counts.get(capture.index, ()))
            for capture in batch
        ]


def _planned(captures: Iterable[Capture], n_planned: int, on_damage: OnDamage) -> Iterator[Capture]:
    for capture in captures:
        if 0 <= capture.index < n_planned:
            yield capture
        else:
            on_damage(f"a capture is of request {capture.index:,}, but the plan has {n_planned:,}")


def capture_limit_bytes(requests: Iterable[Request]) -> int:
    """The largest that a capture of one of these can be: its reply, and its read times at a read a byte."""
    replies = (reply_limit_bytes(request.n_prompt_tok, request.n_output_tok) for request in requests)
    return (1 << 20) + (1 + _BYTES_PER_READ) * max(replies, default=0)


def _read_counts(directory: Path) -> dict[int, Counts]:
    path = directory / "counts.parquet"
    return counts_of(_read_table(path)) if path.exists() else {}


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    # pq.read_table would import pyarrow.dataset as well.
    with pq.ParquetFile(path) as file:
        return file.read(columns=columns)


def n_planned(directory: Path) -> int:
    """How many requests the plan of a run has, those of its stages included."""
    return int(pq.read_metadata(directory / "plan.parquet").num_rows)


def _read_asked(directory: Path) -> tuple[list[Request], array[int]]:
    """The plan's requests without their prompts, and when each was due."""
    path = directory / "plan.parquet"
    table = _read_table(path, [name for name in pq.read_schema(path).names if name in WITHOUT_PROMPTS])
    if "stage" in table.column_names and table.column("stage").null_count < len(table):
        table = table.sort_by("index")  # stages stand in the order in which they are sent
    return requests_without_prompts(table), array("q", table.column("due_ns").to_numpy().tobytes())


GLANCE: Final = 32
"""After this many replies, all of them counted, the server counts: the rest need not be read."""


def uncounted(captures: Path, decode: Decode) -> Iterator[tuple[int, str]]:
    """The index and the text of each reply without a token count, in the order in which they ended.

    Where a server counts, a reply that was cut off before its count may be left out.
    """
    n_counted = n_found = 0
    for capture in read_captures(captures):
        reply = _reply(capture, decode)
        if reply is None:
            continue
        if reply.text is not None:
            n_found += 1
            yield capture.index, reply.text
        elif reply.n_output_ids is not None or reply.n_output_usage is not None:
            n_counted += 1
            if n_counted == GLANCE and not n_found:
                return


def _reply(capture: Capture, decode: Decode) -> Reply | None:
    try:
        parsed = http1.parse(capture.reads)
    except EngineError:
        return None
    return understood(decode, parsed[0]) if parsed else None
