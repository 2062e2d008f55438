"""The sections on how a run went: each takes a view and returns the blocks that answer one question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from burstline.loadgen.record.columns import Floats
from burstline.loadgen.record.summary import Quantiles, Section
from burstline.loadgen.stats.figure import Absent, Estimate, Figure
from burstline.reports.blocks import (
    Block,
    Cell,
    Column,
    Folded,
    Note,
    Overview,
    Plot,
    Row,
    Side,
    Table,
    Tile,
    Tiles,
    table,
)
from burstline.reports.figures import ecdf, run_figures, series
from burstline.reports.figures.gaps import gap_map
from burstline.reports.figures.run_figures import Panel, SeriesLine
from burstline.reports.model.comparison import LATENCIES, QUANTILES, Contender, View
from burstline.reports.number_format import count, counted, duration, interval, number, point, scale_of
from burstline.reports.page.estimate_tables import group_table, latency_table, session_tables, title_of

NO_DISTRIBUTION = "Fewer than two requests succeeded: there is no distribution."
QUEUE = (("engine", "running", "running"), ("engine", "waiting", "waiting"))
MEMORY = (("server", "rss_bytes", "server"), ("client", "rss_bytes", "client"))
"""Telemetry on the time axis: source, name, label. Devices join the memory panel by themselves."""


def numbers(view: View) -> list[Block]:
    """Headline numbers with small figures beside them, then latency, throughput and memory as tables."""
    summary = view.summary
    headline: dict[str, Section] = {
        **{key: row for key, row in summary.metrics.items() if key in LATENCIES},
        "interactivity": summary.interactivity,
    }
    others = {key: row for key, row in summary.metrics.items() if key not in LATENCIES}
    groups: list[tuple[str, Section]] = [("Throughput", summary.throughput), ("Memory", summary.memory)]
    if any(summary.cost.rows()):
        groups.append(("Cost and energy", summary.cost))
    if summary.goodput.criteria:
        groups.insert(1, (f"Goodput: {' and '.join(summary.goodput.criteria)}", summary.goodput))
    details: list[tuple[str, Section]] = [("Concurrency", summary.concurrency), ("Stalls", summary.stalls)]
    blocks: list[Block] = [
        Overview(Tiles(tuple(_tiles(view))), tuple(_small_figures(view))),
        Side(
            (
                latency_table("Latency of all planned requests", headline, graded=summary.grades),
                *(group_table(caption, section) for caption, section in groups),
            ),
            least_rem=36,
        ),
        Folded(
            "Concurrency and stalls",
            (Side(tuple(group_table(caption, section) for caption, section in details)),),
        ),
    ]
    if others:
        table = latency_table("The same requests, measured otherwise", others, graded=summary.grades)
        blocks.append(Folded("Other latencies, and what other tools call by the same names", (table,)))
    if bounds := {key: row for key, row in summary.bounds.items() if key in LATENCIES}:
        blocks.append(Folded("Upper bounds, as MLPerf computes them", (_bounds(bounds),)))
    return [*blocks, Folded("Evidence: where each of these numbers comes from", (_evidence(view),))]


def sessions(view: View) -> list[Block]:
    """Conversations: their makespan, and each turn's latency and cached prompt by its place in them."""
    assert view.summary.sessions is not None
    return list(session_tables(view.summary.sessions))


def _small_figures(view: View) -> Iterator[Plot]:
    """The distribution of the end-to-end latency and the pulse of the run; their numbers stand below."""
    yield from distributions(_contender(view), "e2e")
    if (edges := _edges(view)) is not None:
        yield run_figures.pulse(
            edges, series.in_flight(view.columns, edges), series.tokens_per_s(view.columns, edges)
        )


def distributions(contenders: Sequence[Contender], *metrics: str, prefix: str = "") -> Iterator[Plot]:
    """The distributions of latencies, with the percentiles that all tables have."""
    titles = {"ttft": "Time to first token", "tpot": "Time per output token", "e2e": "End to end"}
    for metric in metrics:
        curves = []
        for contender in contenders:
            figures = {share: contender.figure("metrics", metric, p) for p, share in QUANTILES.items()}
            known = {share: f.point for share, f in figures.items() if isinstance(f, Estimate)}
            curves.append(ecdf.Curve(contender.label, contender.counted(metric), known))
        plot = ecdf.ecdf(f"{prefix}ecdf-{metric}", titles[metric], title_of(metric), curves)
        if plot is not None:
            yield plot


def _tiles(view: View) -> Iterator[Tile]:
    for key in ("output_tok_per_s", "requests_per_s"):
        yield _tile(title_of(key), view.summary.figure("throughput", key))
    for key, wanted in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("e2e", "p99")):
        p = _known(view, key, wanted)
        yield _tile(f"{title_of(key)} {p}", view.summary.figure("metrics", key, p))


