"""Plans, records and telemetry as Arrow tables, the shape in which a run is kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from loadgen.record.record import RECOUNTS, Counts, Record
from servers.host.telemetry import Row
from workloads.plan import Plan
from workloads.request import Request, Sampling

PLAN: Final = pa.schema(
    {
        "index": pa.int64(),
        "due_ns": pa.int64(),
        "n_prompt_tok": pa.int64(),
        "n_output_tok": pa.int64(),
        "ignore_eos": pa.bool_(),
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "sampling_seed": pa.int64(),
        "prompt_text": pa.string(),
        "prompt_ids": pa.list_(pa.uint32()),
    }
)

RECORDS: Final = pa.schema(
    {
        "index": pa.int64(),
        "outcome": pa.string(),
        "due_ns": pa.int64(),
        "dispatched_ns": pa.int64(),
        "connected_ns": pa.int64(),
        "sent_ns": pa.int64(),
        "headers_ns": pa.int64(),
        "closed_ns": pa.int64(),
        "answer_ns": pa.int64(),
        "token_ns": pa.list_(pa.int64()),
        "token_n": pa.list_(pa.int32()),
        "read_lag_ns": pa.list_(pa.int64()),
        "planned_prompt_tok": pa.int64(),
        "planned_output_tok": pa.int64(),
        "prompt_tok": pa.int64(),
        "prompt_source": pa.string(),
        "output_tok": pa.int64(),
        "output_source": pa.string(),
        "output_gap_tok": pa.int64(),
        "split": pa.string(),
        "cached_tok": pa.int64(),
        "finish_reason": pa.string(),
        "http_status": pa.int64(),
        "n_events": pa.int64(),
        "n_reads": pa.int64(),
        "error": pa.string(),
    }
)

PER_REQUEST: Final = [field.name for field in RECORDS if not pa.types.is_list(field.type)]
"""The fields of `RECORDS` that do not hold something for each token."""

COUNTS: Final = pa.schema({"index": pa.int64(), **dict.fromkeys(RECOUNTS, pa.int64())})
"""What tokenizers count in the text of replies whose tokens the server did not count; null: not asked."""

TELEMETRY: Final = pa.schema(
    {
        "at_ns": pa.int64(),
        "source": pa.string(),
        "name": pa.string(),
        "value": pa.float64(),
        "note": pa.string(),
    }
)


def record_table(records: Sequence[Record]) -> pa.Table:
    """One row per record, a column per field."""
    columns = [[getattr(record, name) for record in records] for name in RECORDS.names]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, RECORDS, strict=True)], schema=RECORDS
    )


def records_of(table: pa.Table) -> Iterator[Record]:
    """The records back; slow, for looking at a few."""
    names = [field.name for field in fields(Record)]
    for row in table.select(names).to_pylist():
        yield Record(**row)


def counts_of(table: pa.Table) -> dict[int, Counts]:
    """By request, who counted its text and how many tokens they found."""
    return {
        row["index"]: [(name, row[name]) for name in RECOUNTS if row[name] is not None]
        for row in table.to_pylist()
    }


def telemetry_table(rows: Iterable[Row], t0_ns: int = 0) -> pa.Table:
    """One row per sampled value, in the order of time; `t0_ns` is taken off every `at_ns`."""
    rows = sorted(rows, key=lambda row: row.at_ns)
    columns = [
        [row.at_ns - t0_ns for row in rows],
        *([getattr(row, name) for row in rows] for name in TELEMETRY.names[1:]),
    ]
    return pa.table(
        [pa.array(c, field.type) for c, field in zip(columns, TELEMETRY, strict=True)], schema=TELEMETRY
    )


def plan_tables(plan: Plan, n_at_once: int = 10_000) -> Iterator[pa.Table]:
    """The plan's requests, `n_at_once` rows a table; its seed and hash stand in the schema's metadata."""
    schema = PLAN.with_metadata({"seed": str(plan.seed), "sha256": plan.sha256})
    for start in range(0, max(len(plan.requests), 1), n_at_once):
        requests = plan.requests[start : start + n_at_once]
        columns = {
            "index": [r.index for r in requests],
            "due_ns": np.asarray(plan.due_ns[start : start + n_at_once], dtype=np.int64),
            "n_prompt_tok": [r.n_prompt_tok for r in requests],
            "n_output_tok": [r.n_output_tok for r in requests],
            "ignore_eos": [r.ignore_eos for r in requests],
            "temperature": [r.sampling.temperature for r in requests],
            "top_p": [r.sampling.top_p for r in requests],
            "sampling_seed": [r.sampling.seed for r in requests],
            "prompt_text": [r.prompt_text for r in requests],
        }
        arrays = [pa.array(columns[name], PLAN.field(name).type) for name in columns]
        yield pa.table([*arrays, _id_lists(requests)], schema=schema)


def plan_of(table: pa.Table) -> Plan:
    """The plan back, byte for byte."""
    ids = table.column("prompt_ids").combine_chunks()
    metadata = table.schema.metadata
    return Plan(
        requests=tuple(_requests(table, _prompt_ids(ids))),
        due_ns=array("q", table.column("due_ns").to_numpy().tobytes()),
        seed=int(metadata[b"seed"]),
        sha256=metadata[b"sha256"].decode(),
    )


def requests_without_prompts(table: pa.Table) -> list[Request]:
    """The plan's requests for judging replies: empty `prompt_ids` stand for ids, None for a text prompt."""
    sent_as_text = table.column("prompt_text").is_valid().to_pylist()
    return list(_requests(table, (None if text else () for text in sent_as_text)))


def _requests(table: pa.Table, prompts: Iterable[Sequence[int] | None]) -> Iterator[Request]:
    names = PLAN.names[:9]
    columns = (table.column(name).to_pylist() for name in names)
    for ids, row in zip(prompts, zip(*columns, strict=True), strict=True):
        index, _, n_prompt_tok, n_output_tok, ignore_eos, temperature, top_p, seed, text = row
        sampling = Sampling(temperature, top_p, seed)
        yield Request(index, ids, text, n_prompt_tok, n_output_tok, ignore_eos, sampling)


def _id_lists(requests: Sequence[Request]) -> pa.Array:
    prompts = [_as_uint32(request.prompt_ids) for request in requests]
    ends = np.cumsum([0, *(len(prompt) for prompt in prompts)], dtype=np.int32)
    values = pa.array(np.concatenate(prompts) if prompts else np.empty(0, np.uint32))
    absent = pa.array([request.prompt_ids is None for request in requests], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(ends), values, mask=absent)


def _as_uint32(ids: Sequence[int] | None) -> NDArray[np.uint32]:
    return np.asarray(() if ids is None else ids, dtype=np.uint32)


def _prompt_ids(lists: pa.ListArray) -> Iterator[array[int] | None]:
    offsets = lists.offsets.to_numpy()
    values = lists.values.to_numpy()
    for start, end, valid in zip(offsets, offsets[1:], lists.is_valid().to_pylist(), strict=False):
        yield array("I", values[start:end].tobytes()) if valid else None
