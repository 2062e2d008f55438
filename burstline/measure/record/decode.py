"""Captures to records, in child processes, so that decoding costs neither the driver nor the caller.

Also the texts of replies whose tokens the server did not count, for a tokenizer to count.
"""

import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Capture, OnDamage, read_captures, refuse, reply_limit_bytes
from burstline.loadgen.capture.files import PARTIAL
from burstline.measure.record.record import Counts, Decode, Record, record_of, record_without_capture
from burstline.measure.record.tables import RECORDS, counts_of, keep_pandas_out, record_table
from burstline.servers.engine import Engine
from burstline.servers.host.child import Child, ChildLostError
from burstline.servers.host.kernel import usable_cores
from burstline.servers.messages import EngineError, HttpReply
from burstline.servers.replies import answers_in, understood
from burstline.workloads.plan_table import WITHOUT_PROMPTS, PlannedRequests
from burstline.workloads.request import Request

_N_AT_ONCE = 500
_BATCH_S = 0.3
_BYTES_PER_READ = 20
STILL_S: Final = 6.0
"""How long all decoders may send nothing: each first reads the plan, which may be long."""


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
        requests = _read_asked(self.directory)
        captures = read_captures(self.directory / "captures", max_bytes=capture_limit_bytes(requests))
        share = islice(captures, self.k, None, self.n)
        path = self.directory / "counts.parquet"
        counts = counts_of(_read_table(path)) if path.exists() else {}
        for records in decoded_batches(share, requests, self.decode, counts):
            yield record_table(records)


