"""The summary's estimates as tables, and the glossary of what they mean."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from loadgen.metrics.definitions import METRICS
from loadgen.record.columns import Floats
from reports.number_format import Scale, duration, interval, is_estimate, point, scale_for
from reports.tables import Cell, Column, Row, Table

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
ARROWS = {"lower": "↓", "higher": "↑"}
"""Which way is better, as shown after a metric's name."""

HEADLINE = ("ttft", "tpot", "itl", "e2e")
"""The latencies of the headline table; the others are folded away."""
CERTIFIED = ("TTFT", "ITL", "TPOT", "E2E")
TITLES = {
    "first_wave_s": "Time to the first token",
    "drain_s": "Time to drain",
    "plateau_tok_per_s": "Plateau (10 % to 90 % of first tokens)",
    "ttft_slope_s_per_request": "TTFT slope along the queue",
    "ttft_residual_s": "TTFT around that line (RMS)",
    "prefill_requests_per_s": "Requests taken in",
    "prefill_tok_per_s": "Prompt tokens taken in",
    "fifo": "First come, first served (1 is exactly)",
    "server_peak_bytes": "Server processes, peak resident",
    "server_anon_peak_bytes": "… without shared pages",
    "server_pss_bytes": "… shared pages split (PSS)",
    "client_peak_bytes": "Client processes, peak resident",
    "device_peak_bytes": "Device memory, peak",
    "weights_bytes": "Weights",
    "kv_capacity_bytes": "KV cache, capacity",
    "kv_capacity_tok": "KV cache, capacity in tokens",
    "kv_peak_fraction": "KV cache, peak use",
    "little_residual": "Residual of Little's law",
    "count": "Stalls",
    "total_s": "Time stalled, all requests together",
    "request_fraction": "Requests with a stall",
    "threshold_s": "A gap is a stall beyond",
    "token": "Most stalls come before token",
    "mean": "Mean",
    "max": "Most at once",
    "send_spread_s": "First to last request sent",
    "kernel_stamps": "Share of arrivals stamped by the kernel",
    "max_pass_s": "Longest pass of the read loop",
    "resent": "Requests sent twice",
    "others_cpu_fraction": "CPU used by others",
    "steal_fraction": "CPU stolen by the hypervisor",
    "cpu_waiting_fraction": "Time some task waited for a CPU",
    **{f"send_lag_{p}_s": f"Requests sent late, {p}" for p in ("p50", "p99", "max")},
    **{f"read_lag_{p}_s": f"Read after the kernel had it, {p}" for p in ("p50", "p99", "max")},
    **{f"read_error_{p}_s": f"What an arrival may be off by, {p}" for p in ("p50", "p99", "max")},
    "peak_events_per_s": "Most events in a second",
    "compiled_reader": "Load drivers with the compiled reader",
    "client_cpu_s": "CPU time of the client",
    "involuntary_switches": "Times the client was made to give up its CPU",
    "clock_drift_s": "Drift of the wall clock",
    **{f"certified_{m.lower()}_bias_s": f"{m} at a server of known truth, mean error" for m in CERTIFIED},
    **{f"certified_{m.lower()}_p99_s": f"{m} at a server of known truth, error p99" for m in CERTIFIED},
    "certified_events_per_s": "Events per second in that test",
    "certified_cpu_per_event_s": "CPU time of the client per event",
    "output_client_tok": "Output, counted from the replies",
    "output_server_tok": "Output, by the server's counters",
    "output_residual": "Output, share that differs",
    "prompt_client_tok": "Prompts, counted from the replies",
    "prompt_server_tok": "Prompts, by the server's counters",
    "prompt_residual": "Prompts, share that differs",
    "tok_per_s": "Their output",
    "start_s": "Counts from",
    "end_s": "Counts until",
    "certified_limit_per_s": "ITL p99 within 5 % up to events",
    "throttled_fraction": "Time the client was throttled",
    **{f"{m.lower()}_client_p50_s": f"{m} p50, from the request written" for m in ("TTFT", "E2E")},
    "itl_client_p50_s": "ITL p50",
    **{f"{m}_server_p50_s": "… by the server's own histogram" for m in ("ttft", "itl", "e2e")},
    **{f"{m}_gap_s": "… the client has more" for m in ("ttft", "itl", "e2e")},
    "attainment": "Share of all planned requests",
    "planned_per_s": "Rate planned",
    "achieved_per_s": "Rate achieved",
    "rate_error": "Rate achieved against planned (0 is exact)",
    "planned_gap_cv": "Variation of the gaps planned (CV)",
    "gap_cv": "Variation of the gaps achieved (CV)",
    "dispersion_100ms": "Dispersion of counts per 0.1 s (Poisson: 1)",
    "dispersion_1s": "Dispersion of counts per 1 s",
    "dispersion_10s": "Dispersion of counts per 10 s",
    "gap_ks": "Distance of the gaps from their law (KS)",
    "gap_ks_critical": "… exceeded in 5 % of schedules that follow it",
    "in_flight_mean": "In flight, time average",
    "warm_up_s": "Warm-up left out",
    "n_warm_up": "Requests in the warm-up",
    "start_wave_ttft_p50_s": "TTFT p50 of the start wave",
    "start_wave_e2e_p50_s": "E2E p50 of the start wave",
    "in_flight_trend_p": "In flight: chance of such a trend without one",
    "ttft_trend_p": "TTFT: chance of such a trend without one",
    "tpot_trend_p": "TPOT: chance of such a trend without one",
    "in_flight_trend_tau": "In flight: Kendall's τ with time",
    "ttft_trend_tau": "TTFT: Kendall's τ with time",
    "tpot_trend_tau": "TPOT: Kendall's τ with time",
    "in_flight_change_fraction": "In flight: change over the run, of its median",
    "ttft_change_fraction": "TTFT: change over the run, of its median",
    "tpot_change_fraction": "TPOT: change over the run, of its median",
}
"""What the summary's figures without a definition of their own are called; others are shown by their key."""
SHARES = ("attainment", "kernel_stamps", "compiled_reader")
"""Fractions whose names do not say so."""
ACRONYMS = {
    "kv": "KV",
    "cpu": "CPU",
    "gpu": "GPU",
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "tok": "tokens",
}

