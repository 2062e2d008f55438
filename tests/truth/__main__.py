"""`python -m tests.truth`: serves the known truth, with all that a test may want of a server."""

import argparse
import sys
from pathlib import Path

from burstline.servers.truth.__main__ import add_arguments, serve
from tests.truth.dialects import ROUTES
from tests.truth.queue import Queue
from tests.truth.router import TruthSetup
from tests.truth.script import scripts_from_json
from tests.truth.serve import ScriptedServer


def main() -> int:
    """Serve as asked; print the URL once it listens."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth", description=__doc__)
    add_arguments(parser)
    add = parser.add_argument
    add("--script", default="{}", help="JSON, or @FILE: one script, or a list in the order of arrival")
    add("--dialect", default="openai", choices=ROUTES, help="whose native paths are served besides /v1/*")
    add("--queue-servers", type=int, help="serve through a queue with this many servers")
    add("--service-s", type=float, default=0.01, help="the queue's mean service time")
    add("--service-cv", type=float, default=1.0, help="its variation: 1 exponential, 0 constant, else gamma")
    add("--seed", type=int, default=0, help="seed of the service times")
    add("--prefix-cache", action="store_true", help="remember prompts and answer repeats faster")
    add("--counters-late-s", type=float, default=0.0, help="/metrics counts a reply this long after its end")
    add("--counters-lost", type=float, default=0.0, help="the share of replies that /metrics never counts")
    add("--max-in-flight", type=int, help="refuse requests beyond this many")
    add("--shed-status", type=int, default=503, help="the status of such a refusal")
    args = parser.parse_args()
    queue = None
    if args.queue_servers is not None:
        queue = Queue(args.queue_servers, args.service_s, args.service_cv, args.seed)
    text: str = args.script
    script = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
    setup = TruthSetup(
        scripts=scripts_from_json(script),
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
    return serve(ScriptedServer(setup, args.host, args.port), args)


if __name__ == "__main__":
    sys.exit(main())
