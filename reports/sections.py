"""The sections of a run's page: each function takes the view of a run and returns the blocks that answer one question."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from loadgen.rundir import Run
from reports import figures, series
from reports.blocks import Block, Command, Folded, Note, Side, Tile, Tiles
from reports.estimates import QUANTILES, glossary_table, group_table, headline_table, nearest, title_of
from reports.figures import Line, Panel
from reports.numbers import count, interval, number, point, scale_for
from reports.tables import Cell, Column, Row, Table, table

MEANING = {
    "ok": "all that was asked",
    "short": "stopped by itself although told not to",
    "clamped": "the server cut the prompt or the output",
    "long": "more tokens than asked",
    "empty": "no token at all",
    "error_event": "an error inside the reply",
    "timeout": "not done by its deadline",
    "connect": "no connection",
    "reset": "the connection broke",
    "truncated": "the reply stops before its end",
    "aborted": "the server gave up",
    "cancelled": "Burstline gave up",
    "not_sent": "never left the client",
}


@dataclass(frozen=True, slots=True)
class View:
    """A run made ready to be shown: `summary` is {} where none was written, `telemetry` may have no rows."""

    name: str
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: pd.DataFrame
    telemetry: pd.DataFrame
    rows: series.Requests


def view_of(run: Run) -> View:
    telemetry = run.telemetry
    if telemetry is None:
        telemetry = pd.DataFrame({"at_ns": [], "source": [], "name": [], "value": []})
    return View(run.name, run.manifest, run.summary or {}, run.records, telemetry, series.requests(run.records))


def numbers(view: View) -> list[Block]:
    """Headline numbers: tiles, latency, throughput, outcomes, and what stands behind each."""
    summary = view.summary
    if not summary:
        return [Note("No summary was written for this run; `burstline report` makes it from the run's files.")]
    return [
        Tiles(tuple(_tiles(view))),
        headline_table(summary.get("metrics", {})),
        group_table("Throughput", summary.get("throughput", {})),
        group_table("Memory, each kind apart", summary.get("memory", {})),
        Folded("Evidence: where each of these numbers comes from", (_evidence(view),)),
    ]


def _tiles(view: View) -> Iterator[Tile]:
    metrics, throughput = view.summary.get("metrics", {}), view.summary.get("throughput", {})
    for key, p in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50")):
        estimate = metrics.get(key, {}).get(p)
        if estimate is not None:
            yield _tile(f"{title_of(key)} {p}", estimate)
    for key in ("output_tok_per_s", "request_per_s"):
        if key in throughput:
            yield _tile(title_of(key), throughput[key])
    n, n_ok = len(view.rows.index), int(view.rows.succeeded.sum())
    lost = f"{n - n_ok:,} failed" if n_ok < n else "none failed"
    yield Tile("Requests served", count(n_ok), f"of {n:,}", lost)


def _tile(label: str, estimate: Mapping[str, Any]) -> Tile:
    if estimate["point"] is None:
        return Tile(label, "–", "", str(estimate.get("absent", "")))
    scale = scale_for(estimate["unit"], [estimate["point"]])
    return Tile(label, point(estimate, scale), scale.unit, interval(estimate, scale))


def _evidence(view: View) -> Table:
    latencies = {"ttft": view.rows.ttft, "tpot": view.rows.tpot, "e2e": view.rows.e2e}
    rows = []
    for key, quantiles in view.summary.get("metrics", {}).items():
        for p, estimate in quantiles.items():
            around = nearest(latencies[key], QUANTILES[p]) if key in latencies and p in QUANTILES else []
            links = [Cell(f"#{view.rows.index[k]}", href=f"#r{view.rows.index[k]}") for k in around]
            level = f"{estimate['level']:.0%}" if estimate.get("level") else "–"
            rows.append(
                Row(
                    (
                        Cell(f"{title_of(key)} {p}", href=f"#def-{key}"),
                        Cell(f"{estimate['n']:,}" if "n" in estimate else "–"),
                        Cell(level, detail=estimate.get("note") or estimate.get("absent") or ""),
                        *(links + [Cell("–")] * 2)[:2],
                        Cell(f"jq .metrics.{key}.{p} {view.name}/summary.json", tone="code"),
                    ),
                    id=f"ev-{key}-{p}",
                )
            )
    columns = ("Number", "n", "Interval", "Request at it", "The next", "The line that prints it")
    return Table(
        "Number, how many observations, interval, the requests beside it, the command",
        tuple(Column(c, k == 1) for k, c in enumerate(columns)),
        tuple(rows),
    )


def trust(view: View) -> list[Block]:
    """The instrument's own error."""
    instrument = view.summary.get("instrument")
    if not instrument:
        return [Note("The run has no figures on its own instrument.")]
    return [group_table("The instrument's own error on this run", instrument)]


