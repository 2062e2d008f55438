"""A run as Trace Event JSON: open it at ui.perfetto.dev, or in chrome://tracing.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (microseconds).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from loadgen.columns import Columns, Floats
from loadgen.totals import in_flight_steps
from reports import series
from reports.view import View

CLIENT, SERVER = 1, 2
GAUGES = (
    ("engine", "running", "running", SERVER),
    ("engine", "waiting", "waiting", SERVER),
    ("engine", "kv_used_fraction", "KV cache in use", SERVER),
    ("server", "rss_bytes", "server memory (bytes)", SERVER),
    ("client", "rss_bytes", "client memory (bytes)", CLIENT),
)
"""Telemetry that becomes counters: source, name, the counter's name, whose it is."""

Event = dict[str, Any]


def trace_events(view: View) -> dict[str, Any]:
    """Requests as async slices (each with its wait and its decode inside), counters, on the run's clock."""
    events = [*_names(), *_slices(view.columns), *_counters(view)]
    return {
        "traceEvents": sorted(events, key=lambda event: event.get("ts", -1.0)),
        "displayTimeUnit": "ms",
        "otherData": {"run": view.name, "verdict": view.summary["verdict"]["state"]},
    }


def _names() -> Iterator[Event]:
    for pid, name in ((CLIENT, "client"), (SERVER, "server")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _slices(c: Columns) -> Iterator[Event]:
    indices, outcomes = c.table.column("index").to_pylist(), c.table.column("outcome").to_pylist()
    for i, (index, outcome) in enumerate(zip(indices, outcomes, strict=True)):
        over_s = np.fmax(c.closed_s[i], c.last_s[i])
        if np.isnan(c.sent_s[i]) or np.isnan(over_s):
            continue
        name = f"request {index}" + ("" if outcome == "ok" else f" ({outcome})")
        told = {
            "outcome": outcome,
            "due_s": float(c.due_s[i]),
            "prompt_tok": _known(c.prompt_tok[i]),
            "output_tok": _known(c.output_tok[i]),
        }
        yield from _slice(index, name, c.sent_s[i], over_s, told)
        if not np.isnan(c.first_s[i]):
            yield from _slice(index, "queue + prefill", c.sent_s[i], c.first_s[i])
            yield from _slice(index, "decode", c.first_s[i], c.last_s[i])


def _slice(index: int, name: str, start_s: float, end_s: float, args: Event | None = None) -> Iterator[Event]:
    same = {"cat": "request", "id": index, "pid": CLIENT, "tid": CLIENT, "name": name}
    yield {"ph": "b", "ts": float(start_s) * 1e6, **same, "args": args or {}}
    yield {"ph": "e", "ts": float(end_s) * 1e6, **same}


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _counters(view: View) -> Iterator[Event]:
    c, telemetry = view.columns, view.telemetry
    known = ~np.isnan(c.sent_s) & ~np.isnan(c.closed_s)
    if known.any():
        yield from _counter("in flight", CLIENT, *in_flight_steps(c.sent_s[known], c.closed_s[known]))
        edges = series.bin_edges(float(c.closed_s[known].max()))
        yield from _counter("output tokens per s", CLIENT, edges[:-1], series.tokens_per_s(c, edges))
    devices = sorted({source for source in telemetry["source"].unique() if source.startswith("gpu")})
    gauges = (*GAUGES, *((d, "memory_used_bytes", f"{d} memory (bytes)", SERVER) for d in devices))
    for source, name, title, pid in gauges:
        mine = telemetry[
            (telemetry["source"] == source) & (telemetry["name"] == name) & (telemetry["at_ns"] >= 0)
        ].dropna(subset="value")
        yield from _counter(
            title, pid, mine["at_ns"].to_numpy(dtype=float) / 1e9, mine["value"].to_numpy(dtype=float)
        )


def _counter(name: str, pid: int, at_s: Floats, values: Floats) -> Iterator[Event]:
    for second, value in zip(at_s.tolist(), values.tolist(), strict=True):
        yield {"ph": "C", "ts": second * 1e6, "pid": pid, "name": name, "args": {"value": value}}
