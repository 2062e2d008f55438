"""The sections on how a run went: each takes a view and returns the blocks that answer one question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from burstline.measure.record.columns import Floats
from burstline.measure.stats.figure import Absent, Estimate
from burstline.reports.blocks import Block, Note, Plot, Side, table
from burstline.reports.figures import ecdf, run_figures, series
from burstline.reports.figures.first_screen import Bounds
from burstline.reports.figures.run_figures import Panel, SeriesLine
from burstline.reports.model.comparison import QUANTILES, Contender, View
from burstline.reports.number_format import count, counted, duration, number
from burstline.reports.page.answer import counted_apart
from burstline.reports.page.banner import instrument_error
from burstline.reports.page.estimate_tables import (
    group_table,
    headline_latencies,
    latency_table,
    title_of,
    whole_run,
)
from burstline.reports.page.first_screen import bounds_of, is_burst, left_out

NO_DISTRIBUTION = "Fewer than two requests succeeded: there is no distribution."
NONE: Bounds = {}
QUEUE = (("engine", "running", "running"), ("engine", "waiting", "waiting"))
SERVER, SAID = ("server", "rss_bytes", "server"), ("engine", "resident_bytes", "server, by its metrics")
CLIENT = ("client", "rss_bytes", "client")
"""Telemetry on the time axis: source, name, label. Devices join the memory panel by themselves."""


def numbers(view: View) -> list[Block]:
    """Latencies, totals and all other numbers of the run."""
    summary = view.summary
    others = {key: row for key, row in summary.metrics.items() if key not in view.headline}
    groups = {
        "throughput": "Throughput",
        "goodput": f"Goodput: {' and '.join(summary.goodput.criteria)}",
        "memory": "Memory",
        "concurrency": "Concurrency",
        "stalls": "Stalls",
        "burst": "The burst in numbers",
        "cost": "Cost and energy",
    }
    unused = {"goodput"} if not summary.goodput.criteria else set[str]()
    unused |= set() if is_burst(view) else {"burst"}
    if not any(isinstance(row.figure, Estimate) for row in summary.cost.rows()):
        unused |= {"cost"}
    tables = tuple(group_table(groups[name], summary, name) for name in groups if name not in unused)
    after = " after the warm-up" if view.has_warm_up else ""
    e2e = [row.figure for row in summary.metrics["e2e"].rows() if isinstance(row.figure, Estimate)]
    n = counted(max((figure.n for figure in e2e), default=0), "request")
    brackets = "; 95% intervals in brackets" if any(figure.low is not None for figure in e2e) else ""
    blocks: list[Block] = [
        *headline_latencies(view, f"Latency of the {n}{after}{brackets}"),
        whole_run(summary),
        Side(tables),
        *map(Note, filter(None, [counted_apart(summary)])),
    ]
    if others:
        blocks.append(latency_table("The same requests by other definitions", others, summary.grades))
    return blocks


def distributions(
    contenders: Sequence[Contender], keys: Sequence[str], *metrics: str, prefix: str = "", slos: Bounds = NONE
) -> Iterator[Plot]:
    """The distributions of latencies, with the percentiles that all tables have.

    `keys` begin the keys of each contender's numbers.
    """
    titles = {"ttft": "Time to first token", "tpot": "Time per output token", "e2e": "End to end"}
    for metric in metrics:
        curves = []
        for contender, key in zip(contenders, keys, strict=True):
            figures = {share: contender.figure("metrics", metric, p) for p, share in QUANTILES.items()}
            known = {share: f for share, f in figures.items() if isinstance(f, Estimate)}
            curve = ecdf.Curve(contender.label, contender.counted(metric), known, f"{key}metrics.{metric}")
            curves.append(curve)
        name, label = f"{prefix}{metric}-cdf", title_of(metric)
        plot = ecdf.ecdf(name, titles[metric], label, curves, slos.get(label, {}))
        if plot is not None:
            yield plot


def shape(view: View) -> list[Block]:
    """The distributions of TTFT, TPOT and E2E, and what the TTFT is made of."""
    shown = [key for key in view.headline if key != "itl"]
    contender = Contender(view.manifest.engine, (view,))
    return side_of(distributions([contender], [""], *shown, slos=bounds_of(view)), ecdf.EXPLAINED)


def side_of(distributions: Iterator[Plot], explained: str) -> list[Block]:
    """The figures side by side, or that there are none."""
    plots = tuple(distributions)
    return [Side(plots, explained)] if plots else [Note(NO_DISTRIBUTION)]


def when(view: View) -> list[Block]:
    """Queue, tokens per second, memory and KV cache on the shared time axis."""
    c = view.columns
    edges = _edges(view)
    if edges is None:
        return [Note("Nothing was sent: there is no timeline.")]
    end_s = _end_s(view)
    panels = _panels(view, edges)
    shown = [panel for panel in panels if panel.lines]
    missing = [panel.title for panel in panels if not panel.lines]
    first_s = c.first_s[c.ok]
    drained = is_burst(view) and isinstance(view.summary.burst.drain_s, Estimate)
    marks = [(float(first_s.max()), "last first token")] if drained else []
    most, fastest = (panel.lines[0].values.max() for panel in panels[:2])
    numbers = (
        ("timeline.in_flight_max", counted(most, "request")),
        ("timeline.output_max_tok_per_s", f"{number(fastest)} tok/s"),
        ("timeline.end_s", duration(end_s)),
    )
    requests, output, end = (text for _, text in numbers)
    finding = f"At most {requests} in flight; output peaks at {output}; the last reply ends after {end}."
    plot = run_figures.timeline(edges, shown, marks, finding, left_out(view, end_s))
    blocks: list[Block] = [replace(plot, numbers=numbers)]
    if missing:
        blocks.append(Note(f"Not reported by the engine, or not recorded in this run: {', '.join(missing)}."))
    memory = view.summary.memory.server_peak_bytes
    if isinstance(memory, Absent):
        blocks.append(Note(f"The memory of the server's processes is not known: {memory.reason}."))
    return blocks


def _end_s(view: View) -> float:
    c = view.columns
    return float(np.nanmax(np.concatenate([c.last_s, c.closed_s, [0.0]])))


def _edges(view: View) -> Floats | None:
    """Bins of the time axis, none shorter than three steps of the engine; None where nothing was sent.

    Shorter bins would show the beat between bins and steps as stalls and peaks of the server.
    """
    end_s = _end_s(view)
    if end_s <= 0:
        return None
    step_s = series.step(view.columns)
    most = 200 if step_s <= 0 else int(np.clip(end_s / (3 * step_s), 8, 200))
    return series.bin_edges(end_s, most)


def _panels(view: View, edges: Floats) -> list[Panel]:
    telemetry = view.run.watched

    def lines(*wanted: tuple[str, str, str]) -> tuple[SeriesLine, ...]:
        found = [
            SeriesLine(label, series.level(telemetry, source, name, edges)) for source, name, label in wanted
        ]
        return tuple(line for line in found if np.isfinite(line.values).any())

    devices = ((device, "memory_used_bytes", device) for device in telemetry.devices())
    in_flight = SeriesLine("in flight", series.in_flight(view.columns, edges))
    output = SeriesLine("", series.tokens_per_s(view.columns, edges))
    return [
        Panel("Requests", "", (in_flight, *lines(*QUEUE))),
        Panel("Output tokens", "tok/s", (output,)),
        Panel("Memory", "bytes", (*(lines(SERVER) or lines(SAID)), *lines(CLIENT, *devices))),
        Panel("KV cache in use", "fraction", lines(("engine", "kv_used_fraction", ""))),
    ]


MACHINES = (
    *("Driver", "Machine", "Sent", "Failed", "Late p99", "Canary p99", "Clock error"),
    *("Round trip p50", "Segments resent", "CPU busy", "By others", "Stolen", "Free memory"),
)


def machines(view: View) -> list[Block]:
    """What each machine of the load did; nothing where it all came from this one."""
    rows = []
    for report in view.manifest.drivers:
        if report.host is None:
            continue
        way, used = report.network, report.machine
        shares = (used.busy_fraction, used.others_fraction, used.steal_fraction) if used else ()
        rows.append(
            (
                *(str(report.worker), report.host),
                *(count(n) for n in (report.n_sent, sum(report.failures.values()))),
                _length(report.late.p99_ns if report.late else None),
                _length(report.canary.p99_ns if report.canary else None),
                _length(report.clock.bound_ns if report.clock else None),
                _length(way.least_rtt_p50_ns if way else None),
                count(way.retransmits) if way else "–",
                *([f"{share:.0%}" for share in shares] or ["–"] * 3),
                f"{number(used.free_bytes / 1e9)} GB" if used else "–",
            )
        )
    return [table("The machines of the load", MACHINES, rows, text=(0, 1))] if rows else []


def _length(value_ns: float | None) -> str:
    return "–" if value_ns is None else duration(value_ns / 1e9)


def trust(view: View) -> list[Block]:
    """The instrument's own error, and what the verdict rests on."""
    groups = {
        "instrument": "The client",
        "conservation": "Tokens counted by client and server",
        "agreement": "Latencies by the server's own clock",
        "schedule": "Planned and actual schedule",
        "window": "The measurement window",
        "stationarity": "Steady state",
    }
    shown = list(groups)[: 3 if is_burst(view) else None]
    tables = tuple(group_table(groups[name], view.summary, name) for name in shown)
    error = instrument_error(view.summary.instrument)
    return [*([Note(error)] if error else []), *machines(view), Side(tables)]
