"""The wire against the floor: `python tests/bench/wire.py [--streams 1000 --tokens 128 --repeats 3]`.

A server in C that knows the truth (it writes its own clock into every event) is read by the least client
there can be, in C with epoll, and by ours: the same load, in turn, several times.
Printed are ratios to the floor, the errors against the truth, and how busy other processes kept the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from burstline.loadgen.capture.capture import NO_STAMP, Capture, Reads, read_captures
from burstline.loadgen.capture.drive_report import CanaryReport, DriveReport
from burstline.loadgen.driver import drive
from burstline.loadgen.driver.job import Counters, Go, Job, Ready
from burstline.servers.engine import Engine
from burstline.servers.host.child import Failed
from burstline.servers.messages import Call, Target
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request

HERE = Path(__file__).parent
_STAMPS = re.compile(rb'"t":(\d+),"a":(\d+)')


class _Engine(Engine):
    """Sends a body of the size of a 512-token prompt; nothing is decoded here."""

    name = "bench"

    def encode(self, request: Request, target: Target) -> Call:
        return Call("POST", "/v1/completions", bytes(request.prompt_text or "", "ascii"))

    def hang_up_at(self, request: Request) -> int | None:
        return None


@dataclass
class Result:
    """What one client saw of one run; times in us."""

    cpu_per_event: float
    spread: float
    lag: tuple[float, float]
    kernel_lag: tuple[float, float]
    errors: dict[str, float]
    events_per_s: float
    reads_per_event: float
    rss_mb: float = 0.0
    late: float = 0.0
    max_pass_ms: float = 0.0
    n_resent: int = 0
    canary: CanaryReport | None = None


def build(name: str) -> Path:
    binary, source = HERE / "build" / name, HERE / f"{name}.c"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        binary.parent.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", binary, source], check=True)
    return binary


@contextmanager
def server(n_tokens: int, ttft_us: int, gap_us: int, *, jitter: bool = False) -> Iterator[int]:
    """The truth server on its own core; its port. With `jitter` gaps are half to one and a half `gap_us`."""
    argv = [*_pinned(0), build("truth"), "0", str(n_tokens), str(ttft_us), str(gap_us)]
    env = {**os.environ, **({"TRUTH_JITTER": "1"} if jitter else {})}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        yield int(process.stdout.readline())
        process.stdin.close()


def floor(port: int, n_streams: int, body_bytes: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "reads")
        argv = [*_pinned(1), build("floor"), str(port), str(n_streams), str(body_bytes), out]
        subprocess.run(argv, check=True)
        raw = out.read_bytes()
    cpu_ns, t0_ns = np.frombuffer(raw, np.int64, 2)
    captures, offset = [], 16
    for index in range(n_streams):
        sent_ns, n_reads, n_bytes = (int(x) for x in np.frombuffer(raw, np.int64, 3, offset))
        at, kernel, lengths = np.frombuffer(raw, np.int64, 3 * n_reads, offset + 24).reshape(3, n_reads)
        offset += 24 + 24 * n_reads
        kernel = np.where(kernel == 0, NO_STAMP, kernel - t0_ns)
        data, since_ns = raw[offset : offset + n_bytes], np.full(len(at), -1)
        reads = Reads(at - t0_ns, kernel, np.cumsum(lengths), data, since_ns)
        offset += n_bytes
        captures.append(Capture(index, 0, 0, None, sent_ns - int(t0_ns), int(at[-1] - t0_ns), reads))
    return judged(captures, int(t0_ns), cpu_ns / 1e9)


def _child(job: Job, conn: object) -> None:
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {1})
    ENGINES["bench"] = _Engine()
    drive.run(job, conn)


def ours(
    port: int,
    n_streams: int,
    body_bytes: int,
    concurrency: int | None = None,
    *,
    canary_port: int | None = None,
    meanwhile: Callable[[int], AbstractContextManager[object]] = lambda pid: nullcontext(),
) -> Result:
    """Our driver; `meanwhile` gets its process id and lasts as long as the load."""
    requests = tuple(Request(i, None, "x" * body_bytes, 512, 128) for i in range(n_streams))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Counters.create(folder / "counters", 1).close()
        job = Job(
            requests,
            array("q", bytes(8 * n_streams)),
            "bench",
            Target(f"http://127.0.0.1:{port}", "truth"),
            folder / "captures",
            folder / "counters",
            concurrency=concurrency,
            canary_port=canary_port,
        )
        parent, child = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(job, child))
        process.start()
        child.close()
        message = _heard(parent, process)
        if isinstance(message, Ready):
            with meanwhile(process.pid or 0):
                parent.send(Go(time.monotonic_ns() + 200_000_000))
                message = _heard(parent, process)
        process.join()
        if isinstance(message, Failed):
            raise message.error
        report: DriveReport = message.report
        captures = list(read_captures(job.captures))
    assert len(captures) == n_streams
    assert not report.failures, report.failures
    result = judged(captures, report.t0_ns or 0, report.cpu_s)
    result.canary = report.canary
    result.rss_mb = report.peak_rss_bytes / 1e6
    result.late = report.late.p99_ns / 1e3 if report.late else 0.0
    result.max_pass_ms, result.n_resent = report.max_pass_ns / 1e6, report.n_resent
    return result


def _heard(pipe: Any, process: Any) -> Any:
    wait([pipe, process.sentinel], timeout=300)
    if not pipe.poll():
        process.kill()
        raise RuntimeError(f"the driver ended without a word (exit code {process.exitcode})")
    return pipe.recv()


def judged(captures: list[Capture], t0_ns: int, cpu_s: float) -> Result:
    """Hold the stamps of every read against the server's own, event by event."""
    lags, kernel_lags, arrivals, ttft, e2e, itl, itl_true = [], [], [], [], [], [], []
    n_events, n_reads, first, last = 0, 0, [], []
    for capture in captures:
        reads = Reads.of(capture.reads)
        found = list(_STAMPS.finditer(reads.data))
        written = np.array([int(m[1]) for m in found]) - t0_ns
        read = np.searchsorted(reads.ends, [m.end() for m in found])
        at, kernel = reads.at_ns[read], reads.kernel_ns[read]
        stamp = np.where(kernel == NO_STAMP, at, kernel)
        n_events += len(found)
        n_reads += len(reads)
        lags.append(at - written)
        kernel_lags.append(stamp - written)
        arrivals.append(int(found[0][2]) - t0_ns)
        ttft.append(stamp[0] - written[0])
        e2e.append(stamp[-1] - written[-1])
        itl.append(np.diff(stamp))
        itl_true.append(np.diff(written))
        first.append(written[0])
        last.append(at[-1])
    lag, kernel_lag = (np.concatenate(x) / 1e3 for x in (lags, kernel_lags))
    itl_error = [
        np.percentile(np.concatenate(itl), q) - np.percentile(np.concatenate(itl_true), q) for q in (50, 99)
    ]
    return Result(
        cpu_s * 1e6 / n_events,
        (max(arrivals) - min(arrivals)) / 1e3,
        (float(np.percentile(lag, 50)), float(np.percentile(lag, 99))),
        (float(np.percentile(kernel_lag, 50)), float(np.percentile(kernel_lag, 99))),
        {
            "TTFT mean": float(np.mean(ttft)) / 1e3,
            "ITL p50": itl_error[0] / 1e3,
            "ITL p99": itl_error[1] / 1e3,
            "E2E mean": float(np.mean(e2e)) / 1e3,
        },
        n_events / (max(last) - min(first)) * 1e9,
        n_reads / n_events,
    )


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _pinned(core: int) -> list[str]:
    return ["taskset", "-c", str(core)] if (os.cpu_count() or 1) > 1 else []


