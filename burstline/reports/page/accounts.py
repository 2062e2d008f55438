"""The sections that account for every request and for the run itself."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from burstline.measure.metrics.audit import audit_sentence
from burstline.measure.record.columns import Floats
from burstline.measure.record.record import NO_FAILURES, outcome_words
from burstline.measure.record.summary import PrefixCache
from burstline.measure.stats.estimates import Estimate
from burstline.measure.stats.figure import known
from burstline.reports.blocks import Block, Cell, Column, Command, Folded, Note, Row, Side, Table, table
from burstline.reports.figures import run_figures
from burstline.reports.figures.first_screen import ALL_REQUESTS
from burstline.reports.model.comparison import View
from burstline.reports.model.request_sample import Shown
from burstline.reports.number_format import count, counted, number, scale_for
from burstline.reports.page.estimate_tables import LETTERS, glossary_table, group_table, title_of

COUNTED_BY = {"tokenize": "the server's tokenizer, from the text", "tokenizer": "a tokenizer, from the text"}
"""Counters whose names need an explanation."""


def requests(view: View) -> list[Block]:
    """Every request: as rows in the order of sending, and in a table."""
    c = view.columns
    n = len(c)
    if not n:
        return [Note("The plan has no requests.")]
    numbers = [("counts.planned", counted(n, "request"))]
    finding = f"{numbers[0][1]}, none of which succeeded."
    if c.ok.any():
        share = f"{np.median(view.latency('ttft')[c.ok] / view.latency('e2e')[c.ok]):.0%}"
        finding = f"{numbers[0][1]}: the median request spends {share} of its time in queue and prefill."
        numbers.append(("requests.ttft_share_p50", share))
    shown = view.shown
    evenly = "" if shown.all else f": {len(shown.even):,} of {n:,}, evenly spaced"
    sent = run_figures.request_rows(c, shown.even, "rows", f"Each request{evenly}", finding, ALL_REQUESTS)
    many = counted(n, "request") if shown.all else f"{len(shown.listed):,} of {n:,} requests"
    listing = Folded(f"{many} as a table", (_request_table(view),))
    rows = replace(sent, numbers=tuple(numbers)) if sent else Note("No request was sent and ended.")
    return [rows, listing]


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
            f"{len(shown.even):,} evenly spaced, the {len(shown.slowest):,} slowest, and those this page "
            "links to; `burstline report --to DIR` writes all of them as CSV and Parquet"
        )
    return f"{text}; ∞ marks a request that failed"


def nothing(view: View) -> list[Block]:
    """The cause, how requests ended, the server's last words."""
    blocks = failures(view) if len(view.columns) else []
    if view.log_tail:
        blocks.append(Command("Last lines of the server's log", "\n".join(view.log_tail), aligned=True))
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
            Cell(kind), Cell(outcome_words(kind)), count(kinds[kind]),
            f"{kinds[kind] / n * 100:.1f}%", Cell(f"#{example}", href=view.shown.href(example)),
            Cell(_words(errors[first])[:300], tone="wrap"),
        ])  # fmt: skip
    lost = sum(k for kind, k in kinds.items() if kind not in NO_FAILURES)
    text = f"{lost:,} of {n:,} requests failed." if lost else "Nothing failed."
    columns = ["Outcome", "Meaning", "Requests", "Share", "First example", "Its error"]
    return [Note(text), table(f"How {counted(n, 'planned request')} ended", columns, rows, text=(0, 1, 4, 5))]


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
        *([] if audit is None else [group_table("Audited replies", view.summary, "audit")]),
        *([Note(f"{load.warm_up_sentence} Its requests do not count.")] if load and load.warm_up else []),
    ]  # fmt: skip


def _prefix_cache(cache: PrefixCache | None) -> list[Block]:
    """Prefix-cache hits as expected and as counted; folded where the plan shares nothing."""
    if cache is None or not (known(cache.infinite_tok) or known(cache.served_tok)):
        return [Note("The plan shares no prefix, and no prompt token is known to have come from a cache.")]
    total_tok, n_blocks = known(cache.prompt_tok) or 0.0, {0.25: "¼", 0.5: "½", 1: "1", 2: "2", 4: "4"}
    lines = [(each.title, each.figure) for each in cache.rows() if each.name != "restarted_s"]
    sizes = zip(n_blocks.values(), cache.by_size, strict=False)
    lines += [(f"Curve: {x} × the engine's cache ({s.blocks:,} blocks)", s.hit_tok) for x, s in sizes]
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
    return (
        [shown] if known(cache.infinite_tok) else [Folded("Prefix cache: the plan shares nothing", (shown,))]
    )


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
        blocks.append(Command("This sends the same requests at the same times", manifest.repeat))
    if manifest.server and manifest.server.argv:
        blocks.append(Command("The server's command line", shlex.join(manifest.server.argv)))
    if manifest.server:
        blocks += map(Note, manifest.server.notes)
    whole = json.dumps(manifest.to_json(), ensure_ascii=False, indent=1)
    shown = Command("Environment, versions, settings, seeds and limits: manifest.json", whole)
    return [*blocks, Folded("The whole manifest", (shown,))]


def glossary(_: View) -> list[Block]:
    return [Note(LETTERS), glossary_table()]


def _range(values: Floats) -> str:
    if not len(values):
        return "–"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _count(value: float) -> str:
    return count(value) if math.isfinite(value) else "–"


def _words(value: object) -> str:
    return value if isinstance(value, str) and value else "–"
