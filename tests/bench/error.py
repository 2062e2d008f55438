"""What is reported against what was true: `python tests/bench/error.py [--repeats 3] [--markdown]`.

1000 streams at once, 10,000 and 50,000 events a second in all, from the server in C that writes its own clock
into every event (not from servers/truth, which is Python and sends 25,000 a second on time). They go the way
of a run: driver, spool, vLLM's adapter, records, `summarize`. Held against each other are the percentiles in
the summary and those of the times at which the server sent, counted from when the client had written the
request, and from when it was due. Goal: within 1 ms or 1%.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.measure.making import summarized

sys.path.insert(0, str(Path(__file__).parents[2]))

from burstline.bench.fire import fire
from burstline.loadgen.capture.capture import Capture, Reads, read_captures
from burstline.loadgen.driver.job import Job
from burstline.loadgen.wire.os_limits import ensure_sockets
from burstline.measure.record.decode import decoded_batches
from burstline.measure.record.tables import record_table
from burstline.measure.record.verdict import tolerance_s
from burstline.measure.stats.estimates import early_stopping_floor
from burstline.servers.messages import HttpReply, Kind, Reply, Target
from burstline.workloads.request import Request
from tests.bench.wire import server
from tests.measure.making import conditions
from tests.servers.golden import decode_completion

RATES_PER_S = (10_000, 50_000)
TTFT_MS = 200
SECONDS = 2.5
METRICS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
}
QUANTILES = {"p50": 0.5, "p99": 0.99}
SENT = re.compile(rb'"t":(\d+)')


@dataclass(frozen=True)
class Row:
    """One percentile of one metric under one rate of events, seconds; of repeats the median error's."""

    rate_per_s: float
    metric: str
    quantile: str
    reported_s: float
    true_s: float
    worst_s: float

    @property
    def error_s(self) -> float:
        return self.reported_s - self.true_s

    @property
    def good(self) -> bool:
        return abs(self.worst_s) <= tolerance_s(self.true_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long tokens come")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    if args.streams < early_stopping_floor(0.99):
        parser.error(f"a p99 needs {early_stopping_floor(0.99)} streams")
    ensure_sockets(args.streams)
    rows = [
        row
        for rate_per_s in RATES_PER_S
        for row in rows_of([fired(args.streams, rate_per_s, args.seconds) for _ in range(args.repeats)])
    ]
    show(rows, markdown=args.markdown)
    return 0 if all(row.good for row in rows) else 1


Pairs = dict[tuple[str, str], tuple[float, float]]


def fired(n_streams: int, rate_per_s: float, seconds: float) -> tuple[float, Pairs]:
    """The rate at which events came; by metric and percentile what was reported and what was true."""
    gap_s = n_streams / rate_per_s
    n_tok = 1 + round(seconds / gap_s)
    prompt = array("I", range(512))
    requests = tuple(Request(i, prompt, None, 512, n_tok) for i in range(n_streams))
    with server(n_tok, TTFT_MS * 1000, round(gap_s * 1e6)) as port, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = Target(f"http://127.0.0.1:{port}", "truth")
        due_ns = array("q", bytes(8 * n_streams))
        job = Job(requests, due_ns, "vllm", target, folder / "captures", folder / "counters")
        (report,) = fire(job, 1, pinned, lambda _: None).reports
        captures = list(read_captures(job.captures))
    batches = decoded_batches(captures, list(requests), one_token_each)
    table = pa.concat_tables([record_table(records) for records in batches])
    summary = summarized(table, conditions(reports=[report]))
    assert summary["counts"] == {"planned": n_streams, "ok": n_streams}, summary["counts"]
    sent_s = np.array([sent_by_the_server(each) for each in captures]) / 1e9 - (report.t0_ns or 0) / 1e9
    asked_s = np.array([each.sent_ns for each in captures]) / 1e9
    truths = {
        "ttft": sent_s[:, 0] - asked_s,
        "itl": np.diff(sent_s, axis=1),
        "tpot": (sent_s[:, -1] - sent_s[:, 0]) / (n_tok - 1),
        "e2e": sent_s[:, -1] - asked_s,
    }
    pairs = {
        (metric, name): (summary["metrics"][metric][name]["point"], float(np.quantile(truths[metric], p)))
        for metric in METRICS
        for name, p in QUANTILES.items()
    }
    return sent_s.size / float(np.ptp(sent_s)), pairs


def one_token_each(reply: HttpReply) -> Reply:
    """The server sends a token an event and does not say so."""
    decoded = decode_completion(reply)
    for event in decoded.events:
        event.n_tok = 1 if event.kind is Kind.ANSWER else None
    return replace(decoded, n_prompt_tok=None)


def sent_by_the_server(capture: Capture) -> list[int]:
    return [int(at) for at in SENT.findall(Reads.of(capture.reads).data)]


def pinned(pids: list[int]) -> None:
    """The driver apart from the server, where there are two cores."""
    if (os.cpu_count() or 1) > 1:
        for pid in pids:
            os.sched_setaffinity(pid, {1})


def rows_of(repeats: list[tuple[float, Pairs]]) -> list[Row]:
    rate_per_s = float(np.median([rate for rate, _ in repeats]))
    rows = []
    for metric, quantile in repeats[0][1]:
        pairs = sorted((pairs[metric, quantile] for _, pairs in repeats), key=lambda pair: pair[0] - pair[1])
        worst_s = max((reported - true for reported, true in pairs), key=abs)
        rows.append(Row(rate_per_s, metric, quantile, *pairs[len(pairs) // 2], worst_s))
    return rows


def show(rows: list[Row], *, markdown: bool) -> None:
    titles = ("events/s", "", "reported, ms", "truth, ms", "error, us", "error, %", "worst, us", "within")
    if markdown:
        print(f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), sep="\n")
    else:
        print("{:>9}  {:18}{:>14}{:>14}{:>11}{:>10}{:>11}  {}".format(*titles))
    for row in rows:
        cells: tuple[Any, ...] = (
            f"{row.rate_per_s:,.0f}",
            f"{METRICS[row.metric]} {row.quantile}",
            f"{row.reported_s * 1e3:.3f}",
            f"{row.true_s * 1e3:.3f}",
            f"{row.error_s * 1e6:+.1f}",
            f"{row.error_s / row.true_s * 100:+.3f}",
            f"{row.worst_s * 1e6:+.1f}",
            "yes" if row.good else "NO",
        )
        if markdown:
            print(f"| {' | '.join(cells)} |")
        else:
            print("{:>9}  {:18}{:>14}{:>14}{:>11}{:>10}{:>11}  {}".format(*cells))


if __name__ == "__main__":
    sys.exit(main())
