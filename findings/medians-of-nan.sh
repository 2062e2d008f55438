#!/bin/sh
# pandas 3.1.1, polars 2.1.0, duckdb 2.0.1, pyarrow 26.0.1, numpy 2.4.6: the median of one column with NaN.
#
# Expected: one median, or an error.
# Seen: 60 latencies of 0.1 to 6.0 s and 40 NaN for failures. pandas and pyarrow leave NaN out: 3.05. polars and
# duckdb count NaN as slower than all: 5.05. polars' `quantile(0.5)` is 5.1, since it takes the nearest value.
# duckdb's `approx_quantile` leaves NaN out: 3.05, unlike its `median`. numpy gives NaN. After a round trip through
# pandas' `to_parquet`, which turns NaN to null, duckdb's median is 3.05 too. polars' `max` leaves NaN out.
# For a benchmark: whether failures count as slow or not at all is decided by the library and by who wrote the
# file. State what a percentile does with failures, and compare only percentiles that do the same.
. "$(dirname "$0")/lib.sh"

needs pandas==3.1.1 polars==2.1.0 duckdb==2.0.1 pyarrow==26.0.1 numpy==2.4.6

check <<'EOF'
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from finding import observed

latencies = [n / 10 for n in range(1, 61)] + [float("nan")] * 40
table = pa.table({"x": pa.array(latencies, from_pandas=False)})
pq.write_table(table, "arrow.parquet")
pd.DataFrame({"x": latencies}).to_parquet("pandas.parquet")


def duck(what, file):
    return duckdb.sql(f"SELECT {what} FROM '{file}'").fetchall()[0][0]


for name, value, wanted in (
    ("pandas median", pd.Series(latencies).median(), 3.05),
    ("pyarrow quantile", pc.quantile(table["x"], 0.5)[0].as_py(), 3.05),
    ("polars median", pl.Series(latencies).median(), 5.05),
    ("polars quantile(0.5)", pl.Series(latencies).quantile(0.5), 5.1),
    ("polars max", pl.Series(latencies).max(), 6.0),
    ("duckdb median", duck("median(x)", "arrow.parquet"), 5.05),
    ("duckdb approx_quantile", duck("approx_quantile(x, 0.5)", "arrow.parquet"), 3.05),
    ("duckdb median, file by pandas", duck("median(x)", "pandas.parquet"), 3.05),
    ("numpy median", np.median(latencies), np.nan),
):
    observed(f"{name}: {value:.2f}", np.isclose(value, wanted, atol=0.04, equal_nan=True))
EOF
