"""The page of a run: one HTML file with its style, its script, its figures and its numbers inside.

To add a figure, write a function in `figures.py` and name it in a section; to add a section, add a line to
SECTIONS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadgen.rundir import Run
from reports import sections
from reports.blocks import Block
from reports.sections import View, view_of


@dataclass(frozen=True, slots=True)
class Section:
    """One section: where links to it lead, its name in the list of sections, its question, what answers it.

    `applies` says for which runs the section is there at all.
    """

    id: str
    short: str
    question: str
    blocks: Callable[[View], list[Block]]
    applies: Callable[[View], bool] = lambda _: True


SECTIONS: tuple[Section, ...] = (
    Section("numbers", "Numbers", "How fast is it?", sections.numbers),
    Section("shape", "Shape", "What shape do the latencies have?", sections.shape),
    Section("when", "Timeline", "What happened when?", sections.when),
    Section("drain-of-the-burst", "Burst", "How does the burst drain?", sections.burst, sections.is_burst),
    Section("requests", "Requests", "What became of each request?", sections.each),
    Section("failures", "Failures", "What failed?", sections.failures),
    Section("served", "Lengths", "Was it served as asked?", sections.served),
    Section("instrument", "Instrument", "How far can the instrument be trusted?", sections.trust),
    Section("again", "Again", "How is it done again?", sections.again),
    Section("glossary", "Glossary", "What does each number mean?", sections.glossary),
)

STATES: dict[str, tuple[str, str, str]] = {
    "VALID": ("good", "✓", "Every check passed: these numbers can be used."),
    "CLIENT-BOUND": ("bad", "✕", "The client, not the server, set the pace: do not use these latencies."),
    "NOT-STATIONARY": ("warn", "!", "The server never settled: these numbers depend on how long the run was."),
    "NOT-COMPARABLE": ("warn", "!", "The work served is not the work asked: do not compare these numbers."),
    "INSUFFICIENT": ("warn", "!", "There is too little data for some of the numbers."),
}
"""A verdict's tone, its mark and what it means."""


@dataclass(frozen=True, slots=True)
class Banner:
    """The verdict as the banner shows it; `reasons` are the summary's own {"text", "advice"}."""

    state: str
    tone: str
    mark: str
    sentence: str
    reasons: tuple[Mapping[str, Any], ...]


def render(run: Run) -> str:
    """The whole page as one HTML document; the same run gives the same bytes."""
    view = view_of(run)
    shown = [
        {"id": s.id, "short": s.short, "question": s.question, "blocks": s.blocks(view)}
        for s in SECTIONS
        if s.applies(view)
    ]
    return _environment().get_template("page.html.j2").render(
        title=f"{view.manifest.get('engine', 'engine unknown')} · {view.manifest.get('workload', view.name)}",
        facts=facts(view, run.status),
        verdict=banner(view.summary),
        sections=shown,
        summary_json=Markup(json_in_html(view.summary)),  # noqa: S704
    )


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def facts(view: View, status: str) -> list[str]:
    """Who was measured, with what, when: short phrases, those that are known."""
    manifest = view.manifest
    identity = manifest.get("identity") or {}
    utc = str((manifest.get("clock") or {}).get("utc", ""))
    date = datetime.fromisoformat(utc).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if utc else ""
    version = identity.get("version")
    records = view.records
    parts = [
        f"{identity.get('engine', manifest.get('engine', ''))} {version}" if version else "",
        str(identity.get("model") or manifest.get("model") or ""),
        str(identity.get("dtype") or ""),
        f"{len(records):,} requests",
        date,
        "" if status == "complete" else f"the run is {status}",
    ]
    return [part for part in parts if part]


def banner(summary: Mapping[str, Any]) -> Banner:
    """The verdict for the top of the page; a state that is not in STATES is shown as it stands."""
    verdict = summary.get("verdict")
    if not verdict:
        return Banner("NO SUMMARY", "bad", "✕", "The run left no summary: it ended before its numbers were made.", ())
    state = str(verdict["state"])
    tone, mark, sentence = STATES.get(state, ("warn", "!", "See the reasons."))
    return Banner(state, tone, mark, sentence, tuple(verdict.get("reasons", ())))


def json_in_html(value: object) -> str:
    """JSON that cannot end the <script> element it stands in."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
