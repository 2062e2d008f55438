"""Records and telemetry as Arrow tables, the shape in which a run is kept."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args, get_origin, get_type_hints

import pyarrow as pa

from burstline.measure.record.record import RECOUNTS, Counts, Record
from burstline.servers.host.telemetry import Row

_TYPES: Final = {int: pa.int64(), float: pa.float64(), str: pa.string()}


def _type_of(hint: Any) -> pa.DataType:
    """Of a column that holds such a field: a list where the field is a sequence."""
    one = _TYPES[(*get_args(hint), hint)[0]]
    return pa.list_(one) if get_origin(hint) is Sequence else one


RECORDS: Final = pa.schema(
    {name: _type_of(hint) for name, hint in get_type_hints(Record).items()}
    | {"token_n": pa.list_(pa.int32())}
)
"""A column for each field of a record."""
ADDED: Final = frozenset({"first_event_ns"})
"""Columns that records of this schema may lack: they were added to it."""
PER_REQUEST: Final = [field.name for field in RECORDS if not pa.types.is_list(field.type)]
"""The fields of `RECORDS` that do not hold something for each token."""

COUNTS: Final = pa.schema({"index": pa.int64(), **dict.fromkeys(RECOUNTS, pa.int64())})
"""What tokenizers count in the text of replies whose tokens the server did not count; null: not asked."""

TELEMETRY: Final = pa.schema({name: _type_of(hint) for name, hint in get_type_hints(Row).items()})


def record_table(records: Sequence[Record]) -> pa.Table:
    return pa.table({name: [getattr(each, name) for each in records] for name in RECORDS.names}, RECORDS)


def counts_of(table: pa.Table) -> dict[int, Counts]:
    """By request, who counted its text and how many tokens they found."""
    return {
        row["index"]: [(name, row[name]) for name in RECOUNTS if row[name] is not None]
        for row in table.to_pylist()
    }


def telemetry_table(rows: Iterable[Row], t0_ns: int = 0) -> pa.Table:
    """One row per sampled value, in the order of time; `t0_ns` is taken off every `at_ns`."""
    rows = sorted(rows, key=lambda row: row.at_ns)
    columns = {name: [getattr(row, name) for row in rows] for name in TELEMETRY.names}
    return pa.table({**columns, "at_ns": [row.at_ns - t0_ns for row in rows]}, TELEMETRY)


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
    if "pandas" in sys.modules:
        return
    # New lists: another thread that imports may be walking through the old one.
    sys.meta_path = [_NoPandas, *sys.meta_path]
    try:
        pa.array([])
    finally:
        sys.meta_path = [finder for finder in sys.meta_path if finder is not _NoPandas]
