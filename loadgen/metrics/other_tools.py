"""One event log under every tool's definitions: what each would have printed for this very run.

Definitions as read in the sources named in TOOLS; ours: `loadgen.metrics.definitions`. They all leave failed
requests out of their latencies, and none gives an interval. Where a tool looks at events that carry no token
(a chat's role chunk opens vLLM's TTFT) its own figure may be a little earlier: their times are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics.definitions import e2e_due, gaps, ttft_due
from loadgen.metrics.throughput import NO_LENGTH, prompt_tok
from loadgen.record.columns import Columns, Floats
from loadgen.record.record import Outcome
from loadgen.stats.estimates import Absent
from loadgen.stats.quantiles import order_for, quantile

WHOLE: Final = (Outcome.OK, Outcome.SHORT, Outcome.CLAMPED, Outcome.LONG)
"""What other tools take for a success: a whole reply, of whatever length."""


@dataclass(frozen=True, slots=True)
class ToolFigures:
    """What a tool makes of the records: latencies in seconds, rates per second; None: it has no such number.

    `mlperf_rank`: its percentiles are sorted[int(n p)], not interpolated.
    """

    ttft: Floats
    tpot: Floats | None
    itl: Floats | None
    e2e: Floats
    output_tok_per_s: float | Absent
    requests_per_s: float | Absent
    mlperf_rank: bool = False

    def quantile(self, name: str, p: float) -> float | Absent:
        """The quantile of "ttft", "tpot", "itl" or "e2e" as the tool computes it."""
        values: Floats | None = getattr(self, name)
        if values is None:
            return Absent("it has no number of that name")
        values = values[~np.isnan(values)]
        if not len(values):
            return Absent("defined for no request")
        if self.mlperf_rank:
            rank = min(int(len(values) * p), len(values) - 1)
            return float(np.partition(values, rank)[rank])
        order_for(values, (p,))
        return quantile(values, p)


@dataclass(frozen=True, slots=True)
class Definitions:
    """A tool, the commit that was read, and its definitions in words, in the letters of `definitions.py`."""

    title: str
    version: str
    t0: str
    ttft: str
    tpot: str
    itl: str
    e2e: str
    window: str


def ended_of(c: Columns) -> NDArray[np.bool_]:
    """The requests that another tool counts as successful."""
    return c.having("outcome", map(str, WHOLE)) & ~np.isnan(c.first_s)


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


def _rates(tokens: Floats, n: int, start_s: float, end_s: float) -> tuple[float | Absent, float | Absent]:
    """Tokens and requests per second of a tool's window; Absent where it has none or without counts."""
    if not end_s > start_s:
        nothing = NO_LENGTH
        return nothing, nothing
    per_s = n / (end_s - start_s)
    if np.isnan(tokens).any():
        return Absent("the server did not say how many tokens it sent"), per_s
    return float(tokens.sum()) / (end_s - start_s), per_s


def wall(c: Columns) -> tuple[float, float]:
    """From the first request handed out to the end of the last, whatever became of it."""
    if np.isnan(c.dispatched_s).all() or np.isnan(c.closed_s).all():
        return 0.0, 0.0
    return float(np.nanmin(c.dispatched_s)), float(np.nanmax(c.closed_s))


def vllm(c: Columns) -> ToolFigures:
    return _like_vllm(c, c.output_tok)


def sglang(c: Columns) -> ToolFigures:
    """As vLLM's, but where tokens were not counted, the asked length stands in for them."""
    return _like_vllm(c, np.where(np.isnan(c.output_tok), c.planned_output_tok, c.output_tok))


def _like_vllm(c: Columns, n_tok: Floats) -> ToolFigures:
    ended = ended_of(c)
    rates = _rates(n_tok[ended], int(ended.sum()), *wall(c))
    return ToolFigures(
        ttft=(c.first_s - c.dispatched_s)[ended],
        tpot=_ratio(c.last_s - c.first_s, n_tok - 1)[ended],
        itl=gaps(c, use=ended).value,
        e2e=(c.last_s - c.dispatched_s)[ended],
        output_tok_per_s=rates[0],
        requests_per_s=rates[1],
    )


def guidellm(c: Columns) -> ToolFigures:
    """Its TPOT has the first token in it, its ITL is one mean a request; chunks stand in for tokens."""
    ended = ended_of(c)
    n_tok = np.where(np.isnan(c.output_tok), c.n_events, c.output_tok)
    rates = _rates(n_tok[ended], int(ended.sum()), *wall(c))
    return ToolFigures(
        ttft=(c.first_s - c.dispatched_s)[ended],
        tpot=_ratio(c.last_s - c.dispatched_s, n_tok)[ended],
        itl=_ratio(c.last_s - c.first_s, n_tok - 1)[ended],
        e2e=(c.closed_s - c.dispatched_s)[ended],
        output_tok_per_s=rates[0],
        requests_per_s=rates[1],
    )


def aiperf(c: Columns) -> ToolFigures:
    """Its ITL is what vLLM calls TPOT; from the first request to the last response."""
    ended = ended_of(c)
    start_s = float(np.nanmin(c.dispatched_s[ended])) if ended.any() else 0.0
    end_s = float(c.last_s[ended].max()) if ended.any() else 0.0
    rates = _rates(c.output_tok[ended], int(ended.sum()), start_s, end_s)
    return ToolFigures(
        ttft=(c.first_s - c.dispatched_s)[ended],
        tpot=None,
        itl=_ratio(c.last_s - c.first_s, c.output_tok - 1)[ended],
        e2e=(c.last_s - c.dispatched_s)[ended],
        output_tok_per_s=rates[0],
        requests_per_s=rates[1],
    )


