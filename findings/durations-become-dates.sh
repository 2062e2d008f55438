#!/bin/sh
# pandas 3.1.1: `read_json` turns durations into dates, if their column is called `..._time` and all are long.
#
# Expected: a column of integers is read as integers.
# Seen: integers in columns whose name ends in `_time` (`queue_time`, `prefill_time`) become dates when each one
# is above 31,536,000, the seconds of a year. Nanoseconds from 31.5 ms on are: 250 ms is read as 3 December 1977.
# With one value below, the column stays integers. `prefill_ns` always does.
# For a benchmark: the type of a column of one and the same tool changes with the speed of the server, from one
# run to the next. Means are dates, comparisons with a number raise. Read results with `convert_dates=False`.
. "$(dirname "$0")/lib.sh"

needs pandas==3.1.1 numpy==2.4.6

check <<'EOF'
import io
import json

import pandas as pd
from finding import observed


def read(*values_ns, **options):
    rows = "\n".join(json.dumps({"prefill_time": value, "prefill_ns": value}) for value in values_ns)
    return pd.read_json(io.StringIO(rows), lines=True, **options)


slow = read(250_000_000, 350_000_000)
text = f"250 and 350 ms: prefill_time {slow.prefill_time.dtype}, {slow.prefill_time[0]}, prefill_ns {slow.prefill_ns.dtype}"
observed(text, slow.prefill_time.dtype.kind == "M" and slow.prefill_ns.dtype == "int64")
fast = read(30_000_000, 350_000_000)
observed(f"30 and 350 ms: prefill_time {fast.prefill_time.dtype}", fast.prefill_time.dtype == "int64")
plain = read(250_000_000, 350_000_000, convert_dates=False)
observed(f"convert_dates=False: prefill_time {plain.prefill_time.dtype}", plain.prefill_time.dtype == "int64")
EOF
