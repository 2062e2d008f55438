"""Sessions, traces and very large plans at a server of known truth: `python tests/bench/loads.py [PART ...]`.

sessions  1,000 sessions of 10 turns: whether a turn is sent before its predecessor ends, how exactly think
          times are kept, the error of TTFT beside that of as many single requests, whether memory grows
traces    500 rows of each format: how far each arrival at the server is from the time in the file
million   how much later the first byte of a run of 1,000,000 requests is than that of 1,000

Goals: no turn early; think times and arrivals within 1 ms at p99; memory flat; the first byte within 5 s.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from burstline.loadgen.metrics.sessions import turns_of
from burstline.loadgen.record.rundir import Run, open_run
from tests.truth.rig import TruthRig, truth_server
from tests.truth.script import Script
from tests.workloads import made_files

MS = 1e6
BARE = "-q"


def command(out: Path, truth: TruthRig, *load: str) -> list[str]:
    where = ("--engine", "truth", "--url", truth.url, "--out", str(out), *BARE)
    return [sys.executable, "-m", "burstline", "run", *where, *load]


def ran(truth: TruthRig, out: Path, *load: str) -> Run:
    """The run of such a load, whose outcomes are all ok."""
    truth.reset()
    subprocess.run(command(out, truth, *load), check=False, stdout=subprocess.DEVNULL, timeout=230)
    (path,) = out.iterdir()
    run = open_run(path)
    assert (run.records["outcome"] == "ok").all(), run.records["outcome"].value_counts()
    return run


def p(values: np.ndarray, unit: str = "ms") -> str:
    p50, p99, most = np.quantile(values, [0.5, 0.99, 1.0])
    return f"p50 {p50:.3f}  p99 {p99:.3f}  max {most:.3f} {unit}"


def sessions(folder: Path, n_sessions: int, n_turns: int) -> bool:
    script = Script(ttft_s=0.05, gaps_s=(0.005,))
    shape = ("--turns", str(n_turns), "--turn-tokens", "16", "--prompt-tokens", "32", "--output-tokens", "8")
    with truth_server(script) as truth:
        many = ("--sessions", str(n_sessions), "--concurrency", "100", "--think-s", "0.1..0.3")
        run = ran(truth, folder / "sessions", *many, *shape)
        served = {row.index: row for row in truth.log() if row.index is not None}
        error_ms = ttft_error_ms(run, served)
        n = len(run.records)
        span_s = float(run.columns.closed_s.max())
        rate = ("--requests", str(n), "--rate", str(round(n / span_s)))
        single = ran(truth, folder / "single", *rate, *shape[4:])
        single_ms = ttft_error_ms(single, {row.index: row for row in truth.log() if row.index is not None})
    turns = turns_of(run)
    assert turns is not None
    early, kept_ms = 0, []
    for k in np.flatnonzero(~turns.opens):
        parents = turns.parents[turns.starts[k] : turns.starts[k + 1]]
        over_ns = max(served[int(j)].event_ns[-1] for j in parents)
        waited_ns = served[int(k)].arrival_ns - over_ns
        early += waited_ns < turns.pause_s[k] * 1e9
        kept_ms.append(waited_ns / MS - turns.pause_s[k] * 1e3)
    watched = run.telemetry
    rss = watched[(watched["source"] == "client") & (watched["name"] == "rss_bytes")]
    rss = rss[rss["at_ns"] > 0].groupby(rss["at_ns"] // 1_000_000_000)["value"].sum() / 2**20
    third = max(1, len(rss) // 3)
    first, last = float(rss.iloc[third : 2 * third].mean()), float(rss.iloc[2 * third :].mean())
    kept = np.array(kept_ms)
    print(f"sessions: {n:,} turns in {n_sessions:,} sessions over {span_s:.1f} s")
    print(f"  turns sent before their predecessor's end and pause  {early}")
    print(f"  at the server later than the pause                   {p(kept)}")
    print(f"  TTFT, reported less true, of turns                   {p(np.abs(error_ms))}")
    print(f"  TTFT, reported less true, of single requests         {p(np.abs(single_ms))}")
    print(f"  client's resident memory, second and last third      {first:.1f} and {last:.1f} MiB")
    return not early and float(np.quantile(kept, 0.99)) <= 1.0 and last <= 1.1 * first


def ttft_error_ms(run: Run, served: dict) -> np.ndarray:
    """Reported less true time from the request's arrival to its first token, by request; in ms."""
    t0_ns = run.manifest.drivers[0].t0_ns
    c = run.columns
    true_ns = np.array([served[k].token_ns[0] - t0_ns for k in range(len(c))])
    return c.first_s * 1e3 - true_ns / MS