def llmperf(c: Columns) -> ToolFigures:
    """Its inter-token latency has TTFT among the gaps, and chunks for tokens."""
    ended = ended_of(c)
    _, requests_per_s = _rates(np.zeros(1), int(ended.sum()), *wall(c))
    return ToolFigures(
        ttft=(c.first_s - c.dispatched_s)[ended],
        tpot=None,
        itl=_ratio(c.last_s - c.dispatched_s, c.n_events.astype(np.float64))[ended],
        e2e=(c.closed_s - c.dispatched_s)[ended],
        output_tok_per_s=Absent("it counts the text again with a Llama tokenizer"),
        requests_per_s=requests_per_s,
    )


def mlperf(c: Columns) -> ToolFigures:
    """From the scheduled time, as ours; its percentiles are samples."""
    ended = ended_of(c)
    end_s = float(c.last_s[ended].max()) if ended.any() else 0.0
    rates = _rates(c.output_tok[ended], int(ended.sum()), float(c.due_s.min()) if len(c) else 0.0, end_s)
    return ToolFigures(
        ttft=ttft_due(c)[ended],
        tpot=_ratio(c.last_s - c.first_s, c.output_tok - 1)[ended],
        itl=None,
        e2e=e2e_due(c)[ended],
        output_tok_per_s=rates[0],
        requests_per_s=rates[1],
        mlperf_rank=True,
    )


OURS: Final = Definitions(
    "Burstline",
    "",
    "due",
    "t_1 − s",
    "(t_m − t_1) / (N − n_1)",
    "gaps by token, pooled",
    "t_m − s",
    "first request sent to last token",
)

TOOLS: Final[tuple[tuple[Definitions, Callable[[Columns], ToolFigures]], ...]] = (
    (
        Definitions(
            "vLLM bench serve",
            "0.32.0",
            "handed to the client, after the concurrency limit",
            "first event with choices, a role or empty one too",
            "(E2E − TTFT) / (N − 1)",
            "gaps between chunks, pooled",
            "last event with choices",
            "loop start to last reply, ramp and drain too",
        ),
        vllm,
    ),
    (
        Definitions(
            "SGLang bench_serving",
            "0033168f",
            "handed to the client",
            "first event with text",
            "(E2E − TTFT) / (N − 1); N as asked where not counted",
            "gaps between chunks, pooled",
            "last event",
            "loop start to last reply",
        ),
        sglang,
    ),
    (
        Definitions(
            "guidellm",
            "ee7a7745",
            "handed to the client",
            "first token",
            "(t_m − t0) / N: the first token is in it",
            "(t_m − t_1) / (N − 1): a mean per request",
            "end of the reply",
            "first request to last reply",
        ),
        guidellm,
    ),
    (
        Definitions(
            "AIPerf, genai-perf",
            "db4f6397",
            "handed to the client",
            "first parsed event",
            "no such number",
            "(E2E − TTFT) / (N − 1): what vLLM calls TPOT",
            "last event",
            "first request to last event",
        ),
        aiperf,
    ),
    (
        Definitions(
            "llmperf",
            "f1d6bed",
            "before the call, in a Ray actor",
            "first content",
            "no such number",
            "sum of gaps, TTFT among them / chunks",
            "end of the reply",
            "wall, Ray's own time too",
        ),
        llmperf,
    ),
    (
        Definitions(
            "MLPerf LoadGen",
            "ac93e89",
            "due",
            "first token − s",
            "(t_m − t_1) / (N − 1)",
            "no such number",
            "last token",
            "first due to last token",
        ),
        mlperf,
    ),
)


def vllm_block(
    c: Columns,
    percentiles: tuple[float, ...] = (50, 90, 99),
    *,
    concurrency: int | None = None,
    rate_per_s: float | None = None,
) -> str | Absent:
    """The text "Serving Benchmark Result" as `vllm bench serve` sets it; Absent where nothing succeeded.

    Source: vLLM 0.32.0, vllm/benchmarks/serve.py, `calculate_metrics` and `benchmark`.

    `concurrency` and `rate_per_s` are those that were asked for. A number that does not exist
    is "n/a", where vLLM prints 0.00.
    """
    ended = ended_of(c)
    if not ended.any():
        return Absent("no request succeeded; vLLM prints zeros")
    peak_tok, peak_requests = _peaks(c, ended)
    samples = vllm(c)
    start_s, end_s = wall(c)
    prompt = prompt_tok(c)[ended]
    output = c.output_tok[ended]
    counted = not np.isnan(output).any()
    total = samples.output_tok_per_s
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
    known = values[~np.isnan(values)]
    known *= 1000
    n, mean = len(known), float(known.mean()) if len(known) else "n/a"
    order_for(known, (0.5, *(p / 100 for p in percentiles)))
    return [
        (f"Mean {short} (ms):", mean),
        (f"Median {short} (ms):", quantile(known, 0.5) if n else "n/a"),
        *((f"P{p:g} {short} (ms):", quantile(known, p / 100) if n else "n/a") for p in percentiles),
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
    at_s = c.event_s[c.per_event(ended)]
    at_s -= origin_s
    chunks = np.bincount(at_s.astype(np.int64))
    first = (c.dispatched_s[ended] - origin_s).astype(np.int64)
    last = (c.last_s[ended] - origin_s).astype(np.int64)
    steps = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last + 1, -1)
    return int(chunks.max()), int(np.cumsum(steps).max())