def _known(view: View, key: str, wanted: str) -> str:
    """The percentile, or the highest known one of the tail where it is not known itself."""
    tail = (wanted, "p95", "p90") if wanted == "p99" else (wanted,)
    figures = ((p, view.summary.figure("metrics", key, p)) for p in tail)
    return next((p for p, figure in figures if isinstance(figure, Estimate)), wanted)


def _tile(label: str, figure: Figure) -> Tile:
    if isinstance(figure, Absent):
        return Tile(label, "–", "", figure.reason)
    scale = scale_of([figure])
    return Tile(label, point(figure, scale), scale.unit, interval(figure, scale))


def _bounds(bounds: Mapping[str, Quantiles]) -> Table:
    """Without intervals: each bound is the end of one."""
    caption = "With 99% confidence the quantile is below this: MLPerf's early-stopping estimate"
    bare = {key: section.mapped(_without_interval) for key, section in bounds.items()}
    return latency_table(caption, bare, evidence=False)


def _without_interval(figure: Figure) -> Figure:
    return figure if isinstance(figure, Absent) else replace(figure, low=None, high=None)


def _evidence(view: View) -> Table:
    rows = [
        _evidence_row(view, key, row.name, row.figure)
        for key, section in view.summary.metrics.items()
        if key in LATENCIES
        for row in section.rows()
    ]
    columns = ("Number", "n", "Interval", "Request there", "The next slower", "The line that prints it")
    return Table(
        "Each number with its observations, its interval, the requests nearest to it and its command",
        tuple(Column(title, k == 1) for k, title in enumerate(columns)),
        tuple(rows),
    )


def _evidence_row(view: View, key: str, p: str, figure: Figure) -> Row:
    links = [Cell(f"#{k}", href=view.shown.href(k)) for k in view.nearest(key, p)]
    known = figure if isinstance(figure, Estimate) else None
    level = f"{known.level * 100:.0f}%" if known and known.level else "–"
    note = figure.reason if isinstance(figure, Absent) else figure.note or ""
    return Row(
        (
            Cell(f"{title_of(key)} {p}", href=f"#def-{key}"),
            Cell(f"{known.n:,}" if known else "–"),
            Cell(level, detail=note),
            *(links + [Cell("–")] * 2)[:2],
            Cell(f"jq '.metrics.{key}.{p}' {view.name}/summary.json", tone="code"),
        ),
        id=f"ev-{key}-{p}",
    )


def shape(view: View) -> list[Block]:
    """The distributions of TTFT and TPOT; that of E2E stands with the headline numbers."""
    plots = tuple(distributions(_contender(view), "ttft", "tpot"))
    if not plots:
        return [Note(NO_DISTRIBUTION)]
    split = _ttft_split(view)
    return [Side(plots, ecdf.EXPLAINED), *([] if split is None else [split])]


def _contender(view: View) -> list[Contender]:
    return [Contender(view.manifest.engine, (view,))]


def _ttft_split(view: View) -> Plot | None:
    """The mean TTFT in queue, prefill and the rest, where the server tells the first two.

    In its histograms, as vLLM does, or in each reply, as SGLang does.
    """
    summary, told = view.summary, view.summary.agreement
    whole = summary.figure("metrics", "ttft", "mean")
    of_replies = [summary.figure("metrics", name, "mean") for name in ("server_queue", "server_prefill")]
    of_histograms = [told.server_queue_mean_s, told.server_prefill_mean_s]
    queue, prefill = of_replies if isinstance(of_replies[1], Estimate) else of_histograms
    if (
        not isinstance(whole, Estimate)
        or not isinstance(queue, Estimate)
        or not isinstance(prefill, Estimate)
    ):
        return None
    rest_s = whole.point - queue.point - prefill.point
    if not np.isfinite(rest_s) or rest_s < 0:
        return None
    return run_figures.split_bar(
        "ttft-split",
        "Where the time to the first token goes",
        (
            ("queue in the server", queue.point),
            ("prefill", prefill.point),
            ("network, HTTP, client", rest_s),
        ),
    )


def when(view: View) -> list[Block]:
    """Queue, tokens per second, memory and KV cache on the shared time axis."""
    c = view.columns
    edges = _edges(view)
    if edges is None:
        return [Note("Nothing was sent: there is no time axis to draw.")]
    end_s = _end_s(view)
    panels = _panels(view, edges)
    shown = [panel for panel in panels if panel.lines]
    missing = [panel.title for panel in panels if not panel.lines]
    first_s = c.first_s[c.ok]
    drained = is_burst(view) and isinstance(view.summary.burst.drain_s, Estimate)
    marks = [(float(first_s.max()), "last first token")] if drained else []
    most, fastest = (panel.lines[0].values.max() for panel in panels[:2])
    finding = (
        f"At most {counted(most, 'request')} in flight; output peaks at {number(fastest)} tok/s; "
        f"the last reply ends {duration(end_s)} after the start."
    )
    blocks: list[Block] = [run_figures.timeline(edges, shown, marks, finding, _left_out(view, end_s))]
    gaps = gap_map(c.event_s, c.follows, edges)
    if gaps is not None:
        blocks.append(gaps)
    if missing:
        blocks.append(Note(f"Not provided by the engine, or not watched on this run: {', '.join(missing)}."))
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


