"""Records by column, for the metrics. Seconds from the run's start; NaN is what never happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from loadgen.record import Outcome

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One entry per planned request, then one per event that carried tokens.

    `first_s` and `last_s` are when the first and the last token arrived, `first_n` how many came with the
    first. `event_s`, `event_n` and `event_lag_s` (NaN without a kernel stamp) run over all events of all
    requests in order; those of request i are `starts[i] : starts[i + 1]`, `owner` names i for each.
    """

    table: pa.Table
    ok: NDArray[np.bool_]
    due_s: Floats
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
    event_s: Floats
    event_n: Floats
    event_lag_s: Floats
    starts: Ints
    owner: Ints

    def __len__(self) -> int:
        return len(self.ok)

    def tally(self, name: str) -> dict[str, int]:
        """How often each value of a text column occurs, most frequent first; nulls are left out."""
        counts = Counter(value for value in self.table.column(name).to_pylist() if value is not None)
        return dict(counts.most_common())


def columns_of(table: pa.Table) -> Columns:
    """The columns of a table of records (see `loadgen.tables.RECORDS`)."""

    def floats(name: str, scale: float = 1.0) -> Floats:
        column = table.column(name).to_numpy().astype(np.float64)
        return np.asarray(column / scale)

    event_ns, starts = _flat(table, "token_ns")
    event_n, _ = _flat(table, "token_n")
    lag_ns, _ = _flat(table, "read_lag_ns")
    event_s = event_ns / 1e9
    n_events = np.diff(starts)
    some = n_events > 0
    return Columns(
        table=table,
        ok=np.asarray(table.column("outcome").to_numpy() == Outcome.OK.value),
        due_s=floats("due_ns", 1e9),
        dispatched_s=floats("dispatched_ns", 1e9),
        connected_s=floats("connected_ns", 1e9),
        sent_s=floats("sent_ns", 1e9),
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
        event_s=event_s,
        event_n=event_n.astype(np.float64),
        event_lag_s=np.where(lag_ns < 0, np.nan, lag_ns / 1e9),
        starts=starts,
        owner=np.repeat(np.arange(len(n_events)), n_events),
    )


def _flat(table: pa.Table, name: str) -> tuple[Ints, Ints]:
    """All values of a list column in a row, where each list starts, and where the last ends."""
    lists = table.column(name).combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return lists.flatten().to_numpy(zero_copy_only=False), starts


def _at(values: Floats, where: Ints, some: NDArray[np.bool_]) -> Floats:
    found = np.full(len(some), np.nan)
    found[some] = values[where[some]]
    return found
