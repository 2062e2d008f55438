"""The page of a run: one HTML file with its style, its script, its figures and its numbers inside.

To add a figure, write a function in `reports/figures/` and name it in a section; to add a section, add a line
to SECTIONS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from loadgen.metrics.summary_types import Instrument, Result, Summary
from loadgen.record.rundir import Run
from loadgen.stats.figure import Absent, Estimate
from loadgen.verdict.verdict import State
from reports.answer import answer
from reports.blocks import Answer, Banner, Block
from reports.number_format import duration
from reports.page import accounts, other_tools, roofline_section, sections
from reports.page.slo_lines import target_lines
from reports.run_view import View, view_of
from reports.tables import Column, Row
from servers.engine import Identity
from servers.registry import ENGINES


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


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section with its blocks, as the page shows it, or with their `html`."""

    id: str
    short: str
    question: str
    blocks: Sequence[Block] = ()
    html: str = ""


def _served(view: View) -> bool:
    return view.has_served


def _failed(view: View) -> bool:
    return view.has_served and not bool(view.columns.ok.all())


SECTIONS: tuple[Section, ...] = (
    Section("nothing", "Cause", "Why was nothing served?", accounts.nothing, lambda v: not v.has_served),
    Section("numbers", "Numbers", "How fast is it?", sections.numbers, _served),
    Section(
        "sessions",
        "Sessions",
        "How long do sessions and their turns take?",
        sections.sessions,
        lambda v: v.has_served and v.summary.sessions is not None,
    ),
    Section("shape", "Latency", "How are the latencies distributed?", sections.shape, _served),
    Section("when", "Timeline", "What happened when?", sections.when, _served),
    Section(
        "drain-of-the-burst",
        "Burst",
        "How does the burst drain?",
        sections.burst,
        lambda v: v.has_served and sections.is_burst(v),
    ),
    Section("requests", "Requests", "What became of each request?", accounts.requests),
    Section("failures", "Failures", "What failed?", accounts.failures, _failed),
    Section(
        "hardware",
        "Hardware",
        "How much of the hardware is used?",
        roofline_section.metal,
        lambda v: v.has_served and roofline_section.is_known(v),
    ),
    Section("served", "Lengths", "Were all tokens served?", accounts.served, _served),
    Section("instrument", "Instrument", "How accurate is the measurement?", sections.trust, _served),
    Section("other-tools", "Other tools", "What would other tools print?", other_tools.section, _served),
    Section("again", "Reproduce", "Reproduce this run", accounts.again),
    Section("glossary", "Glossary", "What does each number mean?", accounts.glossary),
)

STATES: dict[str, tuple[str, str, str]] = {
    "VALID": ("good", "✓", "Every check passed: these numbers can be used."),
    "FAILED": (
        "bad",
        "✕",
        "Nothing was served, or too many requests failed: do not use these numbers.",
    ),
    "CLIENT-BOUND": ("bad", "✕", "The client read too late: do not use the metrics graded unreliable."),
    "DISTURBED": ("warn", "!", "Other work on this machine took CPU time from the client or the server."),
    "NOT-STATIONARY": (
        "warn",
        "!",
        "The server did not reach steady state: these numbers depend on the run's length.",
    ),
    "NOT-COMPARABLE": ("warn", "!", "The server did other work than asked: do not compare these numbers."),
    "COLD": ("warn", "!", "The first requests were slower than the rest, and the figures count them."),
}
"""A verdict's tone, its mark and what it means."""
FAILED_BY = {
    "died": "The server died: do not use these numbers.",
    "no-request": "The plan has no requests.",
    "no-success": "Nothing was served.",
    "mostly-failed": "Too many requests failed: do not use these numbers.",
    "too-many-failures": "Too many requests failed: do not use these numbers.",
}
"""What FAILED means, by the code of its first reason."""
INTERRUPTED = "The run was interrupted: these numbers describe its first part, which passed every check."
FAILURES = frozenset({"too-many-failures", "mostly-failed", "no-success"})
"""Reasons that count the failed requests: a warning that does so too says nothing more."""


