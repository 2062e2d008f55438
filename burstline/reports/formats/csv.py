"""The records as a table and as CSV: one row a request, without the token times of the Parquet file."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

from burstline.measure.metrics.definitions import METRICS
from burstline.measure.metrics.sessions import turns_of
from burstline.measure.record.rundir import Run


def request_frame(run: Run) -> pd.DataFrame:
    """Every plain field of the records, and each request's latencies in seconds; NaN where undefined.

    Of sessions also each request's session, from 0, and the place of its turn there, from 1.
    """
    c = run.columns
    frame = run.request_table.to_pandas(integer_object_nulls=True)
    latencies = {
        f"{name}_s": np.where(c.ok, metric.of(c), np.nan)
        for name, metric in METRICS.items()
        if metric.of is not None
    }
    if (turns := turns_of(run)) is not None:
        frame.insert(1, "session", turns.session)
        frame.insert(2, "turn", turns.depth + 1)
    whole: pd.DataFrame = pd.concat([frame, pd.DataFrame(latencies)], axis=1)
    return whole


def records_csv(run: Run) -> bytes:
    """The same as CSV; what is undefined is empty."""
    frame = request_frame(run)
    for name in (field.name for field in run.request_table.schema if pa.types.is_string(field.type)):
        frame[name] = frame[name].map(_no_formula)
    text: str = frame.to_csv(index=False, float_format="%.9g")
    return text.encode()


def _no_formula(value: object) -> object:
    """Text that a spreadsheet would run begins with an apostrophe instead: a server wrote some of it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
