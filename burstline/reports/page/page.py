"""The page of 1 to n contenders: one HTML file with its style, script, figures and numbers inside.

To add a figure, write a function in `reports/figures/` and name it in a section; to add a section, add a line
to SECTIONS.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from burstline.reports.blocks import Answer, Banner, Block, Column, Folded, Note, Plot, Row, Table, Tile
from burstline.reports.formats.text import markdown
from burstline.reports.model.comparison import Case, Comparison, View
from burstline.reports.model.sweeps import Sweep, sweeps_in
from burstline.reports.page import compared, first_screen, roofline_section, sections
from burstline.reports.page.answer import answer
from burstline.reports.page.digest import banner, comparison_json, digest
from burstline.reports.page.estimate_tables import session_tables
from burstline.reports.page.side_by_side import beside_others
from burstline.reports.sentences import say


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section: where links to it lead, its name in the list of sections, its question, and its blocks.

    One that is `folded` is evidence.
    """

    id: str
    short: str
    question: str
    blocks: Sequence[Block]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """A page from its top: the verdict, the answers as `tiles` with pictures under them, the sections.

    Where there are no tiles, the one `answer` stands above the verdict. `summary` and the `digest` stand in
    the page for machines and to copy.
    """

    title: str
    facts: Sequence[str]
    verdict: Banner
    sections: Sequence[PageSection]
    summary: object
    digest: Sequence[Block]
    answer: Answer | None = None
    tiles: Sequence[Tile] = ()
    pictures: Sequence[Plot] = ()

    def html(self) -> str:
        """One document; the same page gives the same bytes."""
        template = templates().get_template("page.html.j2")
        summary, copied = _json_in_html(self.summary), _json_in_html(markdown(self.digest))
        return template.render(page=self, summary_json=summary, markdown_json=copied)


def beside(plots: Sequence[Plot]) -> list[Plot]:
    """The first as it is, the others narrow: beside it there is no room for more."""
    return [*plots[:1], *(replace(plot, drawings=plot.drawings[1:]) for plot in plots[1:])]


def evidence(tables: Sequence[Table]) -> list[PageSection]:
    """Each table as a folded section under its caption."""
    return [PageSection(f"part{k}", "", each.caption, [each], folded=True) for k, each in enumerate(tables)]


FEWEST: Final = 11
"""Fewer requests have no distribution: each is a dot of the first screen."""
WITHOUT_SUCCESS: Final = ("nothing", "requests", "again", "glossary")
"""The sections of a run of which no request succeeded."""
Blocks = Callable[[View], list[Block]]
SECTIONS: Final[tuple[tuple[str, str, str, Blocks, Callable[[View], object]], ...]] = (
    ("nothing", "Cause", "Why did no request succeed?", sections.nothing, lambda v: not v.has_served),
    ("numbers", "Numbers", "How fast is it?", sections.numbers, bool),
    ("sessions", "Sessions", "How long do sessions and their turns take?", session_tables,
        lambda v: v.summary.sessions),
    ("shape", "Latency", "How are the latencies distributed?", sections.shape,
        lambda v: v.counted.ok.sum() >= FEWEST),
    ("when", "Timeline", "What happened when?", sections.when, bool),
    ("requests", "Requests", "What happened to each request?", sections.requests, bool),
    ("failures", "Failures", "What failed?", sections.failures, lambda v: not v.needed.ok.all()),
    ("hardware", "Hardware", "How much of the hardware is used?", roofline_section.metal,
        lambda v: v.summary.roofline),
    ("profile", "Profile", "How long does each GEMM take?", roofline_section.profile,
        lambda v: v.summary.profile),
    ("served", "Lengths", "Were all tokens served?", sections.served, bool),
    ("instrument", "Instrument", "How accurate is the measurement?", sections.trust, bool),
    ("again", "Reproduce", "Reproduce this run", sections.again, bool),
    ("glossary", "Glossary", "What does each number mean?", sections.glossary, bool),
)  # fmt: skip
"""Of a run that is shown alone: id, name, question, blocks, and whether it has any (`bool`: always)."""


def render(comparison: Comparison) -> str:
    """The whole page as one HTML document; the same runs give the same bytes."""
    return page_over(comparison).html()


def page_over(comparison: Comparison) -> Page:
    view = comparison.run
    swept, several = ([], []) if view else (sweeps_in(comparison.cases), comparison.views)
    page = Page(
        title=comparison.title,
        facts=(*comparison.facts, *(sweep.name for sweep, _ in swept), *common_facts(several)),
        verdict=banner(comparison),
        sections=tuple(_sections(comparison)),
        summary=view.summary.to_json() if view else comparison_json(comparison),
        digest=digest(comparison),
        answer=answer(comparison),
    )
    if len(swept) == 1 and len(swept[0][1]) == len(comparison.cases):
        return replace(page, tiles=first_screen.sweep_tiles(*swept[0]))
    if view is None or not view.has_served:
        return page
    tiles, pictures = first_screen.tiles(view), first_screen.pictures(view)
    return replace(page, verdict=first_screen.strip(page.verdict), tiles=tiles, pictures=pictures)


