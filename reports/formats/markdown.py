"""A run in Markdown, short enough for a pull request: verdict, targets, numbers, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadgen.record.rundir import Run
from reports.estimate_tables import HEADLINE, QUANTILES, title_of
from reports.number_format import interval, point, scale_for
from reports.page.page import banner, facts, title
from reports.page.slo_lines import MARKS, target_lines, with_interval
from reports.run_view import View, view_of

TOTALS = (
    ("throughput", "output_tok_per_s"),
    ("throughput", "requests_per_s"),
    ("burst", "drain_s"),
    ("memory", "server_peak_bytes"),
    ("memory", "device_peak_bytes"),
)


def markdown(run: Run) -> str:
    """The summary for a pull request; ends with a line break."""
    view = view_of(run)
    return "\n\n".join(part for part in _parts(view) if part) + "\n"


def _parts(view: View) -> Iterator[str]:
    summary = view.summary
    said = banner(summary)
    yield f"### {_plain(title(view))}"
    yield f"**{said.mark} {said.state}** – {_plain(said.sentence)}"
    yield " · ".join(map(_plain, facts(view)))
    yield "\n".join(f"- {_plain(r['text'])} {_plain(r.get('advice', ''))}".rstrip() for r in said.reasons)
    yield _targets(summary)
    yield _latencies(summary)
    yield _totals(summary)
    yield _counts(summary)
    if repeat := view.manifest.repeat:
        yield f"<details><summary>Do it again</summary>\n\n```sh\n{repeat}\n```\n\n</details>"


def _targets(summary: Mapping[str, Any]) -> str:
    lines = target_lines(summary)
    rows = [(f"{t.mark} {t.result}", f"`{t.text}`", t.measured, t.reason) for t in lines if t.result in MARKS]
    said = [f"Goodput: {t.text} {t.measured}." for t in lines if t.result not in MARKS]
    listing = _table(("Target", "Asked", "Measured", "Why"), rows) if rows else ""
    return "\n\n".join(part for part in (listing, *map(_plain, said)) if part)


def _latencies(summary: Mapping[str, Any]) -> str:
    metrics = {key: row for key, row in summary.get("metrics", {}).items() if key in HEADLINE}
    shown = [p for p in QUANTILES if any(row.get(p, {}).get("point") is not None for row in metrics.values())]
    if not shown:
        return ""
    rows = []
    for key, row in metrics.items():
        known = [row[p]["point"] for p in shown if p in row and row[p]["point"] is not None]
        scale = scale_for("s", known)
        cells = [f"{point(row[p], scale)} {interval(row[p], scale)}".strip() for p in shown if p in row]
        rows.append([title_of(key), *cells, scale.unit])
    return _table(("Latency", *shown, "unit"), rows, numeric=range(1, len(shown) + 1))


def _totals(summary: Mapping[str, Any]) -> str:
    found = [(key, summary.get(group, {}).get(key)) for group, key in TOTALS]
    rows = [(title_of(key), with_interval(row)) for key, row in found if row and row["point"] is not None]
    return _table(("Whole run", "Measured"), rows, numeric=(1,)) if rows else ""


def _counts(summary: Mapping[str, Any]) -> str:
    counts = summary["counts"]
    failed = ", ".join(f"{n:,} {name}" for name, n in counts.items() if name not in ("planned", "ok") and n)
    return f"{counts['ok']:,} of {counts['planned']:,} requests served as asked" + (
        f"; {failed}." if failed else "."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    rule = ["--:" if k in numeric else ":--" for k in range(len(head))]
    return "\n".join(f"| {' | '.join(map(_plain, row))} |" for row in (head, rule, *rows))


def _plain(text: object) -> str:
    """Text that cannot end a table's cell or a line."""
    return " ".join(str(text).replace("|", "\\|").split())
