"""What decoding costs: `python tests/bench/decode.py [--events 20000 --repeats 5] [--markdown]`.

Captures of replies as vLLM streams them (usage in every event, one chunk and one read an event) go the way of
a run: off the spool, through HTTP, events and JSON, to records and their table. Beside it stands the least
that other tools do with the same bytes, chunked coding already taken off: `json.loads` of every event as it
came, its text and the time since the one before kept. Printed is CPU on one core; of repeats the least, for
neighbours only add.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import orjson

sys.path.insert(0, str(Path(__file__).parents[2]))

from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Capture, CaptureWriter, Reads, read_captures
from burstline.measure.record.decode import decoded_batches
from burstline.measure.record.tables import record_table
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request

LENGTHS = (16, 64, 128)
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 02:05:40 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
GAP_NS = 20_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=20_000, help="events in all, of each length of reply")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    measured(LENGTHS[0], 10, 1)  # the first time loads what the others have loaded
    rows = [measured(n_tok, max(1, args.events // n_tok), args.repeats) for n_tok in LENGTHS]
    line = "| {} | {} | {} | {} |" if args.markdown else "{:>14}{:>16}{:>18}{:>8}"
    print(line.format("events a reply", "ours, us/event", "json.loads alone", "ratio"))
    if args.markdown:
        print("|---|---|---|---|")
    for n_tok, own_us, peer_us in rows:
        print(line.format(n_tok, f"{own_us:.2f}", f"{peer_us:.2f}", f"{own_us / peer_us:.2f}"))


def measured(n_tok: int, n_replies: int, repeats: int) -> tuple[int, float, float]:
    """Events a reply, us of CPU an event: ours and the peer's."""
    requests = [Request(i, (), None, 512, n_tok) for i in range(n_replies)]
    with tempfile.TemporaryDirectory() as name:
        spool = CaptureWriter(Path(name))
        for i in range(n_replies):
            spool.put(partial(capture, i, n_tok))
        spool.close()
        came = [arrivals_of(each) for each in read_captures(Path(name))]
        ours, peers = [], []
        for _ in range(repeats):  # in turns: neighbours trouble both
            ours.append(cpu_s(lambda: decoded(Path(name), requests)))
            peers.append(cpu_s(lambda: [plainly(reads) for reads in came]))
    n = n_replies * n_tok
    return n_tok, min(ours) / n * 1e6, min(peers) / n * 1e6


def decoded(folder: Path, requests: list[Request]) -> None:
    batches = decoded_batches(read_captures(folder), requests, ENGINES["vllm"].decode)
    tables = [record_table(records) for records in batches]
    outcomes = {outcome for table in tables for outcome in table.column("outcome").to_pylist()}
    assert outcomes == {"ok"}, outcomes


def plainly(reads: list[tuple[int, bytes]]) -> tuple[str, list[int]]:
    text, gaps_ns, before_ns = "", [], 0
    for at_ns, data in reads:
        for block in data.split(b"\n\n"):
            said = block.removeprefix(b"data: ")
            if not said or said == b"[DONE]":
                continue
            answer = json.loads(said)
            if answer["choices"]:
                text += answer["choices"][0]["text"]
                gaps_ns.append(at_ns - before_ns)
                before_ns = at_ns
    return text, gaps_ns


def cpu_s(work: Callable[[], object]) -> float:
    begin_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin_ns) / 1e9


def capture(index: int, n_tok: int) -> Capture:
    """A reply of so many events, a usage event and the end, every 20 ms a read."""
    events = [event(k + 1, last=k + 1 == n_tok) for k in range(n_tok)]
    bodies = [*events, event(n_tok, choices=False), b"data: [DONE]\n\n"]
    parts = [b"%x\r\n%b\r\n" % (len(body), body) for body in bodies]
    parts[0], parts[-1] = HEAD + parts[0], parts[-1] + b"0\r\n\r\n"
    at_ns = np.arange(1, len(parts) + 1) * GAP_NS + index
    ends, since_ns = np.cumsum([len(part) for part in parts]), np.full(len(at_ns), -1)
    reads = Reads(at_ns, at_ns - 30_000, ends, b"".join(parts), since_ns)
    return Capture(index, 0, 0, -1, 1000, int(at_ns[-1]), reads)


def event(n_so_far: int, *, last: bool = False, choices: bool = True) -> bytes:
    choice = {
        "index": 0,
        "text": " token",
        "logprobs": None,
        "finish_reason": "length" if last else None,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    answer = {
        "id": "cmpl-a216ac2fb1b3f38e",
        "object": "text_completion",
        "created": 1795226740,
        "model": "model",
        "choices": [choice] if choices else [],
        "usage": {"prompt_tokens": 512, "total_tokens": 512 + n_so_far, "completion_tokens": n_so_far},
    }
    return b"data: %b\n\n" % orjson.dumps(answer)


def arrivals_of(each: Capture) -> list[tuple[int, bytes]]:
    """What came with each read, without its chunked coding."""
    parsed = http1.parse(each.reads)
    assert parsed is not None
    reply, arrivals = parsed
    edges = [0, *arrivals.body_ends.tolist()]
    return [
        (read.at_ns, reply.body[begin:end])
        for read, begin, end in zip(each.reads, edges, edges[1:], strict=False)
    ]


if __name__ == "__main__":
    main()
