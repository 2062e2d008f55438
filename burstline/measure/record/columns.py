"""Records by column, for the metrics. Seconds from the run's start; NaN for events that never happened."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from burstline.measure.record.record import NO_TEXT, Outcome

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONG: Final = 8
"""Of a reply of so many tokens or more one can say that it came at once."""
_PER_EVENT: Final = ("event_s", "event_n", "event_lag_ns", "event_error_ns")
_LISTS: Final = ["token_ns", "token_n", "read_lag_ns", "read_error_ns"]
_MOMENTS: Final = ("dispatched", "connected", "headers", "closed", "answer", "first_event")
_NUMBERS: Final = (
    "planned_prompt_tok", "planned_output_tok", "prompt_tok", "output_tok", "cached_tok", "server_queue_s",
    "server_prefill_s", "server_first_token_s",
)  # fmt: skip
_KEPT: Final = (
    "index", "outcome", "prompt_source", "output_source", "output_gap_tok", "split", "finish_reason", "error",
    "beyond_tok", "n_events",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One entry per planned request, then one per event that carried tokens.

    `table` has what no array holds: each record's index, its texts and its rare counts.

    `origin_s` is from when latency counts: where all were due at once (a burst) each request's own send, for
    the order of sending is the shape of that load; otherwise when it was due, so that nothing is omitted.
    `first_s` and `last_s` are when the first and the last token arrived, `first_n` how many came with the
    first, `shown_tok` how many of `output_tok` came with text. `failed` is neither served as asked nor
    abandoned by a client that was to do so.

    What begins with `event_` runs over all events of all requests in order; those of request i are
    `starts[i] : starts[i + 1]`. A run has many millions: lags and errors have the smallest type.
    `event_lag_ns` is how much later than the kernel our code had an event, `event_error_ns` by how much it
    may have arrived before its stamp; -1 where that is not known.
    """

    table: pa.Table
    ok: NDArray[np.bool_]
    failed: NDArray[np.bool_]
    due_s: Floats
    origin_s: Floats
    dispatched_s: Floats
    connected_s: Floats
    sent_s: Floats
    headers_s: Floats
    closed_s: Floats
    answer_s: Floats
    first_event_s: Floats
    first_s: Floats
    last_s: Floats
    first_n: Floats
    shown_tok: Floats
    planned_prompt_tok: Floats
    planned_output_tok: Floats
    prompt_tok: Floats
    output_tok: Floats
    cached_tok: Floats
    server_queue_s: Floats
    server_prefill_s: Floats
    server_first_token_s: Floats
    event_s: Floats
    event_n: NDArray[Any]
    event_lag_ns: NDArray[Any]
    event_error_ns: NDArray[Any]
    starts: Ints

    def __len__(self) -> int:
        return len(self.ok)

    @property
    def index(self) -> Ints:
        return np.asarray(self.table.column("index").to_numpy())

    @property
    def end_s(self) -> float:
        """When the last request was closed; 0 where none was."""
        return float(np.nan_to_num(self.closed_s).max(initial=0.0))

    @property
    def over_s(self) -> Floats:
        """When each request was over; NaN where it never was.

        The kernel stamps the last token of a success; when it was closed our own code says, later if busy.
        """
        return np.where(self.ok, self.last_s, self.closed_s)

    @property
    def n_events(self) -> Ints:
        return np.diff(self.starts)

    @property
    def follows(self) -> NDArray[np.bool_]:
        """Of each event, whether another of its request precedes it."""
        follows = np.ones(len(self.event_s), dtype=bool)
        follows[self.starts[:-1][self.n_events > 0]] = False
        return follows

    @property
    def text_s(self) -> Floats:
        """When the first text arrived; NaN where the server sent none."""
        return np.where(self.having("split", [NO_TEXT]), np.nan, self.first_s)

    @property
    def has_text(self) -> NDArray[np.bool_]:
        """Which requests succeeded and brought text."""
        return self.ok & ~np.isnan(self.text_s)

    @property
    def came_at_once(self) -> NDArray[np.bool_]:
        """Whether one event brought all text of a reply, or nearly all: no first token shows."""
        return self.has_text & (self.shown_tok >= LONG) & (self.first_n >= 0.9 * self.shown_tok)

    def per_event(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(values, self.n_events)

    def having(self, column: str, values: Iterable[str]) -> NDArray[np.bool_]:
        """Which requests have one of `values` in a column of text."""
        return _having(self.table, column, values)

    def due_from(self, start_s: float) -> "Columns":
        later = self.due_s >= start_s
        k = len(self) - int(np.count_nonzero(later))
        if later[k:].all():  # due times ascend nearly always, and then little needs to be copied
            return self._of(slice(k, None), slice(int(self.starts[k]), None), self.table.slice(k))
        return self.where(later)

    def without(self, outcome: Outcome) -> "Columns":
        """The requests that ended in another way."""
        others = ~self.having("outcome", [outcome.value])
        return self if others.all() else self.where(others)

    def where(self, chosen: NDArray[np.bool_]) -> "Columns":
        return self._of(chosen, self.per_event(chosen), self.table.filter(pa.array(chosen)))

    def _of(
        self, requests: slice | NDArray[np.bool_], events: slice | NDArray[np.bool_], table: pa.Table
    ) -> "Columns":
        made = {"table": table, "starts": _starts(self.n_events[requests])}
        names = [field.name for field in fields(self) if field.name not in made]
        kept = {name: getattr(self, name)[events if name in _PER_EVENT else requests] for name in names}
        return Columns(**kept, **made)

    def tally(self, name: str) -> dict[str, int]:
        """How often each value of a text column occurs, most frequent first; nulls are left out."""
        counts = pc.value_counts(self.table.column(name).drop_null()).to_pylist()
        return {row["values"]: row["counts"] for row in sorted(counts, key=lambda row: -row["counts"])}


def columns_of(table: pa.Table) -> Columns:
    return joined_columns([table])


def joined_columns(parts: Iterable[pa.Table]) -> Columns:
    """The columns of records that come in parts: what they hold for each token is never there twice."""
    rows: list[pa.Table] = []
    lengths: list[Ints] = []
    events: dict[str, list[NDArray[Any]]] = {name: [] for name in _LISTS}
    for part in parts:
        lengths.append(pc.list_value_length(part.column("token_ns")).fill_null(0).to_numpy())
        for name, values in events.items():
            chunks = part.column(name).chunks or [pa.array([], part.schema.field(name).type)]
            flat = _joined([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks])
            if name not in ("token_ns", "token_n"):
                least = np.min_scalar_type(flat.max(initial=0))
                flat = flat.clip(-1).astype(np.promote_types(least, np.int8))
            values.append(flat / 1e9 if name == "token_ns" else flat)
        rows.append(part.drop_columns(_LISTS))
    table, n_events = pa.concat_tables(rows), _joined(lengths)
    event_s, event_n, lag_ns, error_ns = map(_joined, events.values())

    def floats(name: str, scale: float = 1.0) -> Floats:
        return np.asarray(table.column(name).to_numpy().astype(np.float64) / scale)

    starts = _starts(n_events)
    some = n_events > 0
    output_tok, shown_tok = floats("output_tok"), np.full(len(some), 0.0)
    shown_tok[some] = np.add.reduceat(event_n, starts[:-1][some]) if some.any() else 0
    due_s, sent_s = floats("due_ns", 1e9), floats("sent_ns", 1e9)
    is_burst = len(due_s) > 1 and float(np.ptp(due_s)) == 0.0
    ok = _having(table, "outcome", [Outcome.OK.value])
    return Columns(
        table=table.select(_KEPT),
        ok=ok,
        failed=~ok & ~_having(table, "outcome", [Outcome.ABANDONED.value]),
        due_s=due_s,
        origin_s=np.where(np.isnan(sent_s), due_s, sent_s) if is_burst else due_s,
        sent_s=sent_s,
        **{f"{name}_s": floats(f"{name}_ns", 1e9) for name in _MOMENTS},
        first_s=_at(event_s, starts[:-1], some),
        last_s=_at(event_s, starts[1:] - 1, some),
        first_n=_at(event_n, starts[:-1], some),
        shown_tok=np.minimum(output_tok, shown_tok),
        **{name: floats(name) for name in _NUMBERS},
        event_s=event_s,
        event_n=event_n,
        event_lag_ns=lag_ns,
        event_error_ns=error_ns,
        starts=starts,
    )


def _starts(n_events: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(n_events, dtype=np.int64)])


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """In a row; `parts` is emptied. Where all are equal they take no memory."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    parts.clear()
    return np.broadcast_to(whole[0], len(whole)) if len(whole) and (whole == whole[0]).all() else whole


def _having(table: pa.Table, column: str, values: Iterable[str]) -> NDArray[np.bool_]:
    some = pc.is_in(table.column(column), value_set=pa.array(list(values), pa.string()))
    return np.asarray(some.to_numpy())


def seconds_or_nan(at_ns: NDArray[Any]) -> Floats:
    seconds = at_ns / 1e9
    seconds[at_ns < 0] = np.nan
    return np.asarray(seconds)


def _at(values: NDArray[Any], where: Ints, some: NDArray[np.bool_]) -> Floats:
    found = np.full(len(some), np.nan)
    found[some] = values[where[some]]
    return found