def one_by_one(jobs: Sequence[Callable[[], str]]) -> list[str]:
    return [job() for job in jobs]


def render(run: Run, each: Callable[[Sequence[Callable[[], str]]], Sequence[str]] = one_by_one) -> str:
    """The whole page as one HTML document; the same run gives the same bytes.

    `each` is how the sections, which are independent, are made.
    """
    from reports.digest import pull_request  # which shows this page's banner
    from reports.formats.markdown import markdown

    view = view_of(run)
    shown = [section for section in SECTIONS if section.applies(view)]
    html = each([partial(_html, section, view) for section in shown])
    return document(
        title(view),
        facts(view),
        answer(view.summary, view.manifest, lambda: view),
        banner(view.summary),
        [
            PageSection(s.id, s.short, s.question, html=Markup(h))  # noqa: S704
            for s, h in zip(shown, html, strict=True)
        ],
        view.summary.to_json(),
        "this run",
        markdown(pull_request(view)),
    )


def _html(section: Section, view: View) -> str:
    macros: Any = templates().get_template("blocks.html.j2").module
    return str(macros.all(section.blocks(view)))


def document(
    title: str,
    facts: Sequence[str],
    answer: Answer,
    verdict: Banner,
    sections: Sequence[PageSection],
    data: object,
    made_from: str,
    markdown: str = "",
) -> str:
    """A page; `data` goes along as JSON, `markdown` is what a button copies for a pull request."""
    template = templates().get_template("page.html.j2")
    return template.render(
        title=title,
        facts=facts,
        answer=answer,
        verdict=verdict,
        sections=sections,
        summary_json=Markup(json_in_html(data)),  # noqa: S704
        made_from=made_from,
        markdown_json=Markup(json_in_html(markdown)) if markdown else "",  # noqa: S704
    )