def shape(view: View) -> list[Block]:
    """The distributions of TTFT, TPOT and E2E."""
    drawn = (
        figures.ecdf("Time to first token", "TTFT", view.rows.ttft, "ecdf-ttft"),
        figures.ecdf("Time per output token", "TPOT", view.rows.tpot, "ecdf-tpot"),
        figures.ecdf("End to end", "E2E", view.rows.e2e, "ecdf-e2e"),
    )
    plots = tuple(plot for plot in drawn if plot is not None)
    return [Side(plots, figures.ECDF_EXPLAINED)] if plots else [Note("No request succeeded: there is no distribution.")]


def when(view: View) -> list[Block]:
    """The shared time axis."""
    rows, telemetry = view.rows, view.telemetry
    end_s = max((float(x) for x in (*rows.last, *rows.closed) if math.isfinite(x)), default=0.0)
    if end_s <= 0:
        return [Note("Nothing was sent: there is no time axis to draw.")]
    width = series.bin_width_s(end_s)
    edges = np.arange(0, math.ceil(end_s / width - 1e-9) + 1) * width

    def lines(*wanted: tuple[str, str, str]) -> list[Line]:
        found = [Line(label, series.level(telemetry, source, name, edges)) for source, name, label in wanted]
        return [line for line in found if np.isfinite(line.values).any()]

    devices = sorted({s for s in telemetry["source"].unique() if s.startswith("gpu")})
    sent = Line("in flight at the client", series.in_flight(rows, edges))
    panels = [
        Panel("Requests", "", (sent, *lines(*QUEUE))),
        Panel("Output tokens per second", "tok/s", (Line("output", series.tokens_per_s(view.records, edges)),)),
        Panel("Memory", "bytes", tuple(lines(*MEMORY, *((d, "memory_used_bytes", d) for d in devices))[:4])),
        Panel("KV cache in use", "fraction", tuple(lines(("engine", "kv_used_fraction", "KV cache")))),
    ]
    missing = [panel.title for panel in panels if not panel.lines]
    shown = [panel for panel in panels if panel.lines]
    last_first = rows.first[np.isfinite(rows.first)]
    marks = [(float(last_first.max()), "last first token")] if len(last_first) > 1 else []
    peak = float(np.nanmax(shown[1].lines[0].values))
    finding = (
        f"At most {sent.values.max():,.0f} requests in flight; output peaks at {number(peak)} tok/s; "
        f"the last reply ends {number(end_s)} s after the start."
    )
    blocks: list[Block] = [figures.timeline(edges, shown, marks, finding)]
    if missing:
        blocks.append(Note(f"Not provided by the engine or not watched on this run: {', '.join(missing)}."))
    return blocks


QUEUE = (("engine", "running", "running (engine)"), ("engine", "waiting", "waiting (engine)"))
MEMORY = (("server", "rss_bytes", "server processes"), ("client", "rss_bytes", "client"))
"""Telemetry on the time axis: source, name, label."""


