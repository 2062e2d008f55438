"""A run as Trace Event JSON: open it at ui.perfetto.dev, or in chrome://tracing.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (microseconds).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from burstline.loadgen.metrics.throughput import in_flight_steps
from burstline.loadgen.record.columns import Columns, Floats
from burstline.reports.figures import series
from burstline.reports.model.comparison import View

CLIENT, SERVER = 1, 2
GAUGES = (
    ("engine", "running", "running", SERVER),
    ("engine", "waiting", "waiting", SERVER),
    ("engine", "kv_used_fraction", "KV cache in use", SERVER),
    ("server", "rss_bytes", "server memory (bytes)", SERVER),
    ("client", "rss_bytes", "client memory (bytes)", CLIENT),
)
"""Telemetry that becomes counters: source, name, the counter's name, whose it is."""
PHASES = ("to be sent", "queue + prefill", "decode")
"""The slices within a request: from due to sent, to the first token, to the last."""

Event = dict[str, Any]


def trace_json(view: View) -> bytes:
    """The whole file, one event a line."""
    # No displayTimeUnit: Perfetto took it for the unit of `ts` for years.
    told = {"otherData": {"run": view.name, "verdict": view.summary.verdict.state}}
    text = bytearray(orjson.dumps(told)[:-1] + b',"traceEvents":[')
    for i, event in enumerate(trace_events(view)):
        text += b",\n" if i else b"\n"
        text += orjson.dumps(event)
    return bytes(text + b"\n]}\n")


def trace_events(view: View) -> Iterator[Event]:
    """Requests as async slices with their phases inside, then counters, on the run's clock.

    Slices of a request follow each other as they nest: viewers sort by time and keep the order of what is
    simultaneous.
    """
    for pid, name in ((CLIENT, "client"), (SERVER, "server")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": CLIENT, "tid": CLIENT, "name": "thread_name", "args": {"name": "requests"}}
    yield from _slices(view.columns)
    yield from _counters(view)


def _slices(c: Columns) -> Iterator[Event]:
    over_s = np.fmax(c.closed_s, c.last_s)
    moments = np.maximum.accumulate([c.due_s, c.sent_s, c.first_s, c.last_s, over_s])
    told = (c.table.column("index"), c.table.column("outcome"))
    known = (c.due_s, c.prompt_tok, c.output_tok)
    for index, outcome, due_s, prompt_tok, output_tok, at_s, end_s in zip(
        *(column.to_pylist() for column in told),
        *(column.tolist() for column in known),
        moments.T.tolist(),
        over_s.tolist(),
        strict=True,
    ):
        if math.isnan(end_s):
            continue
        same = {"cat": "request", "id": index, "pid": CLIENT, "tid": CLIENT}
        name = f"request {index}" + ("" if outcome == "ok" else f" ({outcome})")
        args = {"outcome": outcome, "due_s": due_s, "prompt_tok": prompt_tok, "output_tok": output_tok}
        yield {"ph": "b", "ts": due_s * 1e6, **same, "name": name, "args": args}
        for phase, start, end in zip(PHASES, at_s, at_s[1:], strict=False):
            if start <= end:  # not where either never happened
                yield {"ph": "b", "ts": start * 1e6, **same, "name": phase}
                yield {"ph": "e", "ts": end * 1e6, **same, "name": phase}
        yield {"ph": "e", "ts": end_s * 1e6, **same, "name": name}


def _counters(view: View) -> Iterator[Event]:
    c, telemetry = view.columns, view.telemetry
    known = ~np.isnan(c.sent_s) & ~np.isnan(c.closed_s)
    if known.any():
        yield from _counter("in flight", CLIENT, *in_flight_steps(c.sent_s[known], c.closed_s[known]))
        edges = series.bin_edges(float(c.closed_s[known].max()))
        yield from _counter("output tokens per s", CLIENT, edges[:-1], series.tokens_per_s(c, edges))
    devices = telemetry.devices()
    gauges = (*GAUGES, *((d, "memory_used_bytes", f"{d} memory (bytes)", SERVER) for d in devices))
    for source, name, title, pid in gauges:
        at_s, values = telemetry.series(source, name)
        yield from _counter(title, pid, at_s[at_s >= 0], values[at_s >= 0])


def _counter(name: str, pid: int, at_s: Floats, values: Floats) -> Iterator[Event]:
    for second, value in zip(at_s.tolist(), values.tolist(), strict=True):
        yield {"ph": "C", "ts": second * 1e6, "pid": pid, "name": name, "args": {"value": value}}
