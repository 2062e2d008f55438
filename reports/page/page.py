"""The page of a run: one HTML file with its style, its script, its figures and its numbers inside.

To add a figure, write a function in `reports/figures/` and name it in a section; to add a section, add a line
to SECTIONS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from loadgen.record.rundir import Run
from reports.answer import answer
from reports.banner import banner, facts, title
from reports.blocks import Answer, Banner, Block
from reports.digest import pull_request
from reports.formats.markdown import markdown
from reports.page import accounts, roofline_section, sections
from reports.run_view import View, view_of
from reports.tables import Column, Row


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
    Section("again", "Reproduce", "Reproduce this run", accounts.again),
    Section("glossary", "Glossary", "What does each number mean?", accounts.glossary),
)


def one_by_one(jobs: Sequence[Callable[[], str]]) -> list[str]:
    return [job() for job in jobs]


def render(run: Run, each: Callable[[Sequence[Callable[[], str]]], Sequence[str]] = one_by_one) -> str:
    """The whole page as one HTML document; the same run gives the same bytes.

    `each` is how the sections, which are independent, are made.
    """
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


def json_in_html(value: object) -> str:
    """JSON that cannot end the <script> element it stands in."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