@cache
def templates() -> Environment:
    """The page's templates, compiled (70 ms); once, for a command may write several pages."""
    environment = Environment(
        loader=PackageLoader("reports.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["cells"] = cells
    for name in environment.list_templates():
        environment.get_template(name)
    return environment


def cells(row: Row, columns: Sequence[Column]) -> Markup:
    """The cells of a table's row. Here, for there are thousands, and a macro takes ten times as long."""
    parts = []
    for k, (cell, column) in enumerate(zip(row.cells, columns, strict=False)):
        tag, scope = ("td", "") if k else ("th", ' scope="row"')
        names = " ".join(filter(None, ("n" if column.numeric else "", escape(cell.tone))))
        text = escape(cell.text)
        parts += [
            f'<{tag}{scope} class="{names}">' if names else f"<{tag}{scope}>",
            f'<a href="{escape(cell.href)}">{text}</a>' if cell.href else text,
            f"<sup>{cell.note}</sup>" if cell.note else "",
            f"<small>{escape(cell.detail)}</small>" if cell.detail else "",
            f"</{tag}>",
        ]
    return Markup("".join(parts))  # noqa: S704 every text above is escaped


def title(view: View) -> str:
    """Engine and workload, in the words of those who know them."""
    manifest = view.manifest
    engine = ENGINES[manifest.engine].title if manifest.engine in ENGINES else manifest.engine
    return f"{engine}: {manifest.title or manifest.workload or view.name}"


def facts(view: View) -> list[str]:
    """Who was measured, with what, when: short phrases, those that are known."""
    return [fact for fact in facts_by_name(view).values() if fact]


def facts_by_name(view: View) -> dict[str, str]:
    """The same, each under its name; "" where it is not known."""
    manifest = view.manifest
    identity = manifest.identity or Identity(manifest.engine)
    devices = [device.name for device in manifest.devices]
    utc = manifest.clock.utc if manifest.clock else ""
    at = datetime.fromisoformat(utc).astimezone(UTC) if utc else None
    many = " + ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices))
    return {
        "engine": f"{identity.engine} {identity.version}" if identity.version else "",
        "model": identity.model or (manifest.server.model if manifest.server else None) or "",
        "dtype": identity.dtype or "",
        "devices": many or manifest.host.cpu or "",
        "date": f"{at:%d %B %Y, %H:%M} UTC" if at else "",
        "status": "" if view.status == "complete" else f"the run was {view.status}",
    }


def banner(summary: Summary) -> Banner:
    """The verdict for the top of the page."""
    verdict = summary.verdict
    tone, mark, sentence = STATES[verdict.state]
    refused = {reason.code for reason in verdict.reasons}
    reasons = (
        *verdict.reasons,
        *(w for w in verdict.warnings if not (w.code == "failures" and refused & FAILURES)),
    )
    state: str = verdict.state
    if verdict.state == State.FAILED:
        sentence = next((FAILED_BY[r.code] for r in verdict.reasons if r.code in FAILED_BY), sentence)
    if verdict.state == State.VALID and any(reason.code == "interrupted" for reason in reasons):
        state, tone, mark, sentence = "INTERRUPTED", "warn", "!", INTERRUPTED
        reasons = tuple(reason for reason in reasons if reason.code != "interrupted")
    elif verdict.state == State.VALID and any(t.result != Result.PASS for t in summary.targets):
        tone, sentence = "warn", f"These numbers can be used. SLOs: {_slo_results(summary)}."
    error = _instrument_error(summary.instrument)
    return Banner(state, tone, mark, sentence, reasons, error, target_lines(summary))


def _slo_results(summary: Summary) -> str:
    """`1 met, 2 missed`."""
    words = {Result.PASS: "met", Result.FAIL: "missed", Result.INCONCLUSIVE: "inconclusive"}
    results = [target.result for target in summary.targets]
    return ", ".join(f"{results.count(r)} {word}" for r, word in words.items() if r in results)


def _instrument_error(instrument: Instrument) -> str:
    """How late the client was, in a sentence; "" where it is not known."""
    late, error = instrument.send_lag_p99_s, instrument.read_error_p99_s
    if isinstance(late, Absent) or isinstance(error, Absent):
        return ""
    sent = f"99% of requests were sent at most {duration(late.point)} late"
    stamped = "99% of arrivals carry the kernel's time stamp, so late reading does not move them"
    read = f"99% of arrival times are exact to {duration(error.point)}" if error.point > 0 else stamped
    told = f"The instrument: {sent}; {read}."
    return f"{told}{_canary(instrument)}{_certified(instrument)}{_network(instrument)}"


def _canary(instrument: Instrument) -> str:
    """The instrument's error in this very run, in a sentence; "" where there was no canary."""
    p50, p99 = instrument.canary_p50_s, instrument.canary_p99_s
    if isinstance(p50, Absent) or isinstance(p99, Absent):
        return ""
    return (
        f" During the run a truth process streamed {p99.n:,} stamped events: they were reported "
        f"{duration(p50.point)} (p50) and {duration(p99.point)} (p99) from the truth."
    )


def _certified(instrument: Instrument) -> str:
    """What a server of known truth found, in a sentence; "" where none was asked."""
    errors = (("TTFT", instrument.certified_ttft_p99_s), ("ITL", instrument.certified_itl_p99_s))
    known = [f"{duration(e.point)} for 99% of {name}s" for name, e in errors if isinstance(e, Estimate)]
    if not known:
        return ""
    made = next((e.note for _, e in errors if isinstance(e, Estimate) and e.note), None)
    when = f" on {made} (a cached certificate of an earlier run)" if made else ""
    return f" Tested at a server of known truth{when}, it was right to within {' and '.join(known)}."


def _network(instrument: Instrument) -> str:
    """What the network holds of every TTFT, in a sentence; "" where the server is on this host."""
    rtt, again = instrument.network_rtt_s, instrument.network_retransmits
    if not isinstance(rtt, Estimate) or not isinstance(again, Estimate):
        return ""
    lost = f"; {again.point:,.0f} TCP segments were sent again" if again.point else ""
    return f" The network's share of each TTFT is {duration(rtt.point)}, one round trip by TCP{lost}."


def json_in_html(value: object) -> str:
    """JSON that cannot end the <script> element it stands in."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
