"""What `certify_all.sh` measured, as rows for docs/method.md: `python tests/bench/certified.py OUT`

Medians over the repeats of each tool and load; printed / true, times in ms, tokens and requests a second.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

READINGS = {
    "ttft.p50": 1e3,
    "e2e.p99": 1e3,
    "throughput.output_tok_per_s": 1.0,
    "throughput.requests_per_s": 1.0,
}
HEADER = "tool|load|TTFT p50|E2E p99|output tok/s|requests/s|failed, printed / true|burst, ms"
HEADER += "|CPU, µs an event|memory, MB|first request, s|last token to the end, s"


def cells(certificates):
    """One row: each reading as printed / true, then what it sent and what it cost."""

    def of(*path, scale=1.0, digits=0):
        values = []
        for value in certificates:
            for key in path:
                value = value[key] if value is not None else None
            values += [] if value is None else [scale * value]
        return f"{median(values):,.{digits}f}" if values else "-"

    for name, scale in READINGS.items():
        pairs = [each for one in certificates for each in one["readings"] if each["name"] == name]
        printed = [each["printed"] for each in pairs if each["printed"] is not None]
        true = median(each["true"] for each in pairs) * scale
        yield f"{median(printed) * scale:,.0f} / {true:,.0f}" if printed else f"- / {true:,.0f}"
    yield f"{of('printed', 'n_failed')} / {of('offered', 'n_failed')}"
    yield of("offered", "spread_s", scale=1e3)
    n_events = median(each["n_events"] for each in certificates)
    yield of("asked", "cpu_s", scale=1e6 / n_events)
    yield of("asked", "pss_bytes", scale=1e-6)
    yield of("before_s", digits=1)
    yield of("after_s", digits=1)


rows = defaultdict(list)
for path in sorted(Path(sys.argv[1]).glob("*/certificate.json")):
    tool, load, _ = path.parent.name.rsplit("-", 2)
    rows[int(load), tool].append(json.loads(path.read_text("utf-8")))
print("| " + HEADER.replace("|", " | ") + " |")
print("|" + "---|" * len(HEADER.split("|")))
for (load, _), certificates in sorted(rows.items()):
    print("| " + " | ".join([certificates[0]["printed"]["tool"], str(load), *cells(certificates)]) + " |")