def _sections(comparison: Comparison) -> Iterator[PageSection]:
    cases = comparison.cases
    if comparison.run is not None:
        yield from _of_run(comparison.run)
        return
    prefixes = {id(case): f"c{k}-" if len(cases) > 1 else "" for k, case in enumerate(cases)}
    swept = sweeps_in(cases)
    apart = [case for case in cases if not any(case in within for _, within in swept)]
    anchors = {id(case): f"{prefixes[id(case)]}numbers" for case in apart}
    whole = None if swept else compared.grid(comparison, anchors)
    if whole is not None:
        yield PageSection("cells", "Overview", "Which is fastest in each case?", [whole])
    if across := compared.platforms(comparison):
        question = "How does each engine's latency differ across platforms?"
        yield PageSection("platforms", "Platforms", question, across)
    for k, (sweep, within) in enumerate(swept):
        yield from _of_sweep(sweep, within, f"t{k}-" if len(swept) > 1 else "", prefixes)
    for case in apart:
        yield from case_sections(case, prefixes[id(case)])
    if comparison.others:
        question = "What did other tools report?"
        yield PageSection("others", "Other tools", question, beside_others(comparison))
    if comparison.missing:
        notes = [Note(say("missing", what=what)) for what in comparison.missing]
        yield PageSection("missing", "Missing", "What is missing?", notes)


def _of_run(view: View) -> Iterator[PageSection]:
    for name, short, question, blocks, applies in SECTIONS:
        if applies(view) and (view.has_served or name in WITHOUT_SUCCESS):
            yield PageSection(name, short, question, blocks(view), name != "nothing")


def case_sections(case: Case, prefix: str = "") -> Iterator[PageSection]:
    """The sections on several runs; `prefix` begins their ids where the page has several cases."""
    how = "How fast is it?" if case.is_alone else "How fast is each?"
    rows = (
        ("numbers", "Numbers", "Which is faster?" if case.gate.comparable else how, compared.numbers),
        ("differences", "Differences", "Were the conditions equal?", compared.differences),
        ("shape", "Latency", "How do the latencies differ?", compared.shape),
        ("runs", "Runs", "Which runs were compared?", compared.runs),
    )
    for name, short, question, blocks in rows:
        if prefix and case.name:
            # The list of sections has the name of each case once.
            short, question = case.name * (name == "numbers"), f"{case.name}: {question}"
        yield PageSection(f"{prefix}{name}", short, question, blocks(case, prefix))


def _of_sweep(
    sweep: Sweep, cases: Sequence[Case], prefix: str, prefixes: Mapping[int, str]
) -> Iterator[PageSection]:
    """The trade-off of a sweep, then each of its loads, folded."""
    of = f"{sweep.name}: " if prefix else ""
    anchors = {str(load): f"#{prefixes[id(case)]}load" for load, case in zip(sweep.loads, cases, strict=True)}
    question = f"{of}How do throughput and latency change with the load?"
    blocks = compared.tradeoff(sweep, prefix, anchors)
    yield PageSection(f"{prefix}tradeoff", f"{of}Trade-off", question, blocks)
    folds = [
        Folded(
            str(load) if case.is_alone else f"{load}: {case.gate.state}",
            tuple(block for each in case_sections(case, prefixes[id(case)]) for block in each.blocks),
            id=anchors[str(load)][1:],
        )
        for load, case in zip(sweep.loads, cases, strict=True)
    ]
    yield PageSection(f"{prefix}loads", f"{of}Each load", f"{of}What was measured at each load?", folds)


def common_facts(views: Sequence[View]) -> list[str]:
    """All engines; model, data type and devices, where all have the same; the day, or the first and last."""
    each = [view.facts for view in views]
    common = [
        {facts[name].partition(",")[0] for facts in each} for name in ("model", "dtype", "devices", "date")
    ]
    engines = dict.fromkeys(filter(None, (facts["engine"] for facts in each)))
    same = [values.pop() for values in common if len(values) == 1 and values != {""}]
    days = [facts["date"].partition(",")[0] for facts in each]
    span = [f"{days[0]} to {days[-1]}"] if len(set(days)) > 1 and all(days) else []
    return [*filter(None, [", ".join(engines)]), *same, *span]


@cache
def templates() -> Environment:
    """The page's templates, compiled (70 ms); once, for a command may write several pages."""
    environment = Environment(
        loader=PackageLoader("burstline.reports.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"cells": cells, "coded": coded}
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
            f'<{tag}{scope} class="{names}"' if names else f"<{tag}{scope}",
            f' data-key="{escape(cell.key)}" data-unit="{escape(cell.unit)}">' if cell.key else ">",
            f'<a href="{escape(cell.href)}">{text}</a>' if cell.href else text,
            f"<sup>{cell.note}</sup>" if cell.note else "",
            f"<small>{escape(cell.detail)}</small>" if cell.detail else "",
            f"</{tag}>",
        ]
    return Markup("".join(parts))  # noqa: S704 every text above is escaped


def coded(sentence: str) -> Markup:
    """The sentence, its commands set as code, and the names of options kept in one line."""
    whole = re.sub(OPTION, r'<span class="whole">\g<0></span>', str(escape(sentence)))
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", whole))  # noqa: S704 all is escaped


OPTION: Final = r"(?<![\w/.-])(?:--[a-z]+|[a-z]+-[a-z]+)(?:-[a-z]+)+(?![\w/.-]*[\w/])"
"""The name of an option with hyphens, with or without its first two, that is no part of a path."""


def _json_in_html(value: object) -> Markup:
    """JSON that cannot end the <script> element it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704
