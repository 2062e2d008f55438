"""Records by column, for the metrics. Seconds from the run's start; NaN is what never happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from loadgen.record.record import Outcome

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]

_PER_EVENT = ("event_s", "event_n")


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One entry per planned request, then one per event that carried tokens.

    `table` is the records without what stands here for each event.

    `origin_s` is from when latency counts: where all were due at once (a burst) each request's own send, for
    the order of sending is the shape of that load; otherwise when it was due, so that nothing is omitted.
    `first_s` and `last_s` are when the first and the last token arrived, `first_n` how many came with the
    first. `event_s` and `event_n` run over all events of all requests in order; those of request i are
    `starts[i] : starts[i + 1]`, `owner` names i for each.
    """

    table: pa.Table
    ok: NDArray[np.bool_]
    due_s: Floats
    origin_s: Floats
    dispatched_s: Floats
    connected_s: Floats
    sent_s: Floats
    headers_s: Floats
    closed_s: Floats
    answer_s: Floats
    first_s: Floats
    last_s: Floats
    first_n: Floats
    planned_prompt_tok: Floats
    planned_output_tok: Floats
    prompt_tok: Floats
    output_tok: Floats
    cached_tok: Floats
    server_queue_s: Floats
    server_prefill_s: Floats
    server_first_token_s: Floats
    event_s: Floats
    event_n: Ints32
    starts: Ints
    owner: Ints32

    def __len__(self) -> int:
        return len(self.ok)

    @property
    def event_lag_s(self) -> Floats:
        """How much later than the kernel our code had each event; NaN without a kernel stamp."""
        lag_ns = _flat(self.table, "read_lag_ns")
        return np.where(lag_ns < 0, np.nan, lag_ns / 1e9)

    @property
    def event_error_s(self) -> Floats:
        """By how much each event may have arrived before its stamp; NaN where that was not recorded."""
        known = "read_error_ns" in self.table.column_names
        error_ns = _flat(self.table, "read_error_ns") if known else self.event_s[:0]
        if len(error_ns) != len(self.event_s):
            return np.full(len(self.event_s), np.nan)
        return np.where(error_ns < 0, np.nan, error_ns / 1e9)

    def due_from(self, start_s: float) -> Columns:
        """The requests that were due at `start_s` or later."""
        later = self.due_s >= start_s
        k = len(self) - int(np.count_nonzero(later))
        if later[k:].all():  # due times ascend nearly always, and then little needs to be copied
            return self._of(slice(k, None), slice(int(self.starts[k]), None), self.table.slice(k))
        return self._of(later, later[self.owner], self.table.filter(later))

    def without(self, outcome: Outcome) -> Columns:
        """The requests that ended in another way."""
        others = self.table.column("outcome").to_numpy(zero_copy_only=False) != outcome.value
        if others.all():
            return self
        return self._of(others, others[self.owner], self.table.filter(pa.array(others)))

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Neither served as asked nor abandoned by a client that was to do so."""
        outcome = self.table.column("outcome").to_numpy(zero_copy_only=False)
        return np.asarray(~self.ok & (outcome != Outcome.ABANDONED.value))

    def _of(
        self, requests: slice | NDArray[np.bool_], events: slice | NDArray[np.bool_], table: pa.Table
    ) -> Columns:
        n_events = np.diff(self.starts)[requests]
        made = {"table": table, "starts": _starts(n_events), "owner": _owner(n_events)}
        names = [field.name for field in fields(self) if field.name not in made]
        kept = {name: getattr(self, name)[events if name in _PER_EVENT else requests] for name in names}
        return Columns(**kept, **made)

    def tally(self, name: str) -> dict[str, int]:
        """How often each value of a text column occurs, most frequent first; nulls are left out."""
        counts = Counter(value for value in self.table.column(name).to_pylist() if value is not None)
        return dict(counts.most_common())


def columns_of(table: pa.Table) -> Columns:
    """The columns of a table of records (see `loadgen.record.tables.RECORDS`)."""

    def floats(name: str, scale: float = 1.0) -> Floats:
        column = table.column(name).to_numpy().astype(np.float64)
        return np.asarray(column / scale)

    event_s = _flat(table, "token_ns", 1e9)
    event_n = _flat(table, "token_n")
    n_events = pc.list_value_length(table.column("token_ns")).fill_null(0).to_numpy()
    starts = _starts(n_events)
    some = n_events > 0
    due_s, sent_s = floats("due_ns", 1e9), floats("sent_ns", 1e9)
    is_burst = len(due_s) > 1 and float(np.ptp(due_s)) == 0.0
    return Columns(
        table=table.drop_columns(["token_ns", "token_n"]),
        ok=np.asarray(table.column("outcome").to_numpy() == Outcome.OK.value),
        due_s=due_s,
        origin_s=np.where(np.isnan(sent_s), due_s, sent_s) if is_burst else due_s,
        dispatched_s=floats("dispatched_ns", 1e9),
        connected_s=floats("connected_ns", 1e9),
        sent_s=sent_s,
        headers_s=floats("headers_ns", 1e9),
        closed_s=floats("closed_ns", 1e9),
        answer_s=floats("answer_ns", 1e9),
        first_s=_at(event_s, starts[:-1], some),
        last_s=_at(event_s, starts[1:] - 1, some),
        first_n=_at(event_n.astype(np.float64), starts[:-1], some),
        planned_prompt_tok=floats("planned_prompt_tok"),
        planned_output_tok=floats("planned_output_tok"),
        prompt_tok=floats("prompt_tok"),
        output_tok=floats("output_tok"),
        cached_tok=floats("cached_tok"),
        server_queue_s=floats("server_queue_s"),
        server_prefill_s=floats("server_prefill_s"),
        server_first_token_s=floats("server_first_token_s"),
        event_s=event_s,
        event_n=event_n,
        starts=starts,
        owner=_owner(n_events),
    )


def _starts(n_events: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(n_events, dtype=np.int64)])


def _owner(n_events: Ints) -> Ints32:
    return np.repeat(np.arange(len(n_events), dtype=np.int32), n_events)


def _flat(table: pa.Table, name: str, scale: float | None = None) -> NDArray[Any]:
    """All values of a list column in a row, divided by `scale`; chunk by chunk, so that it is copied once."""
    chunks = (chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column(name).chunks)
    parts = [chunk if scale is None else chunk / scale for chunk in chunks]
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def _at(values: Floats, where: Ints, some: NDArray[np.bool_]) -> Floats:
    found = np.full(len(some), np.nan)
    found[some] = values[where[some]]
    return found
