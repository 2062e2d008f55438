"""The sections that account for every request and for the run itself."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from burstline.loadgen.record.columns import Floats
from burstline.loadgen.record.record import NO_FAILURES
from burstline.reports.blocks import Block, Cell, Column, Command, Folded, Note, Row, Side, Table, table
from burstline.reports.figures import run_figures
from burstline.reports.model.comparison import View
from burstline.reports.model.request_sample import Shown
from burstline.reports.number_format import count, counted, number, scale_for
from burstline.reports.page.estimate_tables import LETTERS, glossary_table, title_of
from burstline.servers.launch import StartStage

MEANING = {
    "ok": "all that was asked",
    "short": "stopped by itself although told not to",
    "clamped": "the server cut the prompt or the output",
    "long": "more tokens than asked",
    "empty": "no token at all",
    "error_event": "an error inside the reply",
    "refused": "refused: the server is overloaded",
    "timeout": "not done by its deadline",
    "connect": "no connection",
    "reset": "the connection broke",
    "truncated": "the reply stops before its end",
    "aborted": "the server gave up",
    "cancelled": "Burstline gave up",
    "not_sent": "never left the client",
    "predecessor": "never sent: a turn that it follows had failed",
    "abandoned": "its client hung up, as planned",
}
"""What each outcome means to a reader; `http_<code>` needs no explanation."""
COUNTED_BY = {"tokenize": "the server's tokenizer, from the text", "tokenizer": "a tokenizer, from the text"}
"""Counters whose name says too little to a reader."""
ALL_REQUESTS = "all-requests"
LONGEST_TEXT = 2000


def requests(view: View) -> list[Block]:
    """Every request: as rows in the order of sending, slowest first on demand, and in a table."""
    c = view.columns
    n = len(c)
    if not n:
        return [Note("The plan has no requests.")]
    finding = f"{counted(n, 'request')}, none of which succeeded."
    if c.ok.any():
        share = float(np.median(view.latency("ttft")[c.ok] / view.latency("e2e")[c.ok]))
        told = f"the median one spends {share * 100:.0f}% of its time in queue and prefill"
        finding = f"{counted(n, 'request')}; {told}."
    shown = view.shown
    evenly = "" if shown.all else f": {len(shown.even):,} of {n:,}, evenly spaced"
    sent = run_figures.request_rows(
        c, shown.even, "rows", f"In the order of sending{evenly}", finding, ALL_REQUESTS
    )
    most = "Slowest first" if shown.all else f"The {len(shown.slowest):,} slowest of {n:,}"
    slow = run_figures.request_rows(c, shown.slowest, "rows-slow", most, finding, ALL_REQUESTS)
    many = counted(n, "request") if shown.all else f"{len(shown.listed):,} of {n:,} requests"
    listing = Folded(f"{many} as a table", (_request_table(view),))
    if sent is None or slow is None:
        return [Note("No request was sent and ended."), listing]
    slow_title = "The same, slowest first" if shown.all else most
    return [sent, Folded(slow_title, (slow,)), listing]


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
        texts = [f"#{k}", outcomes[k], *map(_number, times), *map(_number, spans)]
        texts += [_count(c.prompt_tok[k]), _count(c.output_tok[k]), _words(reasons[k])]
        rows.append(Row(tuple(map(Cell, texts)), id=f"r{k}"))
    words = {0, 1, len(titles) - 1}
    return Table(
        _listed(view.shown),
        tuple(Column(title, k not in words) for k, title in enumerate(titles)),
        tuple(rows),
        sortable=True,
        id=ALL_REQUESTS,
    )


def _listed(shown: Shown) -> str:
    """The caption of the table of requests: which are in it, and where the others are."""
    text = "Every planned request in the order of sending"
    if not shown.all:
        text = (
            f"{len(shown.listed):,} of {shown.n:,} planned requests in the order of sending: "
            f"{len(shown.even):,} evenly spaced, the {len(shown.slowest):,} slowest and those named elsewhere"
            " on this page; `burstline report --to DIR` writes all of them as CSV and Parquet"
        )
    return f"{text}; ∞ stands for one that was not served"


def nothing(view: View) -> list[Block]:
    """The cause, how requests ended, the server's last words."""
    blocks = failures(view) if len(view.columns) else []
    if view.log_tail:
        blocks.append(Command("The last lines of the server's log", "\n".join(view.log_tail), aligned=True))
    return blocks


