"""Captures to records, in child processes, so that decoding costs neither the driver nor the caller.

Also the texts of replies whose tokens the server did not count, for a tokenizer to count.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import subprocess
import sys
import traceback
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loadgen.record import http1
from loadgen.record.capture import Capture, reply_limit_bytes
from loadgen.record.capture_store import OnDamage, read_captures, refuse
from loadgen.record.record import Counts, Decode, Record, record_of, record_without_capture
from loadgen.record.tables import RECORDS, counts_of, keep_pandas_out, record_table
from servers.host import child
from servers.messages import EngineError, Reply
from servers.protocol.replies import understood
from workloads.plan_table import WITHOUT_PROMPTS, requests_without_prompts
from workloads.request import Request

_N_AT_ONCE = 500
_BYTES_PER_READ = 20

_Child = child.Forked | subprocess.Popen[bytes]


def begin_decoding(directory: Path, decode: Decode, n_processes: int | None = None) -> Decoding:
    """Decode the captures in a run's folder by child processes; `decode` is the engine's.

    As many as CPUs unless told, fewer for small runs. Each streams its share through a pipe, so that it holds
    the raw bytes of one reply and the records of one batch. What the server did not count is read from
    `counts.parquet`, where it was counted afterwards.
    """
    if n_processes is None:
        n_processes = min(_n_cpus(), 1 + n_planned(directory) // 2000)
    children = [_start(directory, decode, k, n_processes) for k in range(n_processes)]
    threads = ThreadPoolExecutor(n_processes)
    return Decoding(directory, children, threads, [threads.submit(_received, each) for each in children])


def _start(directory: Path, decode: Decode, k: int, n: int) -> _Child:
    if child.can_fork():
        with suppress(OSError):  # no memory for a copy of this process
            return child.Forked(partial(_write_share, directory, decode, k, n))
    task = base64.b64encode(pickle.dumps((directory, decode, k, n))).decode()
    return child.spawn("loadgen.record.decode", {"share": task})


@dataclass(frozen=True, slots=True)
class Decoding:
    """Children that decode, and threads that receive what they have decoded."""

    directory: Path
    children: list[_Child]
    threads: ThreadPoolExecutor
    tables: list[Future[pa.Table]]

    def records(self) -> pa.Table:
        """The records: one row per request of `plan.parquet`, in its order. Called once.

        Requests without a capture are `cancelled`. Raises DamagedCapturesError.
        """
        requests, due_ns = _read_asked(self.directory)
        try:
            seen = pa.concat_tables([table.result() for table in self.tables])
        except BaseException:
            for process in self.children:
                process.kill()  # ends the threads as well: their pipes end
            raise
        finally:
            self.threads.shutdown()
            for process in self.children:
                child.end(process, 1.0)
        n = sum(request.stage is None for request in requests)
        return with_cancelled(seen, requests[:n], due_ns[:n])


def decode_run(directory: Path, decode: Decode, n_processes: int | None = None) -> pa.Table:
    """The records of a run's folder."""
    return begin_decoding(directory, decode, n_processes).records()


def _received(process: _Child) -> pa.Table:
    """All that one child has decoded; raises what it raised."""
    assert process.stdout is not None
    tables = [RECORDS.empty_table()]
    try:
        with io.BufferedReader(process.stdout) as pipe:  # type: ignore[type-var]
            while (message := pickle.load(pipe)) is not None:  # noqa: S301 our own process
                if isinstance(message, Exception):
                    raise message
                tables.append(message)
    except (EOFError, pickle.UnpicklingError):
        raise RuntimeError("a decoding process was lost; was it killed for want of memory?") from None
    return pa.concat_tables(tables)


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


def _write_share(directory: Path, decode: Decode, k: int, n: int, pipe: IO[bytes]) -> None:
    """In a child: every n-th capture from the k-th on as pickled tables of records, then None, or the error.

    Each child walks the whole file: that costs a tenth of decoding, and only records cross a pipe.
    """
    try:
        requests, _ = _read_asked(directory)
        captures = read_captures(directory / "captures", max_bytes=capture_limit_bytes(requests))
        share = islice(captures, k, None, n)
        for records in decoded_batches(share, requests, decode, _read_counts(directory)):
            pickle.dump(record_table(records), pipe)
        pickle.dump(None, pipe)
    except Exception as error:
        error.add_note(traceback.format_exc())  # the trace itself does not cross
        pickle.dump(error, pipe)


def main() -> None:
    """One child that was started anew."""
    task = json.loads(child.next_line(sys.stdin.fileno()) or b"{}")
    if not task:
        return
    child.end_with_parent()
    keep_pandas_out()
    directory, decode, k, n = pickle.loads(base64.b64decode(task["share"]))  # noqa: S301 the parent's own
    _write_share(directory, decode, k, n, sys.stdout.buffer)
    child.end_now()


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


if __name__ == "__main__":
    main()


GLANCE: Final = 32
"""A server that counted so many replies, and left none uncounted, counts: the others need no look."""


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