def recorded_s(name: str, path: Path) -> list[float]:
    """The times in a made file, read apart from the product, from the first."""
    if path.suffix == ".csv":
        with path.open() as file:
            rows = list(csv.DictReader(file))
        if name == "Azure":
            at = [datetime.fromisoformat(row["TIMESTAMP"]).timestamp() for row in rows]
        else:
            at = [float(row["Timestamp"]) for row in rows]
    else:
        scale = 1e-3 if name == "Mooncake" else 1.0
        at = [json.loads(line)["timestamp"] * scale for line in path.read_text().splitlines()]
    return [at_s - at[0] for at_s in at]


def traces(folder: Path, n: int) -> bool:
    good = True
    formats: dict[str, Callable[[Path, int], Path]] = {**made_files.TRACES, "JSON lines": made_files.jsonl}
    from tests.servers.tiny_model import make_tiny_model

    tokenizer = str(make_tiny_model(folder / "model"))
    with truth_server(Script(ttft_s=0.01, gaps_s=(0.001,))) as truth:
        for name, make in formats.items():
            path = make(folder, n)
            load = ("--trace", str(path))
            if name == "JSON lines":
                load = ("--data", str(path), "--arrival", "replay", "--tokenizer", tokenizer)
            run = ran(truth, folder / name, *load)
            t0_ns = run.manifest.drivers[0].t0_ns
            arrived = {row.index: row.first_byte_ns - t0_ns for row in truth.log() if row.index is not None}
            due_ms = 1e3 * np.array(recorded_s(name, path))
            late_ms = np.array([arrived[k] / MS for k in range(len(due_ms))]) - due_ms
            print(f"traces: {name:<10} {n} arrivals, from the time in the file  {p(late_ms)}")
            good &= len(run.records) == n and float(np.quantile(np.abs(late_ms), 0.99)) <= 1.0
    return good


@contextmanager
def first_byte_s(folder: Path, truth: TruthRig, n: int, *load: str) -> Iterator[tuple[float, float]]:
    """Seconds from the command's start to its first request at the server, and the largest process in MiB."""
    import psutil

    truth.reset()
    began_ns = time.monotonic_ns()
    process = subprocess.Popen(
        command(folder / f"{n}{load[0]}", truth, "--requests", str(n), *load),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    peak, arrived = 0.0, None
    try:
        while arrived is None and time.monotonic_ns() - began_ns < 100e9:
            time.sleep(0.2)
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            peak = max(peak, max(each.memory_info().rss for each in family) / 2**20)
            arrived = min((row.arrival_ns for row in truth.log() if row.index is not None), default=None)
        assert arrived is not None, "no request within 100 s"
        yield (arrived - began_ns) / 1e9, peak
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5.0)  # what was captured is not needed
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def million(folder: Path) -> bool:
    good = True
    loads = (("--rate", "50"), ("--concurrency", "10"))
    for load in loads:
        with truth_server(Script(ttft_s=0.2)) as truth:
            times = {}
            for n in (1000, 1_000_000):
                with first_byte_s(folder, truth, n, *load) as (times[n], peak):
                    print(
                        f"million: {n:>9,} requests {' '.join(load):<17} first request at the server after "
                        f"{times[n]:.2f} s, largest process {peak:.0f} MiB"
                    )
        good &= times[1_000_000] - times[1000] <= 5.0 and peak < 500
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="sessions, traces, million (all)")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rows", type=int, default=500)
    args = parser.parse_args()
    parts = args.parts or ["sessions", "traces", "million"]
    if unknown := set(parts) - {"sessions", "traces", "million"}:
        parser.error(f"no part {', '.join(unknown)}; there are sessions, traces and million")
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "sessions" in parts:
            good &= sessions(folder, args.sessions, args.turns)
        if "traces" in parts:
            good &= traces(folder, args.rows)
        if "million" in parts:
            good &= million(folder)
    print("every goal is met" if good else "a goal is missed")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