def burst(view: View) -> list[Block]:
    """How the burst drains."""
    group = view.summary.get("burst", {})
    slope = group.get("ttft_slope_s_per_request", {}).get("point")
    plot = figures.drain(view.rows, slope, _drain_finding(view, slope))
    blocks: list[Block] = [plot] if plot else [Note("No request has a first token: there is nothing to drain.")]
    return [*blocks, group_table("The burst in numbers", group)] if group else blocks


def _drain_finding(view: View, slope_s: float | None) -> str:
    ttft = view.rows.ttft[np.isfinite(view.rows.ttft)]
    if not len(ttft):
        return ""
    ends = f"The first request waits {_seconds(float(ttft.min()))} for its first token, the last {_seconds(float(ttft.max()))}"
    if slope_s is None or slope_s <= 0:
        return f"{ends}."
    return f"{ends}: each place in the queue costs {_seconds(slope_s)}, which is {number(1 / slope_s)} requests per second."


TABLE = "all-requests"


def each(view: View) -> list[Block]:
    """Every request: as rows in the order of sending, slowest first on demand, and in a table."""
    rows = view.rows
    n = len(rows.index)
    if not n:
        return [Note("The plan has no requests.")]
    by_place = np.arange(n)
    by_e2e = np.lexsort((rows.index, -np.nan_to_num(rows.e2e, posinf=np.inf, nan=-1)))
    waits = rows.first - rows.due
    part = np.nanmedian((waits / (rows.last - rows.due))[rows.succeeded]) if rows.succeeded.any() else math.nan
    finding = f"{n:,} requests; of a median request's time {part:.0%} is wait and prefill." if part == part else f"{n:,} requests, none succeeded."
    sent = figures.request_rows(rows, by_place, "rows", "In the order of sending", finding, TABLE)
    slow = figures.request_rows(rows, by_e2e, "rows-slow", "Slowest first", finding, TABLE)
    listing = Folded(f"All {n:,} requests as a table", (_request_table(view),))
    if sent is None or slow is None:
        return [Note("No request got any reply."), listing]
    return [sent, Folded("The same, slowest first", (slow,)), listing]


def _request_table(view: View) -> Table:
    rows, records = view.rows, view.records.set_index("index")
    ttft, e2e = (scale_for("s", [_greatest(v)]) for v in (rows.ttft, rows.e2e))
    tpot = scale_for("s", [_greatest(rows.tpot)])
    columns = ["Request", "Outcome", "Due (s)", f"Sent late (ms)", f"TTFT ({ttft.unit})", f"TPOT ({tpot.unit})",
               f"E2E ({e2e.unit})", "Prompt (tok)", "Output (tok)", "Finish"]  # fmt: skip
    body = []
    for k, index in enumerate(rows.index):
        record = records.loc[index]
        late_ms = (rows.sent[k] - rows.due[k]) * 1e3
        cells = (
            f"#{index}", str(record["outcome"]), _number(rows.due[k]), _number(late_ms),
            _number(rows.ttft[k] / ttft.divisor), _number(rows.tpot[k] / tpot.divisor),
            _number(rows.e2e[k] / e2e.divisor), _count(record["prompt_tok"]), _count(record["output_tok"]),
            _words(record["finish_reason"]),
        )  # fmt: skip
        body.append(Row(tuple(Cell(cell) for cell in cells), id=f"r{index}"))
    text = {0, 1, 9}
    return Table(
        "Every planned request in the order of sending", tuple(Column(c, i not in text) for i, c in enumerate(columns)),
        tuple(body), sortable=True, id=TABLE,
    )  # fmt: skip


