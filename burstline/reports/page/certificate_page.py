"""The certificate of a client: its page, and blocks for a terminal and Markdown."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from burstline.measure.record.typed_json import to_json
from burstline.measure.record.verdict import Reason
from burstline.measure.verdict.certificate import Certificate, Offered, Reading, title_of
from burstline.reports.blocks import Banner, Block, Findings, Heading, Note, Table, Tile, table
from burstline.reports.figures.against_truth import against_truth
from burstline.reports.page.first_screen import next_tile
from burstline.reports.page.page import Page, evidence
from burstline.wording import counted


def certificate_page(found: Certificate) -> str:
    """What it printed against the truth, what it sent, and what that means for its numbers."""
    asked, offered, n = found.asked, found.offered, len(found.findings)
    times = {each: each.printed for each in found.readings if each.is_time and each.printed is not None}
    off = sum(each.is_off for each in times)
    printed = f"{off} of {counted(len(times), 'printed time')} {'is' if off == 1 else 'are'} off."
    largest = "Not known", "No time that it printed was read."
    if times:
        error_s, name = max(
            ((at - each.true, each.name) for each, at in times.items()), key=lambda e: abs(e[0])
        )
        largest = f"{1e3 * error_s:+,.2f} ms", f"{title_of(name)}. {printed}"
    burst = "" if offered.spread_s is None else f"Its burst took {1e3 * offered.spread_s:,.1f} ms. "
    memory = "" if asked.pss_bytes is None else f"{asked.pss_bytes / 1e6:,.0f} MB of memory at most"
    told = f"{counted(n, 'finding')}. {found.findings[0]}" if n else "What it printed is what was so."
    rows = [each for each, at in times.items() if at > 0 and each.true > 0]  # the axis is logarithmic
    made = list(blocks(found))
    return Page(
        title=f"Certificate: {found.printed.tool}",
        facts=(f"{asked.load}, at a server of known truth", f"script {asked.script}"),
        verdict=Banner(
            "FINDINGS" if n else "NO FINDINGS",
            "warn" if n else "good",
            "?" if n else "✓",
            told,
            tuple(Reason("finding", each, "") for each in found.findings[1:]),
        ),
        tiles=[
            Tile("What is its largest error?", *largest),
            Tile(
                "What did it send?",
                counted(offered.n, "request"),
                f"{burst}At most {offered.most_in_flight:,} were in flight.",
            ),
            Tile("What did it cost?", f"{found.cpu_us_per_event:,.1f} µs an event", memory),
            next_tile("Read the findings before you use its numbers" if n else "Use its numbers"),
        ],
        pictures=[against_truth(rows, printed)] if rows else [],
        sections=evidence([each for each in made if isinstance(each, Table)]),
        summary=to_json(found),
        digest=made,
    ).html()


def blocks(found: Certificate, out: Path | None = None) -> Iterator[Block]:
    """The certificate for a person."""
    tool, asked = found.printed.tool, found.asked
    yield Heading(f"{tool}: {asked.load}, at a server of known truth ({asked.script})", 1)
    rate = "" if found.events_per_s is None else f", {found.events_per_s:,.0f} a second"
    late = found.server_late_p99_s
    own = "" if late is None else f" The server was {late * 1e3:.2f} ms late at p99; no error contains it."
    yield Note(f"{found.n_events:,} events{rate}.{own}")
    yield table("What it sent", ("", ""), _sent(found.offered), text=(0, 1))
    yield table(
        "What it printed",
        ("", "Unit", "True", "Printed", "Error", "As the tool defines it"),
        [*_counts(found), *map(_reading, found.readings)],
        text=(0, 1, 5),
    )
    yield table("What it cost", ("", ""), _cost(found), text=(0, 1))
    if found.findings:
        yield Findings(found.findings)
    if not found.printed.is_read and found.offered.n:
        again = f"burstline certify --again {shlex.quote(str(out or 'DIR'))} --reads NAME=FILE#PLACE"
        yield Note(f"To read the files anew, without the load: {again}")


def _sent(offered: Offered) -> Iterator[tuple[str, str]]:
    yield "Requests", f"{offered.n:,}, and {offered.n_before:,} before the load"
    yield "Retries", f"{offered.n_retries:,}"
    yield "Distinct", f"{offered.n_distinct:,}"
    yield "Left by the client", f"{offered.n_hung_up:,}"
    yield "Connections", f"{offered.n_connections:,}"
    yield "Most in flight", f"{offered.most_in_flight:,}"
    kind = "text" if not offered.n_as_ids else "token ids" if offered.n_as_ids == offered.n else "both"
    yield "Prompts", f"as {kind}"
    if offered.prompt_tok:
        low, middle, high = offered.prompt_tok
        yield "Prompt tokens", f"{middle:,} (median; {low:,} to {high:,})"
    elif offered.n:
        yield "Prompt tokens", "not counted: give --tokenizer, or {tokenizer} in the command"
    if offered.spread_s is not None:
        yield "Burst", f"{offered.spread_s * 1e3:.1f} ms from its first byte to its last"
    if offered.unserved:
        yield "Not served", ", ".join(f"{path} ({n:,})" for path, n in offered.unserved.items())
    if offered.rate_error is not None:
        cv, planned = offered.gap_cv or 0, offered.planned_gap_cv or 0
        yield "Rate", f"{offered.rate_error:+.2%}; gaps vary by {cv:.2f} (asked: {planned:.2f})"
    elif offered.spread_s is None:
        yield "Rate", "- (a closed loop sends when a reply has ended)"


def _counts(found: Certificate) -> Iterator[tuple[str, ...]]:
    for title, true, printed in (
        ("Successful", found.offered.n_ok, found.printed.n_ok),
        ("Failed", found.offered.n_failed, found.printed.n_failed),
    ):
        error = "" if printed is None else f"{printed - true:+,}"
        yield title, "", f"{true:,}", "-" if printed is None else f"{printed:,}", error, ""


def _reading(each: Reading) -> tuple[str, ...]:
    unit, scale = each.unit
    row = title_of(each.name), unit, f"{each.true * scale:,.2f}"
    if each.printed is None:
        return *row, "-", "", ""
    return *row, f"{each.printed * scale:,.2f}", f"{(each.printed - each.true) * scale:+,.2f}", each.defined


def _cost(found: Certificate) -> Iterator[tuple[str, str]]:
    yield "CPU", f"{found.asked.cpu_s:.2f} s, {found.cpu_us_per_event:.1f} µs an event"
    if found.asked.pss_bytes is not None:
        yield "Memory", f"{found.asked.pss_bytes / 1e6:,.0f} MB (PSS of all processes, at most)"
    before, after = ("-" if s is None else f"{s:.2f} s" for s in (found.before_s, found.after_s))
    yield "From the command to the first request", before
    yield "From the last token to the end", after
