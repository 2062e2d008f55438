"""The embedded engine's command: options, threads and cores first, since BLAS reads its environment once."""

import argparse
import signal
import socket
import sys
from pathlib import Path

from burstline.compute_threads import take_cores
from burstline.servers.host.kernel import send_at_once, usable_cores


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="reference", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--model", help="a folder with config.json and perhaps *.safetensors; none: the built-in model")
    add("--served-model-name", help="default: the folder's name, or 'reference'")
    add("--max-model-len", type=_count, help="default: the model's max_position_embeddings")
    add("--max-num-seqs", type=_count, default=256, help="sequences computed at once")
    add("--max-num-batched-tokens", type=_count, default=2048, help="tokens computed in a step")
    add("--block-size", type=_count, default=16, help="tokens in a KV block")
    add("--kv-tokens", type=_count, default=163_840, help="capacity of the KV cache")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV blocks of finished requests for prompts that begin alike",
    )
    add("--seed", type=int, default=0, help="of random weights, and of sampling where a request brings none")
    n = usable_cores()
    # Clients have a core of their own where there are three; of two they get what they ask for, first.
    cores = n if n <= 2 else n - 1
    add("--threads", type=_count, default=cores, help="cores to compute on: all but one; of two, both")
    add("--step-log", type=Path, help="write what each step computed here, as JSON lines")
    return parser.parse_args()


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def main() -> None:
    options = _options()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it. asyncio sets it only where the protocol was named; without, Nagle holds the
    # first token back for the 40 ms after which the client acknowledges the headers.
    send_at_once(listener)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        where = f"{options.host}:{options.port}"
        sys.exit(f"error: cannot listen on {where}: {error.strerror}; try another --port")
    take_cores(options.threads)
    from burstline.servers.reference.serve import serve  # numpy, so BLAS, is loaded here

    serve(options, listener)


if __name__ == "__main__":
    main()
