#!/bin/sh
# pandas 3.1.1: the unit of parsed times depends on how many digits the file writes.
#
# Expected: times of one kind of file, read by one call, have one unit. In pandas 2 it is always nanoseconds.
# Seen: times with up to six decimals become datetime64[us], with seven decimals (as the Azure LLM inference
# traces have) datetime64[ns]. Requests one second apart are 1,000,000 apart as integers in the one file and
# 1,000,000,000 in the other. In pandas 2.3.3 both are nanoseconds.
# For a benchmark: arrival times by `astype("int64") / 1e9`, the common recipe, are right for the one trace and
# 1,000 times too close for the other: the load is sent 1,000 times too fast. Use `dt.total_seconds()` on
# differences, or `dt.as_unit("ns")` first.
. "$(dirname "$0")/lib.sh"

needs pandas==3.1.1 numpy==2.4.6

check <<'EOF'
import io

import pandas as pd
from finding import observed

for digits, unit, apart in (("680590", "us", 1_000_000), ("6805900", "ns", 1_000_000_000)):
    text = "time\n" + "".join(f"2023-11-16 18:15:{second}.{digits}\n" for second in (46, 47))
    times = pd.read_csv(io.StringIO(text), parse_dates=["time"])["time"]
    step = int(times.astype("int64").diff().iloc[1])
    seconds = times.diff().dt.total_seconds().iloc[1]
    seen = f"{len(digits)} decimals: {times.dtype}, {step} apart as integers, {seconds} by total_seconds()"
    observed(seen, times.dtype == f"datetime64[{unit}]" and step == apart and seconds == 1)
EOF
