"""What the known-truth server can drive: `python tests/bench/truth_limit.py [--in-phase] [streams ...]`.

So many streams of one token every 20 ms, asked for at once, their phases spread evenly, drained by a client
that looks at nothing. Prints how late the server sent, by its own log, and what an event cost it. It is good
for as many events a second as keep the p99 of that below 0.2 ms. With --in-phase all streams want to send at
the same instants, which one thread can only do one after the other. Server and client are each pinned to a
core where there are two.
"""

import os
import select
import socket
import sys
from urllib.parse import urlsplit

import numpy as np
import orjson

from tests.truth.rig import TruthRig, truth_server
from tests.truth.script import Script

GAP_S = 0.02
SECONDS = 4.0
LIMIT_US = 200


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    print("streams  events/s  late p50 us  p99 us  max us  arrivals ms  server CPU us/event")
    good = 0.0
    spread = "--in-phase" not in sys.argv
    counts = [int(word) for word in sys.argv[1:] if word.isdigit()]
    for n_streams in counts or [50, 100, 250, 500, 750, 1000, 1500, 2000]:
        phases_s = np.arange(n_streams) / n_streams * GAP_S * spread
        scripts = [Script(ttft_s=0.5 + phase_s, gaps_s=(GAP_S,)) for phase_s in phases_s.tolist()]
        with truth_server(scripts) as truth:
            if len(cores) > 1:
                os.sched_setaffinity(truth.pid or 0, cores[:1])
                os.sched_setaffinity(0, cores[1:])
            rate, p99_us = measure(truth, n_streams)
        if p99_us < LIMIT_US:
            good = max(good, rate)
    print(f"\nlargest rate with a p99 below {LIMIT_US} us: {good:,.0f} events/s")


def measure(truth: TruthRig, n_streams: int) -> tuple[float, float]:
    drain(truth.url, 1, 2)
    truth.reset()
    before_s = truth.metrics()["process_cpu_seconds_total"]
    drain(truth.url, n_streams, round(SECONDS / GAP_S))
    cpu_s = truth.metrics()["process_cpu_seconds_total"] - before_s
    rows = truth.log()
    sent_ns = np.sort(np.concatenate([row.token_ns for row in rows]))
    late_us = np.concatenate([row.lateness_ns[1:] for row in rows]) / 1e3
    arrivals_ns = [row.arrival_ns for row in rows]
    p50, p99 = np.percentile(late_us, [50, 99])
    rate = len(sent_ns) / ((sent_ns[-1] - sent_ns[0]) / 1e9)
    spread_ms = (max(arrivals_ns) - min(arrivals_ns)) / 1e6
    print(
        f"{n_streams:7}  {rate:8,.0f}  {p50:11.0f}  {p99:6.0f}  {late_us.max():6.0f}  {spread_ms:11.1f}"
        f"  {cpu_s / len(late_us) * 1e6:19.1f}"
    )
    return float(rate), float(p99)


def drain(url: str, n_streams: int, n_tok: int) -> None:
    """Asks for n_streams replies at once and reads them to their ends."""
    where = urlsplit(url)
    body = orjson.dumps({"prompt": [1] * 512, "max_tokens": n_tok, "stream": True})
    request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    epoll = select.epoll()
    socks: dict[int, socket.socket] = {}
    for _ in range(n_streams):
        sock = socket.create_connection((where.hostname, where.port))
        sock.setblocking(False)
        socks[sock.fileno()] = sock
        epoll.register(sock, select.EPOLLIN)
    for sock in socks.values():
        sock.send(request)
    buffer = bytearray(1 << 18)
    while socks:
        for fd, _ in epoll.poll():
            n_read = socks[fd].recv_into(buffer)
            if n_read == 0 or buffer[:n_read].endswith(b"0\r\n\r\n"):
                epoll.unregister(fd)
                socks.pop(fd).close()


if __name__ == "__main__":
    main()
