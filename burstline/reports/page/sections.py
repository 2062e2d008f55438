"""The sections on one run: each takes a view and returns the blocks that answer one question."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from burstline.measure.metrics.audit import audit_sentence
from burstline.measure.record.columns import Floats
from burstline.measure.record.record import failed, outcome_words
from burstline.measure.record.summary import PrefixCache
from burstline.measure.stats.figure import Absent, Estimate, known
from burstline.reports.blocks import Block, Cell, Command, Folded, Note, Plot, Row, Side, Table, table
from burstline.reports.figures import ecdf, run_figures
from burstline.reports.figures.first_screen import ALL_REQUESTS, Bounds
from burstline.reports.figures.run_figures import Panel
from burstline.reports.model.comparison import QUANTILES, Contender, View
from burstline.reports.number_format import count, duration, in_brackets, number, scale_for
from burstline.reports.page.answer import counted_apart
from burstline.reports.page.digest import instrument_error
from burstline.reports.page.estimate_tables import (
    glossary_table,
    group_table,
    headline_latencies,
    latency_table,
    title_of,
    whole_run,
)
from burstline.reports.page.first_screen import bounds_of, is_burst, left_out
from burstline.reports.sentences import say
from burstline.wording import counted

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
    has_cost = any(isinstance(row.figure, Estimate) for row in summary.cost.rows())
    names = ["throughput", *["goodput"] * bool(summary.goodput.criteria), "memory", "concurrency", "stalls"]
    names += ["burst"] * is_burst(view) + ["cost"] * has_cost
    after = " after the warm-up" if known(summary.window.n_warm_up) else ""
    e2e = [row.figure for row in summary.metrics["e2e"].rows() if isinstance(row.figure, Estimate)]
    n = counted(max((figure.n for figure in e2e), default=0), "request")
    blocks: list[Block] = [
        *headline_latencies(view, f"Latency of the {n}{after}{in_brackets(e2e)}"),
        whole_run(summary),
        Side(tuple(group_table(summary, name) for name in names)),
        *map(Note, filter(None, [counted_apart(summary)])),
    ]
    if others:
        blocks.append(latency_table("The same requests by other definitions", others, summary.grades))
    return blocks


def distributions(
    contenders: Sequence[Contender], *metrics: str, prefix: str = "", slos: Bounds = NONE
) -> Iterator[Plot]:
    """The distributions of latencies, with the percentiles that all tables have."""
    titles = {"ttft": "Time to first token", "tpot": "Time per output token", "e2e": "End to end"}
    for metric in metrics:
        curves = []
        for contender in contenders:
            figures = {share: contender.figure("metrics", metric, p) for p, share in QUANTILES.items()}
            known = {share: f for share, f in figures.items() if isinstance(f, Estimate)}
            curves.append(ecdf.Curve(contender.label, contender.counted(metric), known))
        name, label = f"{prefix}{metric}-cdf", title_of(metric)
        if plot := ecdf.ecdf(name, titles[metric], label, curves, slos.get(label, {})):
            yield plot


def shape(view: View) -> list[Block]:
    """The distributions of TTFT, TPOT and E2E, and what the TTFT is made of."""
    shown = [key for key in view.headline if key != "itl"]
    contender = Contender(view.manifest.engine, (view,))
    return side_of(distributions([contender], *shown, slos=bounds_of(view)), say("figure.ecdf"))


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
    most, fastest = (next(iter(panel.lines.values())).max() for panel in panels[:2])
    finding = (
        f"At most {counted(most, 'request')} in flight; output peaks at {number(fastest)} tok/s; the last "
        f"reply ends after {duration(end_s)}."
    )
    lacking = f"Not reported by the engine, or not recorded in this run: {', '.join(missing)}."
    notes = [lacking] if missing else []
    if isinstance(memory := view.summary.memory.server_peak_bytes, Absent):
        notes.append(f"The memory of the server's processes is not known: {memory.reason}.")
    return [run_figures.timeline(edges, shown, marks, finding, left_out(view, end_s)), *map(Note, notes)]


def _end_s(view: View) -> float:
    c = view.columns
    return float(np.nanmax(np.concatenate([c.last_s, c.closed_s, [0.0]])))


def _edges(view: View) -> Floats | None:
    """Bins of the time axis, none shorter than three steps of the engine; None where nothing was sent.

    Shorter ones would show the beat of bins and steps as stalls and peaks. So the last takes in a short rest.
    """
    end_s, c = _end_s(view), view.columns
    if end_s <= 0:
        return None
    edges = run_figures.bin_edges(end_s, int(np.clip(end_s / max(3 * run_figures.step(c), 1e-9), 8, 200)))
    least_s = max(3 * run_figures.step(c, edges[-2]), edges[1] / 5)
    return np.delete(edges, -2) if end_s - edges[-2] < least_s else edges


def _panels(view: View, edges: Floats) -> list[Panel]:
    telemetry = view.run.watched

    def lines(*wanted: tuple[str, str, str]) -> dict[str, Floats]:
        found = {label: run_figures.level(telemetry, source, name, edges) for source, name, label in wanted}
        return {label: values for label, values in found.items() if np.isfinite(values).any()}

    devices = ((device, "memory_used_bytes", device) for device in telemetry.devices())
    in_flight = run_figures.in_flight(view.columns, edges)
    return [
        Panel("Requests", "", {"in flight": in_flight, **lines(*QUEUE)}),
        Panel("Output tokens", "tok/s", {"": run_figures.tokens_per_s(view.columns, edges)}),
        Panel("Memory", "bytes", {**(lines(SERVER) or lines(SAID)), **lines(CLIENT, *devices)}),
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
    names = ["instrument", "conservation", "agreement"]
    names += [] if is_burst(view) else ["schedule", "window", "stationarity"]
    tables = tuple(group_table(view.summary, name) for name in names)
    error = instrument_error(view.summary.instrument)
    return [*([Note(error)] if error else []), *machines(view), Side(tables)]


COUNTED_BY = {"tokenize": "the server's tokenizer, from the text", "tokenizer": "a tokenizer, from the text"}
"""Counters whose names need an explanation."""


def requests(view: View) -> list[Block]:
    """Every request: as rows in the order of sending, and in a table."""
    c = view.columns
    n = len(c)
    if not n:
        return [Note("The plan has no requests.")]
    finding = "none of which succeeded."
    if c.ok.any():
        share = f"{np.median(view.latency('ttft')[c.ok] / view.latency('e2e')[c.ok]):.0%}"
        finding = f"of which the median one spends {share} of its time in queue and prefill."
    n_sent = int(np.count_nonzero(~np.isnan(c.sent_s)))
    of = f" sent of {n:,} planned" if 0 < n_sent < n else ""
    finding = f"{counted(n_sent or n, 'request')}{of}, {finding}"
    shown = view.shown
    evenly = "" if shown.all else f": {len(shown.even):,} of {n:,}, evenly spaced"
    sent = run_figures.request_rows(c, shown.even, f"Each request{evenly}", finding, ALL_REQUESTS)
    many = counted(n, "request") if shown.all else f"{len(shown.listed):,} of {n:,} requests"
    listing = Folded(f"{many} as a table", (_request_table(view),))
    return [sent or Note("No request was sent and ended."), listing]


def _request_table(view: View) -> Table:
    c = view.columns
    shown = ("ttft", "tpot", "e2e")
    latency = [view.latency(name) for name in shown]
    scales = [scale_for("s", values.tolist()) for values in latency]
    outcomes, reasons = view.words("outcome"), view.words("finish_reason")
    titles = ["Request", "Outcome", "Due (s)", "Sent late (ms)"]
    titles += [f"{title_of(name)} ({scale.unit})" for name, scale in zip(shown, scales, strict=True)]
    titles += ["Prompt (tok)", "Output (tok)", "Finish"]
    rows = []
    for k in view.shown.listed:
        times = (c.due_s[k], (c.sent_s[k] - c.due_s[k]) * 1e3)
        spans = (values[k] / scale.divisor for values, scale in zip(latency, scales, strict=True))
        texts = [f"#{k}", outcomes[k], *map(number, (*times, *spans))]
        texts += [_count(c.prompt_tok[k]), _count(c.output_tok[k]), _words(reasons[k])]
        rows.append(Row(tuple(map(Cell, texts)), id=f"r{k}"))
    words = {0, 1, len(titles) - 1}
    drawn = {name: len(getattr(view.shown, name)) for name in ("listed", "even", "slowest")}
    caption = say("requests.all" if view.shown.all else "requests.some", n=view.shown.n, **drawn)
    return table(caption, titles, rows, text=words, sortable=True, id=ALL_REQUESTS)


def nothing(view: View) -> list[Block]:
    """The cause, how requests ended, the server's last words."""
    blocks = failures(view) if len(view.columns) else []
    if view.log_tail:
        blocks.append(Command("Last lines of the server's log", "\n".join(view.log_tail), aligned=True))
    return blocks


