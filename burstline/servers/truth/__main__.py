"""`python -m burstline.servers.truth`: serves the known truth until SIGTERM or SIGINT."""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from burstline.servers.truth import STATEMENT
from burstline.servers.truth.replies import Script
from burstline.servers.truth.router import SCRIPTS, Router
from burstline.servers.truth.serve import Served, TruthServer, prepare_process, served
from burstline.workloads.request import WorkloadError


def main() -> int:
    """Serve as asked; print the URL once it listens."""
    parser = argparse.ArgumentParser(prog="python -m burstline.servers.truth", description=__doc__)
    add_arguments(parser)
    add = parser.add_argument
    add("--ttft", type=float, default=0.2, metavar="SECONDS", help="to the first token (0.2)")
    add("--itl", type=float, default=0.02, metavar="SECONDS", help="between two events with tokens (0.02)")
    add("--tokens-per-event", type=int, default=1, metavar="N", help="tokens in an event (1)")
    add("--slots", type=int, metavar="N", help="serve N requests at once, the others wait (all at once)")
    add("--script", choices=SCRIPTS, default="fixed", help="how it replies, if no x-burstline-script says so")
    args = parser.parse_args()
    try:
        own = Script(ttft_s=args.ttft, gaps_s=(args.itl,), tok_per_event=(args.tokens_per_event,))
        setup = SCRIPTS[args.script](own, 1)
    except WorkloadError as error:
        parser.error(str(error))
    slots = args.slots or setup.slots
    setup = replace(setup, model=args.model, max_model_len=args.max_model_len, slots=slots)
    return serve(TruthServer(Router(setup), args.host, args.port), args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every such server."""
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0: any free port")
    add("--model", default="truth", help="the served model's name")
    add("--max-model-len", type=int, default=1 << 20, help="the context length that /v1/models reports")
    add("--log", type=Path, help="write the log of arrivals and sends here at the end, as JSON lines")


def serve(server: TruthServer, args: argparse.Namespace) -> int:
    """Run the server until it is stopped; keep its log where asked."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    prepare_process()
    sys.stdout.write(f"known-truth server on {server.url}\n")
    sys.stdout.flush()
    server.run()
    rows = [served(each) for each in server.exchanges if not each.is_probe]
    sys.stdout.writelines(f"{STATEMENT}{line}\n" for line in statement(rows))
    if args.log:
        args.log.write_bytes(server.log())
    return 0


def statement(rows: Sequence[Served]) -> Iterator[str]:
    """What was true of the requests, in lines: how many, and the times of those that got all their tokens."""
    good = [row for row in rows if row.ended == "done" and row.token_ns]
    n_tok = sum(sum(row.event_tok) for row in good)
    yield f"{len(rows):,} requests, {len(good):,} of them served whole with {n_tok:,} tokens"
    times = {
        "TTFT": [row.token_ns[0] - row.arrival_ns for row in good],
        "ITL": [gap_ns for row in good for gap_ns in np.diff(row.token_ns)],
        "E2E": [row.token_ns[-1] - row.arrival_ns for row in good],
    }
    for name, values in times.items():
        if values:
            p50, p90, p99 = np.quantile(np.array(values), (0.5, 0.9, 0.99)) / 1e6
            yield f"{name} p50 {p50:.2f} ms, p90 {p90:.2f} ms, p99 {p99:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
