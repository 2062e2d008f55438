"""The records as CSV: one row a request, without the lists of token times (those are in the Parquet file)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from loadgen.columns import columns_of
from loadgen.metrics import METRICS
from loadgen.rundir import Run
from loadgen.tables import RECORDS

LISTS = ("token_ns", "token_n", "read_lag_ns")


def records_csv(run: Run) -> bytes:
    """Every plain field of the records, and each request's latencies in seconds; empty where undefined."""
    c = columns_of(run.record_table)
    frame = run.record_table.drop_columns([name for name in LISTS if name in RECORDS.names]).to_pandas(
        integer_object_nulls=True
    )
    latencies = {
        f"{name}_s": np.where(c.ok, metric.of(c), np.nan)
        for name, metric in METRICS.items()
        if metric.of is not None
    }
    text: str = pd.concat([frame, pd.DataFrame(latencies)], axis=1).to_csv(index=False, float_format="%.9g")
    return text.encode()