LETTERS = (
    "The letters of the formulae: s when the request was due, d dispatched, c₁ connected, w fully written; "
    "t₁ … tₘ when the events that carry tokens arrived, n₁ … nₘ how many tokens each carries, N their sum; "
    "f the end of the stream; a window is [a, b]. All on one monotonic clock."
)

Node = Mapping[str, Any]


def title_of(key: str) -> str:
    """The metric's title; a key without one is shown in words, the unit at its end left out."""
    if key in METRICS:
        return METRICS[key].title
    if key in TITLES:
        return TITLES[key]
    words = key.replace(".", " ").replace("_", " ").split()
    if len(words) > 1 and words[-1] in ("s", "bytes", "fraction"):
        words.pop()
    shown = " ".join(ACRONYMS.get(word, word) for word in words)
    return shown[:1].upper() + shown[1:]


def is_per_request(key: str) -> bool:
    """Whether the metric has one value per request."""
    return key in METRICS and METRICS[key].of is not None


def named(key: str) -> Cell:
    """The metric's name with its better-direction arrow, linked to its definition."""
    if key not in METRICS:
        return Cell(title_of(key))
    arrow = ARROWS.get(METRICS[key].better, "")
    return Cell(f"{METRICS[key].title}\u00a0{arrow}".strip(), href=f"#def-{key}")


def latency_table(caption: str, metrics: Mapping[str, Node], *, evidence: bool = True) -> Table:
    """One row a metric, one column a quantile, each number over its interval, then the instrument's error.

    Numbers of the headline link to their `evidence`.
    """
    columns = [p for p in (*QUANTILES, "mean") if any(p in row for row in metrics.values())]
    notes: list[str] = []
    errors = ["instrument_error"] if any("instrument_error" in row for row in metrics.values()) else []
    rows = tuple(
        Row(tuple(_latency_cells(key, row, columns, errors, notes, evidence))) for key, row in metrics.items()
    )
    titles = ["Latency", "Unit", *columns, *("± instrument" for _ in errors), "n"]
    return Table(
        caption, tuple(Column(title, k > 1) for k, title in enumerate(titles)), rows, notes=tuple(notes)
    )