def decode_run(directory: Path, decode: Decode, n_processes: int | None = None) -> pa.Table:
    """The records of a run's folder: one row per request of `plan.parquet`, in its order.

    `decode` is the engine's. A small run is decoded here, a larger one by child processes, as many as CPUs
    unless given; each holds the raw bytes of one reply and the records of one batch. What the server did not
    count is read from `counts.parquet`, where it was counted afterwards. Raises DamagedCapturesError.
    """
    planned = _read_asked(directory).table
    if n_processes is None:
        n_processes = min(usable_cores(), 1 + len(planned) // 2000)
    if n_processes == 1:
        tables = list(Share(directory, decode).tables())
    else:
        tables = _by_children([Share(directory, decode, k, n_processes) for k in range(n_processes)])
    measured = PlannedRequests(planned.slice(0, planned.column("stage").null_count))
    seen = _cut_where_unnamed(pa.concat_tables([RECORDS.empty_table(), *tables]))
    return with_cancelled(seen, measured, was_killed=were_killed(directory / "captures"))


def _cut_where_unnamed(seen: pa.Table) -> pa.Table:
    """Replies with fewer tokens than asked and no finish reason are cut where the server gives others one."""
    outcome, unnamed = seen.column("outcome"), seen.column("finish_reason").is_null()
    came = pc.coalesce(seen.column("output_tok"), pc.list_value_length(seen.column("token_n")))
    short = pc.and_(pc.equal(outcome, "ok"), pc.less(came, seen.column("planned_output_tok")))
    if pc.all(unnamed).as_py() or not pc.any(cut := pc.and_(short, unnamed)).as_py():
        return seen
    at = seen.schema.get_field_index("outcome")
    return seen.set_column(at, seen.schema.field(at), pc.if_else(cut, "truncated", outcome))


def _by_children(shares: list[Share]) -> list[pa.Table]:
    """What one child for each share decodes; raises what a child raised. Those of a lost child are ours."""
    tables: dict[int, list[pa.Table]] = {share.k: [] for share in shares}
    pending: dict[Connection, tuple[Share, Child]] = {}
    with ExitStack() as kept:
        for share in shares:
            child = kept.enter_context(Child("burstline.measure.record.decode", f"decoder {share.k}"))
            pending[child.connection] = share, child
            child.send(share)
        while pending:
            heard = wait(list(pending), STILL_S) or list(pending)
            for connection in [each for each in heard if isinstance(each, Connection)]:
                share, child = pending[connection]
                try:
                    table = child.receive()
                except ChildLostError as error:
                    child.kill()
                    sys.stderr.write(f"{error}; its replies are decoded once more\n")
                    tables[share.k], table = list(share.tables()), None
                if table is None:
                    del pending[connection]
                else:
                    tables[share.k].append(table)
    return list(chain.from_iterable(tables.values()))


def main(home: Connection, share: Share) -> None:
    """Decode one share in a child process: tables of records, then None."""
    keep_pandas_out()
    for table in share.tables():
        home.send(table)
    home.send(None)


def with_cancelled(seen: pa.Table, requests: PlannedRequests, *, was_killed: bool = True) -> pa.Table:
    """One row per request, in order: those of `seen`, and one without a reply for each of the rest.

    A driver captures all that it has sent. One that was killed leaves no capture of what it had in flight
    (`cancelled`), nor of what was due after the last capture (`not_sent`).
    """
    # A request that was captured twice is a bug elsewhere; the first capture stands.
    _, first = np.unique(seen.column("index").to_numpy(), return_index=True)
    seen = seen.take(first)
    index, due_ns = (requests.table.column(name).to_numpy() for name in ("index", "due_ns"))
    is_missing = ~np.isin(index, seen.column("index").to_numpy())
    if not is_missing.any():
        return seen
    closed_ns = seen.column("closed_ns").drop_null().to_numpy()
    last_ns = closed_ns.max() if len(closed_ns) else np.inf
    is_sent = was_killed & (due_ns <= last_ns)
    rest = [
        _without_capture(requests, rows, sent=sent)
        for sent in (True, False)
        if len(rows := np.flatnonzero(is_missing & (is_sent == sent)))
    ]
    return pa.concat_tables([seen, *rest]).sort_by("index")


def _without_capture(requests: PlannedRequests, rows: NDArray[np.int64], *, sent: bool) -> pa.Table:
    """The records of these rows by column: they may be most of a million."""
    one = record_without_capture(requests[int(rows[0])], sent=sent)
    planned = requests.table.select(["index", "due_ns", "n_prompt_tok", "n_output_tok"]).take(rows)
    own = dict(zip(("index", "due_ns", "planned_prompt_tok", "planned_output_tok"), planned, strict=True))
    columns = [
        own[field.name]
        if field.name in own
        else pa.repeat(pa.scalar(getattr(one, field.name), field.type), len(rows))
        for field in RECORDS
    ]
    return pa.table(columns, RECORDS)


def were_killed(captures: Path) -> bool:
    """Whether a driver of this run ended before it had closed its file."""
    return any(captures.glob(f"*{PARTIAL}"))


def decoded_batches(
    captures: Iterable[Capture],
    requests: Sequence[Request],
    decode: Decode,
    counts: Mapping[int, Counts] = MappingProxyType({}),
    on_damage: OnDamage = refuse,
) -> Iterator[list[Record]]:
    """The records of `captures`, those of 0.3 s at a time and 500 at most, in the order of the captures."""
    batch: list[Record] = []
    until_s = time.monotonic() + _BATCH_S
    for capture in captures:
        if not 0 <= capture.index < len(requests):
            on_damage(f"a capture is of request {capture.index:,}, but the plan has {len(requests):,}")
            continue
        batch.append(record_of(requests[capture.index], capture, decode, counts.get(capture.index, ())))
        if len(batch) == _N_AT_ONCE or time.monotonic() > until_s:
            yield batch
            batch, until_s = [], time.monotonic() + _BATCH_S
    if batch:
        yield batch


def capture_limit_bytes(requests: PlannedRequests) -> int:
    """The largest that a capture of one of these can be: its reply, and its read times at a read a byte."""
    columns = (requests.table.column(name).to_numpy() for name in ("n_prompt_tok", "n_output_tok"))
    longest = (int(n_tok.max(initial=0)) for n_tok in columns)
    return (1 << 20) + (1 + _BYTES_PER_READ) * reply_limit_bytes(*longest)


def _read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    # pq.read_table would import pyarrow.dataset as well.
    with pq.ParquetFile(path) as file:
        return file.read(columns=columns)


def _read_asked(directory: Path) -> PlannedRequests:
    """The plan's requests without their prompts, those of its stages last."""
    table = _read_table(directory / "plan.parquet", WITHOUT_PROMPTS)
    if table.column("stage").null_count < len(table):
        table = table.sort_by("index")  # stages stand in the order in which they are sent
    return PlannedRequests(table)


GLANCE: Final = 32
"""After this many replies, all of them counted, the server counts: the rest need not be read."""


def uncounted(captures: Path, decode: Decode) -> Iterator[tuple[int, str]]:
    """The index and the text of each reply without a token count, in the order in which they ended.

    Where a server counts, a reply that was cut off before its count may be left out.
    """
    n_counted = n_found = 0
    for capture, http in _replies(captures):
        reply = understood(decode, http)
        if reply.text is not None:
            n_found += 1
            yield capture.index, reply.text
        elif reply.n_output_ids is not None or reply.n_output_usage is not None:
            n_counted += 1
            if n_counted == GLANCE and not n_found:
                return


@dataclass(frozen=True, slots=True)
class Reading:
    """What a client made of a reply: its token ids where they came, else its text; or why it made nothing."""

    generated: tuple[int, ...] | str = ""
    n_tok: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    index: int = -1


@dataclass(frozen=True, slots=True)
class Readings:
    """All that one client, named with its version, read of an audit."""

    client: str
    replies: tuple[Reading, ...]


def readings(captures: Path, engine: Engine, indices: Container[int]) -> dict[int, Reading]:
    """What our reader makes of the whole replies to these requests, by index, without errors."""
    found: dict[int, Reading] = {}
    for capture, http in _replies(captures):
        if capture.index in indices and capture.failure is None and http.ok:
            with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
                generated, reply = engine.generated(answers_in(http)), understood(engine.decode, http)
                n_tok = reply.n_output_usage if reply.n_output_ids is None else reply.n_output_ids
                said = generated if isinstance(generated, str) else tuple(generated)
                found[capture.index] = Reading(said, n_tok, reply.finish_reason, None, capture.index)
    return found


def _replies(captures: Path) -> Iterator[tuple[Capture, HttpReply]]:
    for capture in read_captures(captures):
        with suppress(EngineError):
            if (parsed := http1.parse(capture.reads)) is not None:
                yield capture, parsed[0]