def failures(view: View) -> list[Block]:
    """Every outcome with its count and its first example."""
    outcomes, errors = [str(outcome) for outcome in view.words("outcome")], view.words("error")
    kinds, index = Counter(outcomes), view.columns.table.column("index").to_pylist()
    n = len(outcomes)
    rows: list[list[str | Cell]] = []
    for kind in sorted(kinds, key=lambda kind: (kind != "ok", -kinds[kind], kind)):
        first = outcomes.index(kind)
        example = int(index[first])
        rows.append([
            Cell(kind), Cell(MEANING.get(kind, "the server refused it")), count(kinds[kind]),
            f"{kinds[kind] / n * 100:.1f}%", Cell(f"#{example}", href=view.shown.href(example)),
            Cell(_words(errors[first])[:300], tone="wrap"),
        ])  # fmt: skip
    lost = sum(k for kind, k in kinds.items() if kind not in NO_FAILURES)
    text = f"{lost:,} of {n:,} requests were not served as asked." if lost else "Nothing failed."
    columns = ["Outcome", "Meaning", "Requests", "Share", "First example", "Its words"]
    return [
        Note(text),
        table(f"How {counted(n, 'planned request')} ended", columns, rows, text=(0, 1, 4, 5)),
    ]


def served(view: View) -> list[Block]:
    """Asked against served lengths, who counted, finish reasons, what a cache spared the server."""
    c = view.columns
    lengths = [
        _length_row("Prompt", c.planned_prompt_tok, c.prompt_tok, view.words("prompt_source")),
        _length_row("Output", c.planned_output_tok, c.output_tok, view.words("output_source")),
    ]
    reasons = Counter("not provided" if reason is None else reason for reason in view.words("finish_reason"))
    titles = ["Tokens", "Asked", "Served", "As asked", "Counted by"]
    finish = [[str(reason), count(n)] for reason, n in sorted(reasons.items())]
    cached = c.cached_tok[~np.isnan(c.cached_tok)]
    told = "The engine does not say how many prompt tokens came from a cache."
    if len(cached):
        told = f"{int(cached.sum()):,} prompt tokens came from a cache, says the engine."
    load = view.manifest.load
    warm_up = None if load is None else load.warm_up
    return [
        Side((
            table("Tokens of a request", titles, lengths, text=(0, 4)),
            table("Finish reasons", ["Reason", "Requests"], finish),
        )),
        Note(told),
        *([] if warm_up is None else [Note(f"{warm_up.sentence} Its requests do not count.")]),
    ]  # fmt: skip


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
        blocks.append(Command("The same requests at the same times, byte for byte", manifest.repeat))
    if manifest.server and manifest.server.argv:
        blocks.append(Command("The server's whole command line", shlex.join(manifest.server.argv)))
    blocks += _engine_facts(view)
    blocks.append(
        Command(
            "These numbers in a terminal, and this page again",
            f"burstline report {view.name} --format text\nburstline report {view.name}",
        )
    )
    facts = [(Cell(key, tone="code"), Cell(value, tone="wrap")) for key, value in _flat(manifest.to_json())]
    listing = table(
        "Environment, versions, seeds and limits: the manifest of the run",
        ["Fact", "Value"],
        facts,
        text=(0, 1),
    )
    return [*blocks, Folded("The whole manifest", (listing,))]


def _engine_facts(view: View) -> list[Block]:
    """The engine's settings as asked and as used, its start by stages, and the notes on it."""
    server = view.manifest.server
    if server is None:
        return []
    blocks: list[Block] = [Note(note) for note in server.notes]
    rows: list[list[str | Cell]] = [
        [row.name.replace("_", " "), row.asked or "–", Cell(row.sent or "–", tone="code"), row.actual or "–"]
        for row in server.settings
    ]
    if rows:
        titles = ["Setting", "Asked", "Sent", "Used, says the engine"]
        blocks.append(table("Settings of the engine", titles, rows, text=(0, 1, 2, 3)))
    if not server.attached and server.ready_s is not None:
        stages = (StartStage("process start", 0.0), *server.startup_stages)
        ends_s = (*(stage.begin_s for stage in stages[1:]), server.ready_s)
        shown = [
            [stage.name, f"{stage.begin_s:.1f}", f"{end_s - stage.begin_s:.1f}"]
            for stage, end_s in zip(stages, ends_s, strict=True)
        ]
        caption = f"Start-up: {server.ready_s:.1f} s until the first token"
        blocks.append(table(caption, ["Stage", "Began, s", "Took, s"], shown))
    return blocks


def glossary(_: View) -> list[Block]:
    """Every metric's definition."""
    return [Note(LETTERS), glossary_table()]


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The manifest's facts as dotted names and short texts, in its own order."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            cut = f"{text[:LONGEST_TEXT]}… ({len(text):,} characters)" if len(text) > LONGEST_TEXT else text
            yield f"{prefix}{key}", cut


def _range(values: Floats) -> str:
    if not len(values):
        return "–"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else number(value)


def _count(value: float) -> str:
    return count(value) if math.isfinite(value) else "–"


def _words(value: object) -> str:
    return value if isinstance(value, str) and value else "–"
