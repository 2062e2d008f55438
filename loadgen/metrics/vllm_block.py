"""The text block "Serving Benchmark Result", from our records, as `vllm bench serve` sets it.

Source: vLLM 0.32.0, vllm/benchmarks/serve.py, `calculate_metrics` and `benchmark`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics.other_tools import ended_of, vllm, wall
from loadgen.metrics.throughput import prompt_tok
from loadgen.record.columns import Columns, Floats
from loadgen.stats.estimates import Absent


def vllm_block(
    c: Columns,
    percentiles: tuple[float, ...] = (50, 90, 99),
    *,
    concurrency: int | None = None,
    rate_per_s: float | None = None,
) -> str | Absent:
    """The text that `vllm bench serve` would have printed; Absent where nothing succeeded.

    `concurrency` and `rate_per_s` are those that were asked for. A number that does not exist
    is "n/a", where vLLM prints 0.00.
    """
    ended = ended_of(c)
    if not ended.any():
        return Absent("no request succeeded; vLLM prints zeros")
    samples = vllm(c)
    start_s, end_s = wall(c)
    prompt = prompt_tok(c)[ended]
    output = c.output_tok[ended]
    counted = not np.isnan(output).any()
    total = samples.output_tok_per_s
    peak_tok, peak_requests = _peaks(c, ended)
    rows: list[tuple[str, object]] = [
        ("Successful requests:", int(ended.sum())),
        ("Failed requests:", len(c) - int(ended.sum())),
    ]
    if concurrency:
        rows.append(("Maximum request concurrency:", concurrency))
    if rate_per_s:
        rows.append(("Request rate configured (RPS):", rate_per_s))
    rows += [
        ("Benchmark duration (s):", end_s - start_s),
        ("Total input tokens:", int(prompt.sum())),
        ("Total generated tokens:", int(output.sum()) if counted else "n/a"),
        ("Request throughput (req/s):", samples.requests_per_s),
        ("Output token throughput (tok/s):", total),
        ("Peak output token throughput (tok/s):", float(peak_tok)),
        ("Peak concurrent requests:", float(peak_requests)),
        (
            "Total token throughput (tok/s):",
            total if isinstance(total, Absent) else total + float(prompt.sum()) / (end_s - start_s),
        ),
    ]
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=50, c="="), *map(_line, rows)]
    for name, short, heading in _HEADINGS:
        lines.append(f"{heading:-^50}")
        lines += map(_line, _metric_rows(getattr(samples, name), short, percentiles))
    return "\n".join([*lines, "=" * 50])


_HEADINGS: Final = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2e", "E2EL", "End-to-end Latency"),
)


def _metric_rows(values: Floats, short: str, percentiles: tuple[float, ...]) -> list[tuple[str, object]]:
    known = values[~np.isnan(values)] * 1000
    n = len(known)
    return [
        (f"Mean {short} (ms):", float(known.mean()) if n else "n/a"),
        (f"Median {short} (ms):", float(np.median(known)) if n else "n/a"),
        *((f"P{p:g} {short} (ms):", float(np.percentile(known, p)) if n else "n/a") for p in percentiles),
    ]


def _line(row: tuple[str, object]) -> str:
    """One line as vLLM sets it: floats with two decimals, everything padded to ten."""
    label, value = row
    if isinstance(value, float):
        return f"{label:<40} {value:<10.2f}"
    return f"{label:<40} {'n/a' if isinstance(value, Absent) else value!s:<10}"


def _peaks(c: Columns, ended: NDArray[np.bool_]) -> tuple[int, int]:
    """Most chunks (which vLLM calls tokens) and most requests in any whole second from the first start."""
    origin_s = float(np.nanmin(c.dispatched_s[ended]))
    chunks = np.bincount((c.event_s[ended[c.owner]] - origin_s).astype(np.int64))
    first = (c.dispatched_s[ended] - origin_s).astype(np.int64)
    last = (c.last_s[ended] - origin_s).astype(np.int64)
    steps = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last + 1, -1)
    return int(chunks.max()), int(np.cumsum(steps).max())
