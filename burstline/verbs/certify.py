"""`burstline certify`: run a load generator at the known-truth server and report its error."""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from burstline.bench import certification
from burstline.console import exit_codes
from burstline.console.flags import add_options, read_options
from burstline.console.stdout import json_text
from burstline.measure.record.typed_json import to_json
from burstline.measure.verdict.certificate import Certificate, Offered, Reading, title_of
from burstline.reports.blocks import Block, Findings, Heading, Note, table
from burstline.reports.formats.text import markdown, text
from burstline.reports.model.foreign import TOOLS, parse_reads
from burstline.servers.truth.router import SCRIPTS
from burstline.workloads.load import load_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "burstline certify [--client COMMAND] [the flags of the load, as for run] [--json]"
    add_options(parser.add_argument_group("the load"), LoadSpec)
    add = parser.add_argument_group("the client").add_argument
    add(
        "--client",
        metavar="COMMAND",
        help="another load generator instead of Burstline, with {url} {model} {requests} {prompt_tokens} "
        "{output_tokens} {rate} {concurrency} {tokenizer} filled in; {out} is a folder for its JSON file. Or "
        f"the name of an installed tool: {', '.join(each for each in TOOLS if 'command' in TOOLS[each])}",
    )
    add(
        "--reads",
        action="append",
        default=[],
        metavar="NAME=FILE#PLACE",
        help="where a number is in the JSON files of a tool that is not known, such as "
        "ttft.p50=x.json#ttft.median:s (ms unless a unit is given; one file needs no FILE#; repeatable)",
    )
    add("--name", help="what the certificate calls the client (its program or script)")
    add("--again", type=Path, metavar="DIR", help="certify what is in DIR (--out) again, with other --reads")
    parser.add_argument("--script", choices=SCRIPTS, default="fixed", help="how the server replies (fixed)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the client's files and the certificate")
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")


def run(args: argparse.Namespace) -> int:
    reads = parse_reads(args.reads)
    if args.again is not None:
        if args.client is not None or args.out is not None:
            raise WorkloadError("--again reads a folder again: drop --client and --out")
        return _shown(args, certification.again(args.again, reads, args.name), args.again)
    load = load_of(read_options(LoadSpec, args))
    if load.spec.audit is not None:
        raise WorkloadError("certify: a certificate counts each request; drop --audit, and audit a run")
    if args.client is None and reads:
        raise WorkloadError("--reads is for --client: Burstline's own results are known")
    if args.out is not None and args.out.exists() and any(args.out.iterdir()):
        raise WorkloadError(f"--out {args.out} is not empty; name another folder, or remove it first")
    out = (args.out or Path(tempfile.mkdtemp(prefix="burstline-"))).resolve()
    keep = args.out is not None
    try:
        out.mkdir(parents=True, exist_ok=True)
        client = TOOLS.get(args.client, {}).get("command", args.client)
        found = certification.certified(load, args.script, client, out, reads, args.name)
        keep |= not found.printed.is_read
        return _shown(args, found, out if keep else None)
    finally:
        if not keep:
            shutil.rmtree(out, ignore_errors=True)


def _shown(args: argparse.Namespace, found: Certificate, out: Path | None) -> int:
    if out is not None:
        (out / "certificate.json").write_text(json_text(to_json(found)), "utf-8")
        (out / "certificate.md").write_text(markdown(blocks(found)), "utf-8")
    print(json_text(to_json(found)) if args.json else text(blocks(found, out)))
    return exit_codes.INCONCLUSIVE if found.findings else exit_codes.DONE


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
    if not found.printed.is_read:
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
    cpu_s = found.asked.cpu_s
    yield "CPU", f"{cpu_s:.2f} s, {cpu_s / max(found.n_events, 1) * 1e6:.1f} µs an event"
    if found.asked.pss_bytes is not None:
        yield "Memory", f"{found.asked.pss_bytes / 1e6:,.0f} MB (PSS of all processes, at most)"
    before, after = ("-" if s is None else f"{s:.2f} s" for s in (found.before_s, found.after_s))
    yield "From the command to the first request", before
    yield "From the last token to the end", after