def _latency_cells(
    key: str, row: Node, columns: list[str], errors: list[str], notes: list[str], evidence: bool
) -> Iterator[Cell]:
    known = [row[p] for p in columns if p in row and row[p]["point"] is not None]
    scale = scale_for(known[0]["unit"] if known else "", [estimate["point"] for estimate in known])
    yield named(key)
    yield Cell(scale.unit)
    for p in columns:
        yield (
            _value(row[p], scale, notes, f"#ev-{key}-{p}" if evidence and key in HEADLINE else "")
            if p in row
            else Cell("–")
        )
    for name in errors:
        error = row.get(name, {"point": None, "absent": "not certified"})
        yield _value(error, scale, notes) if error["point"] is None else Cell(duration(error["point"]))
    yield Cell(f"{max((estimate['n'] for estimate in known), default=0):,}")


def _value(estimate: Node, scale: Scale, notes: list[str], href: str = "") -> Cell:
    """The number over its interval; a dash where it is absent, its reason added to `notes` if new."""
    if estimate["point"] is not None:
        return Cell(point(estimate, scale), detail=interval(estimate, scale), href=href)
    reason = estimate.get("absent", "not provided")
    if reason not in notes:
        notes.append(reason)
    return Cell("–", note=notes.index(reason) + 1)


def group_table(caption: str, group: Node) -> Table:
    """A group of the summary, one estimate a row; nested groups are flattened with their names in front."""
    notes: list[str] = []
    rows = tuple(Row(tuple(_group_cells(key, estimate, notes))) for key, estimate in leaves(group))
    columns = (Column("What", numeric=False), Column("Value"), Column("Unit", numeric=False))
    return Table(caption, columns, rows, notes=tuple(notes))


def _group_cells(key: str, estimate: Node, notes: list[str]) -> Iterator[Cell]:
    scale = scale_of(key, estimate)
    # What a gap is the gap of decides its sign: means may lie the other way round than the medians above it.
    how = estimate.get("note", "") if key.endswith("_gap_s") else ""
    yield replace(named(key), detail=how)
    yield _value(estimate, scale, notes)
    yield Cell(scale.unit)


def scale_of(key: str, estimate: Node) -> Scale:
    """How the estimate is shown; a fraction of the whole is shown in per cent."""
    if estimate["point"] is None:
        return Scale(1.0, "")
    is_fraction = key.endswith("_fraction") or key in SHARES
    return scale_for(
        "fraction" if is_fraction and estimate["unit"] == "1" else estimate["unit"], [estimate["point"]]
    )


def leaves(group: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every estimate of a group with its dotted name, in the summary's order; plain values are left out."""
    for key, value in group.items():
        if is_estimate(value):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")


def nearest(values: Floats, p: float, k: int = 2) -> list[int]:
    """The positions of the k values at and just beyond the quantile, failed ones (+inf) left out."""
    order = np.argsort(values, kind="stable")
    order = order[~np.isnan(values[order])]
    start = max(math.ceil(p * len(order)) - 1, 0)
    return [int(i) for i in order[start : start + k] if math.isfinite(values[i])]


def glossary_table() -> Table:
    """Every metric's unit, formula and source."""
    better = {"lower": "↓ lower", "higher": "↑ higher"}
    rows = tuple(
        Row(
            (
                Cell(metric.title),
                Cell(formula(metric.formula), detail=metric.note, tone="wrap"),
                Cell(metric.unit, detail=better.get(metric.better, ""), tone="short"),
                Cell(metric.source),
            ),
            id=f"def-{key}",
        )
        for key, metric in METRICS.items()
    )
    columns = tuple(Column(title, numeric=False) for title in ("Metric", "Made of", "Unit", "Source"))
    return Table("What every number means", columns, rows)


def formula(text: str) -> Markup:
    """A formula with its indices as subscripts: t_1, t_{i−1}."""
    return Markup(re.sub(r"_(?:\{([^}]+)\}|(\w))", r"<sub>\1\2</sub>", str(escape(text))))  # noqa: S704
