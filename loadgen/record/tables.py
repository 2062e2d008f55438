"""Records and telemetry as Arrow tables, the shape in which a run is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from burstline.loadgen.record.record import RECOUNTS, Counts, Record
from burstline.servers.host.telemetry import Row

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
        "read_error_ns": pa.list_(pa.int64()),
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
        "beyond_tok": pa.int64(),
        "server_queue_s": pa.float64(),
        "server_prefill_s": pa.float64(),
        "server_first_token_s": pa.float64(),
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


class _NoPandas:
    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out here")


def keep_pandas_out() -> None:
    """Have pyarrow convert without pandas: at its first conversion it would import it (0.3 s, 50 MB).

    It looks once whether pandas is there, and again where a frame is asked for: `to_pandas` works all the
    same. For processes of our own: where a user's code passes series to pyarrow, it must have looked.
    """
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    # New lists: another thread that imports may be walking through the old one.
    sys.meta_path = [_NoPandas, *sys.meta_path]
    try:
        pa.array([])
    finally:
        sys.meta_path = [finder for finder in sys.meta_path if finder is not _NoPandas]