def failures(view: View) -> list[Block]:
    """Every outcome with its count and its first example."""
    outcomes, errors, index = (view.needed.table.column(k).to_pylist() for k in ("outcome", "error", "index"))
    kinds = Counter(outcomes)
    n = len(outcomes)
    rows: list[list[str | Cell]] = []
    for kind in sorted(kinds, key=lambda kind: (kind != "ok", -kinds[kind], kind)):
        first = outcomes.index(kind)
        example = int(index[first])
        rows.append([
            Cell(kind), Cell(outcome_words(kind)), count(kinds[kind]),
            f"{kinds[kind] / n * 100:.1f}%", Cell(f"#{example}", href=view.shown.href(example)),
            Cell(_words(errors[first])[:300], tone="wrap"),
        ])  # fmt: skip
    lost = sum(failed(kinds, interrupted=view.summary.verdict.is_interrupted).values())
    text = f"{lost:,} of {n:,} requests failed." if lost else "No request failed."
    columns = ["Outcome", "Meaning", "Requests", "Share", "First example", "Its error"]
    return [Note(text), table(f"How {counted(n, 'request')} ended", columns, rows, text=(0, 1, 4, 5))]


def served(view: View) -> list[Block]:
    """Asked against served lengths, who counted, finish reasons, what a cache spared the server."""
    c = view.columns
    lengths = [
        _length_row("Prompt", c.planned_prompt_tok, c.prompt_tok, view.words("prompt_source")),
        _length_row("Output", c.planned_output_tok, c.output_tok, view.words("output_source")),
    ]
    reasons = Counter("not provided" if reason is None else reason for reason in view.words("finish_reason"))
    titles = ["Tokens", "Requested", "Served", "As requested", "Counted by"]
    finish = [[str(reason), count(n)] for reason, n in sorted(reasons.items())]
    load, audit = view.manifest.load, view.summary.audit
    return [
        Side((
            table("Tokens of a request", titles, lengths, text=(0, 4)),
            table("Finish reasons", ["Reason", "Requests"], finish),
        )),
        *_prefix_cache(view.summary.prefix_cache),
        *([] if audit is None else [Note(audit_sentence(audit))]),
        *([] if audit is None else [group_table(view.summary, "audit")]),
        *([Note(f"{load.warm_up_sentence} Its requests do not count.")] if load and load.warm_up else []),
    ]  # fmt: skip