def _left_out(view: View, end_s: float) -> list[run_figures.Span]:
    """Warm-up and drain of an open loop: before and after the window in which its numbers count."""
    window = view.summary.window
    start, last = window.start_s, window.end_s
    if isinstance(window.n_warm_up, Absent) or isinstance(start, Absent) or isinstance(last, Absent):
        return []
    first_s = float(view.columns.due_s.min())
    spans = (run_figures.Span(first_s, start.point, "warm-up"), run_figures.Span(last.point, end_s, "drain"))
    return [span for span in spans if span.end_s > span.start_s]


def _panels(view: View, edges: Floats) -> list[Panel]:
    telemetry = view.telemetry

    def lines(*wanted: tuple[str, str, str]) -> tuple[SeriesLine, ...]:
        found = [
            SeriesLine(label, series.level(telemetry, source, name, edges)) for source, name, label in wanted
        ]
        return tuple(line for line in found if np.isfinite(line.values).any())

    devices = telemetry.devices()
    in_flight = SeriesLine("in flight", series.in_flight(view.columns, edges))
    output = SeriesLine("output", series.tokens_per_s(view.columns, edges))
    return [
        Panel("Requests", "", (in_flight, *lines(*QUEUE))),
        Panel("Output tokens", "tok/s", (output,)),
        Panel(
            "Memory", "bytes", lines(*MEMORY, *((device, "memory_used_bytes", device) for device in devices))
        ),
        Panel("KV cache in use", "fraction", lines(("engine", "kv_used_fraction", "KV cache"))),
    ]


def is_burst(view: View) -> bool:
    """Whether all requests were due at once."""
    return len(view.columns) > 1 and float(np.ptp(view.columns.due_s)) == 0


def burst(view: View) -> list[Block]:
    """How the burst drains."""
    group = view.summary.burst
    slope = group.ttft_slope_s_per_request
    slope_s = slope.point if isinstance(slope, Estimate) else None
    ttft_s, order = view.latency("ttft"), series.sending_order(view.columns)
    finding = _drain_finding(ttft_s, slope_s, group.ttft_residual_s)
    plot = run_figures.drain(ttft_s[order], order, slope_s, finding, view.shown.href)
    if plot is None:
        return [Note("No request that succeeded has a first token: there is nothing to drain.")]
    numbers = group_table("The burst in numbers", group)
    return [Side((replace(plot, explained=""), numbers), plot.explained)]


def _drain_finding(ttft_s: Floats, slope_s: float | None, residual_s: Figure) -> str:
    came_s = ttft_s[np.isfinite(ttft_s)]
    if not len(came_s):
        return ""
    first, last = duration(float(came_s.min())), duration(float(came_s.max()))
    served = "" if len(came_s) == len(ttft_s) else f" of the {len(came_s):,} served requests"
    wave = f"First tokens{served} come from {first} to {last} after the burst."
    if slope_s is None or slope_s <= 0:
        return wave
    rate = number(1 / slope_s)
    scatter = ""
    if isinstance(residual_s, Estimate):
        scatter = f" First tokens lie {duration(residual_s.point)} from that line (RMS)."
    return (
        f"{wave} Each place in the queue costs {duration(slope_s)}: {rate} requests are taken in per second."
        f"{scatter}"
    )


INSTRUMENT = (
    "send_lag_p99_s",
    "read_error_p99_s",
    "kernel_stamps",
    "peak_events_per_s",
    "client_cpu_s",
    "others_cpu_fraction",
)
"""The six figures that say most about how accurate the measurement is; the others fold."""


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
    summary = view.summary
    groups: list[tuple[str, Section]] = [
        ("Tokens, counted twice", summary.conservation),
        ("Latencies, by the server's own clock too", summary.agreement),
    ]
    details: list[tuple[str, Section]] = [("Everything about the client", summary.instrument)]
    if not is_burst(view):
        details += [
            ("The planned schedule and the achieved one", summary.schedule),
            ("The window that counts", summary.window),
            ("Did it stay level?", summary.stationarity),
        ]
    first = group_table("The instrument's error on this run", summary.instrument, only=INSTRUMENT)
    whole = Side(tuple(group_table(caption, section) for caption, section in details))
    return [
        Side((first, *(group_table(caption, section) for caption, section in groups))),
        *machines(view),
        Folded("All figures on the client, the schedule and the window", (whole,)),
    ]
