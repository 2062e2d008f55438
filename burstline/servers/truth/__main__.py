"""`python -m burstline.servers.truth`: serves the known truth until SIGTERM or SIGINT."""

import argparse
import signal
import sys
from pathlib import Path

from burstline.servers.truth.router import Router, TruthSetup
from burstline.servers.truth.serve import TruthServer, prepare_process


def main() -> int:
    """Serve as asked; print the URL once it listens."""
    parser = argparse.ArgumentParser(prog="python -m burstline.servers.truth", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    setup = TruthSetup(model=args.model, max_model_len=args.max_model_len)
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
    if args.log:
        args.log.write_bytes(server.log())
    return 0


if __name__ == "__main__":
    sys.exit(main())