def _prefix_cache(cache: PrefixCache | None) -> list[Block]:
    """Prefix-cache hits as expected and as counted; folded where the plan shares nothing."""
    if cache is None or not (known(cache.infinite_tok) or known(cache.served_tok)):
        return [Note("No prompt token is known to have come from a cache.")]
    total_tok, sizes = known(cache.prompt_tok) or 0.0, zip("¼½124", cache.by_size, strict=False)
    lines = [(each.title, each.figure) for each in cache.rows() if each.name != "restarted_s"]
    curve = [(f"Curve: {x} × the engine's cache ({s.blocks:,} blocks)", s.hit_tok) for x, s in sizes]
    flat = len({known(hits) for _, hits in curve}) == 1 < len(curve)
    lines += [("Curve: ¼ to 4 × the engine's cache", curve[0][1])] if flat else curve
    shown = table(
        "Prefix cache",
        ["Prompt tokens", "Tokens", "Share"],
        [
            [title, f"{figure.point:,.0f}", f"{figure.point / total_tok:.1%}" if total_tok else "–"]
            if isinstance(figure, Estimate)
            else [title, Cell("–", detail=figure.reason), "–"]
            for title, figure in lines
        ],
    )
    nothing: list[Block] = [Folded("Prefix cache: the plan shares nothing", (shown,))]
    return nothing if known(cache.infinite_tok) == 0 else [shown]


def _length_row(label: str, asked: Floats, got: Floats, source: Sequence[str | None]) -> list[str]:
    known = ~np.isnan(got)
    by = ", ".join(COUNTED_BY.get(name, name) for name in sorted({name for name in source if name}))
    equal = int((asked[known] == got[known]).sum())
    return [label, _range(asked), _range(got[known]), f"{equal:,} of {len(asked):,}", by or "not counted"]


def again(view: View) -> list[Block]:
    """The commands that repeat the run, the environment, the whole manifest."""
    manifest = view.manifest
    blocks: list[Block] = []
    if manifest.repeat:
        what = "begins the same sessions" if manifest.asked.of_sessions else "sends the same requests"
        how = " at the same times" if manifest.asked.concurrency is None else ", as many at a time"
        more = ", then the rest of those planned" if manifest.ended_s is not None else ""
        blocks.append(Command(f"This {what}{how}{more}", manifest.repeat))
    if manifest.server and manifest.server.argv:
        blocks.append(Command("The server's command line", shlex.join(manifest.server.argv)))
    if manifest.server:
        blocks += map(Note, manifest.server.notes)
    whole = json.dumps(manifest.to_json(), ensure_ascii=False, indent=1)
    shown = Command("Environment, versions, settings, seeds and limits: manifest.json", whole)
    return [*blocks, Folded("The whole manifest", (shown,))]


def glossary(_: View) -> list[Block]:
    return [Note(say("letters")), glossary_table()]


def _range(values: Floats) -> str:
    if not len(values):
        return "–"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _count(value: float) -> str:
    return count(value) if math.isfinite(value) else "–"


def _words(value: object) -> str:
    return value if isinstance(value, str) and value else "–"
