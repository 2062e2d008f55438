"""`burstline certify`: run a load generator at the known-truth server and report its error."""

import argparse
import shutil
import tempfile
from pathlib import Path

from burstline.bench import certification
from burstline.console import exit_codes
from burstline.console.flags import new_folder, read_options
from burstline.console.stdout import json_text
from burstline.measure.record.typed_json import to_json
from burstline.measure.verdict.certificate import Certificate
from burstline.reports.formats.text import markdown, text
from burstline.reports.model.foreign import TOOLS, parse_reads
from burstline.workloads.load import load_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec


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
    new_folder(args.out)
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
    from burstline.reports.page.certificate_page import blocks, certificate_page  # it draws, after the load

    if out is not None:
        (out / "certificate.json").write_text(json_text(to_json(found)), "utf-8")
        (out / "certificate.md").write_text(markdown(blocks(found)), "utf-8")
        (out / "report.html").write_text(certificate_page(found), "utf-8")
    print(json_text(to_json(found)) if args.json else text(blocks(found, out)))
    if out is not None and not args.json:
        print(f"Report: {out / 'report.html'}")
    return exit_codes.INCONCLUSIVE if found.findings else exit_codes.DONE
