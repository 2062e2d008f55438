#!/bin/sh
# orjson 3.13.0, msgspec 0.23.0, pydantic 2.14.4, pandas 3.1.1: a failed request that counts as infinitely late is left
# out of the percentiles once its latency has been written as JSON.
#
# Expected: what counts as infinitely late does so in the file, too, or the writer refuses it.
# Seen: of 100 latencies 5 are infinite, so p99 is infinite. `json` writes `Infinity`, and p99 stays so. orjson, msgspec
# and pydantic write `null` without a word; pandas reads that as a missing value and leaves it out: p99 is the p99 of the
# 95 that succeeded. A library of JSON that is chosen for its speed decides whether failures count.
# For a benchmark: write a failed request's outcome beside its latency, and take percentiles over outcomes. Where
# latencies are `null`, compare their number with that of the requests before reading a percentile.
. "$(dirname "$0")/lib.sh"

needs orjson==3.13.0 msgspec==0.23.0 pydantic==2.14.4 pandas==3.1.1 numpy==2.4.6

check <<'EOF'
import io
import json
import math

import msgspec
import orjson
import pandas as pd
from finding import observed
from pydantic import BaseModel


class Run(BaseModel):
    e2e_s: list[float]


latencies = [0.5 + k / 100 for k in range(95)] + [math.inf] * 5
written = {
    "json": json.dumps({"e2e_s": latencies}),
    "orjson": orjson.dumps({"e2e_s": latencies}).decode(),
    "msgspec": msgspec.json.encode({"e2e_s": latencies}).decode(),
    "pydantic": Run(e2e_s=latencies).model_dump_json(),
}
for name, text in written.items():
    last = text.rstrip("]}").rsplit(",")[-1].strip()
    series = pd.Series(json.loads(text)["e2e_s"], dtype=float)
    p99 = series.quantile(0.99, interpolation="higher")
    is_lost = last == "null" and p99 == 1.44 and series.count() == 95
    observed(f"{name}: writes {last}, p99 {p99:.3g} s of {series.count()}", is_lost == (name != "json"))
observed(f"json keeps it: {json.loads(written['json'])['e2e_s'][-1]}", json.loads(written["json"])["e2e_s"][-1] == math.inf)
EOF