def ratio(own: list[float], floors: list[float]) -> str:
    """Ours over the floor, run by run in pairs, since neighbours share the machine's mood."""
    ratios = np.divide(own, floors)
    return f"{np.median(ratios):.2f} ({ratios.min():.2f} ... {ratios.max():.2f})"


def show(name: str, r: Result) -> None:
    errors = ", ".join(f"{k} {v:+.0f}" for k, v in r.errors.items())
    print(
        f"{name:8} CPU {r.cpu_per_event:5.2f} us/event ({r.reads_per_event:.2f} reads)",
        f"burst spread {r.spread / 1e3:5.1f} ms",
        f"read lag p50 {r.lag[0]:4.0f} p99 {r.lag[1]:6.0f} us",
        f"kernel stamp - write p50 {r.kernel_lag[0]:4.1f} p99 {r.kernel_lag[1]:5.1f} us",
        f"{r.events_per_s:7.0f} events/s",
        f"error vs truth, us: {errors}",
        sep=" | ",
        flush=True,
    )


def conclude(own: list[Result], floors: list[Result]) -> None:
    """What stands after all repeats."""
    against = ""
    if floors:
        cpu = ratio([r.cpu_per_event for r in own], [r.cpu_per_event for r in floors])
        spread = ratio([r.spread for r in own], [r.spread for r in floors])
        against = f"of the floor's, median of pairs (least ... most): CPU {cpu}, burst spread {spread} | "
    print(
        f"ours     {against}peak RSS {max(r.rss_mb for r in own):.0f} MB",
        f"fully sent {min(r.late for r in own) / 1e3:.1f} ms after due at p99",
        f"longest pass {min(r.max_pass_ms for r in own):.2f} ms, resent {sum(r.n_resent for r in own)}",
        f"sustained {max(r.events_per_s for r in own):,.0f} events/s",
        sep=" | ",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ttft-ms", type=float, default=200)
    parser.add_argument("--gap-ms", type=float, default=20)
    parser.add_argument("--body-bytes", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=None)
    parser.add_argument("--skip-floor", action="store_true")
    args = parser.parse_args()
    floors: list[Result] = []
    own: list[Result] = []
    start, busy = time.monotonic(), busy_s()
    used = os.times()
    for _ in range(args.repeats):
        with server(args.tokens, int(args.ttft_ms * 1e3), int(args.gap_ms * 1e3)) as port:
            if not args.skip_floor:
                floors.append(floor(port, args.streams, args.body_bytes))
                show("floor", floors[-1])
            own.append(ours(port, args.streams, args.body_bytes, args.concurrency))
            show("ours", own[-1])
    ended = os.times()
    conclude(own, floors)
    our_s = sum(ended[:4]) - sum(used[:4])
    wall_s = time.monotonic() - start
    others = (busy_s() - busy - our_s) / wall_s / (os.cpu_count() or 1)
    print(f"other processes had {100 * others:.0f}% of the machine's CPU during the load")


if __name__ == "__main__":
    main()