def failures(view: View) -> list[Block]:
    """Every outcome with its count and its first example."""
    records = view.records
    kinds = records["outcome"].value_counts()
    order = sorted(kinds.index, key=lambda kind: (kind != "ok", -kinds[kind], kind))
    rows = []
    for kind in order:
        first = records[records["outcome"] == kind].sort_values("index").iloc[0]
        meaning = MEANING.get(kind, "the server refused it" if kind.startswith("http_") else "")
        rows.append(
            [
                Cell(kind), Cell(meaning), count(int(kinds[kind])), f"{kinds[kind] / len(records):.1%}",
                Cell(f"#{first['index']}", href=f"#r{first['index']}"), Cell(_words(first["error"])[:300], tone="wrap"),
            ]
        )  # fmt: skip
    columns = ["Outcome", "Meaning", "Requests", "Share", "First example", "Its words"]
    lost = len(records) - int(kinds.get("ok", 0))
    verdict = f"{lost:,} of {len(records):,} requests were not served as asked." if lost else "Nothing failed."
    return [Note(verdict), table(f"How {len(records):,} planned requests ended", columns, rows, text=(0, 1, 4, 5))]


def served(view: View) -> list[Block]:
    """Asked against served lengths, who counted, finish reasons."""
    records = view.records
    rows = []
    for label, asked, got, source in (
        ("Prompt", "planned_prompt_tok", "prompt_tok", "prompt_source"),
        ("Output", "planned_output_tok", "output_tok", "output_source"),
    ):
        known = records[records[got].notna()]
        equal = int((known[asked] == known[got]).sum())
        by = ", ".join(sorted(known[source].dropna().unique())) or "nobody"
        rows.append([label, _range(records[asked]), _range(known[got]), f"{equal:,} of {len(records):,}", by])
    lengths = table(
        "Tokens asked and served per request", ["Tokens", "Asked", "Served", "Exactly as asked", "Counted by"],
        rows, text=(0, 4),
    )  # fmt: skip
    reasons = records["finish_reason"].fillna("not provided").value_counts()
    finish = table(
        "Finish reasons", ["Reason", "Requests"], [[str(r), count(int(n))] for r, n in sorted(reasons.items())]
    )
    cached = records["cached_tok"].dropna()
    told = f"{int(cached.sum()):,} prompt tokens came from a cache" if len(cached) else "The engine does not say how many prompt tokens came from a cache"
    return [lengths, finish, Note(f"{told}.")]


def is_burst(view: View) -> bool:
    """Whether all requests were due at once."""
    return bool(view.records["due_ns"].nunique() == 1 and len(view.records) > 1)


def glossary(_: View) -> list[Block]:
    """Every metric's definition."""
    return [glossary_table()]


def again(view: View) -> list[Block]:
    """The commands, the environment, every number's definition."""
    manifest = view.manifest
    blocks: list[Block] = []
    argv = manifest.get("argv")
    if argv:
        salt = manifest.get("salt")
        repeated = [*argv, "--salt", salt] if salt and "--salt" not in argv else argv
        blocks.append(Command("The same requests, byte for byte", shlex.join(map(str, repeated))))
    server = manifest.get("server", {})
    if isinstance(server, Mapping) and server.get("argv"):
        blocks.append(Command("The server's whole command line", shlex.join(map(str, server["argv"]))))
    blocks.append(Command("The numbers again, from the run's folder", f"burstline show {view.name}\njq .metrics {view.name}/summary.json"))
    rows = [(Cell(key, tone="code"), Cell(value, tone="wrap")) for key, value in _flat(manifest)]
    blocks.append(Folded("Everything the manifest says", (table("The manifest of the run", ["Fact", "Value"], rows, text=(0, 1)),)))
    return blocks


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The manifest's facts as dotted names and short texts, in its own order."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{key}", text if len(text) <= 2000 else f"{text[:2000]}… ({len(text):,} characters)"


def _seconds(value: float) -> str:
    scale = scale_for("s", [value])
    return f"{number(value / scale.divisor)} {scale.unit}"


def _range(values: pd.Series) -> str:
    if not len(values):
        return "–"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _number(value: float) -> str:
    return number(value) if math.isfinite(value) else "–"


def _words(value: object) -> str:
    return value if isinstance(value, str) and value else "–"


def _count(value: float | None) -> str:
    return "–" if value is None or value != value else count(value)


def _greatest(values: series.Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else 0.0
