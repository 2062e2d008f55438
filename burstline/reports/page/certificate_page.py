"""The page of a client's certificate."""

from functools import partial

from burstline.measure.record.typed_json import to_json
from burstline.measure.record.verdict import Reason
from burstline.measure.verdict.certificate import Certificate, title_of
from burstline.reports.blocks import Banner, Table, Tile
from burstline.reports.figures.against_truth import Told, against_truth
from burstline.reports.page.certificate_blocks import blocks
from burstline.reports.page.first_screen import next_tile
from burstline.reports.page.page import Page, PageSection
from burstline.wording import counted


def certificate_page(found: Certificate) -> str:
    """What it printed against the truth, what it sent, and what that means for its numbers."""
    asked, offered, n = found.asked, found.offered, len(found.findings)
    times = [
        Told(title_of(each.name), 1e3 * each.true, 1e3 * each.printed, each.is_off)
        for each in found.readings
        if each.is_time and each.printed is not None
    ]
    off = sum(each.is_off for each in times)
    printed = f"{off} of {counted(len(times), 'printed time')} {'is' if off == 1 else 'are'} off."
    largest = "Not known", "No time that it printed was read."
    if times:
        worst = max(times, key=lambda each: abs(each.printed - each.true))
        largest = f"{worst.printed - worst.true:+,.2f} ms", f"{worst.name}. {printed}"
    burst = "" if offered.spread_s is None else f"Its burst took {1e3 * offered.spread_s:,.1f} ms. "
    memory = "" if asked.pss_bytes is None else f"{asked.pss_bytes / 1e6:,.0f} MB of memory at most"
    told = f"{counted(n, 'finding')}. {found.findings[0]}" if n else "What it printed is what was so."
    rows = [each for each in times if each.printed > 0 and each.true > 0]  # the axis is logarithmic
    made = list(blocks(found))
    tables = [each for each in made if isinstance(each, Table)]
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
        sections=[
            PageSection(f"part{k}", "", each.caption, partial(list, (each,)), folded=True)
            for k, each in enumerate(tables)
        ],
        summary=to_json(found),
        digest=made,
    ).html()
