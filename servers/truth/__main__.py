"""`python -m servers.truth`: serves the known truth until SIGTERM, SIGINT or the end of a pipe."""

import argparse
import gc
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from servers.truth.dialects import ROUTES
from servers.truth.queue import Queue
from servers.truth.router import TruthSetup
from servers.truth.script import Script, scripts_from_json
from servers.truth.serve import TruthServer


def main(argv: Sequence[str] | None = None) -> int:
    """Serves as asked; prints the URL once it listens."""
    args = _arguments(argv)
    _raise_file_limit()
    server = TruthServer(_setup(args), args.host, args.port)
    if args.until_eof:
        server.stop_at_end_of(sys.stdin.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    # What is alive now stays; what a run makes has no cycles worth a pause amid the schedule.
    gc.freeze()
    gc.disable()
    sys.stdout.write(f"known-truth server on {server.url}\n")
    sys.stdout.flush()
    server.run()
    if args.log:
        args.log.write_bytes(server.log())
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m servers.truth", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0: any free port")
    add("--model", default="truth", help="the served model's name")
    add("--dialect", default="openai", choices=ROUTES, help="whose native paths are served besides /v1/*")
    add("--script", default="{}", help="JSON, or @FILE: one script, or a list in the order of arrival")
    add("--queue-servers", type=int, help="serve through a queue with so many servers")
    add("--service-s", type=float, default=0.01, help="the queue's mean service time")
    add("--service-cv", type=float, default=1.0, help="its variation: 1 exponential, 0 constant, else gamma")
    add("--seed", type=int, default=0, help="seed of the service times")
    add("--prefix-cache", action="store_true", help="remember prompts and answer repeats faster")
    add("--counters-late-s", type=float, default=0.0, help="/metrics counts a reply so long after its end")
    add("--counters-lost", type=float, default=0.0, help="the share of replies that /metrics never counts")
    add("--max-model-len", type=int, default=1 << 20, help="the context length that is told")
    add("--max-in-flight", type=int, help="refuse requests above so many")
    add("--shed-status", type=int, default=503, help="the status of such a refusal")
    add("--log", type=Path, help="write the log of arrivals and sends here at the end, as JSON lines")
    add("--until-eof", action="store_true", help="stop when standard input ends")
    return parser.parse_args(argv)


def _setup(args: argparse.Namespace) -> TruthSetup:
    text = args.script.encode()
    if text.startswith(b"@"):
        text = Path(args.script[1:]).read_bytes()
    queue = None
    if args.queue_servers is not None:
        queue = Queue(args.queue_servers, args.service_s, args.service_cv, args.seed)
    scripts: tuple[Script, ...] = scripts_from_json(text)
    return TruthSetup(
        scripts=scripts,
        native=args.dialect,
        model=args.model,
        queue=queue,
        prefix_cache=args.prefix_cache,
        max_model_len=args.max_model_len,
        counters_late_s=args.counters_late_s,
        counters_lost=args.counters_lost,
        max_in_flight=args.max_in_flight,
        shed_status=args.shed_status,
    )


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
