"""The certificate of a client: blocks for a terminal and Markdown."""

from collections.abc import Iterator
from pathlib import Path

from burstline.measure.verdict.certificate import Certificate, Offered, Reading, title_of
from burstline.reports.blocks import Block, Findings, Heading, Note, table


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
        again = f"burstline certify --again {out or 'DIR'} --reads NAME=FILE#PLACE"
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
