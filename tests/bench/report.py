"""What a page costs: `python tests/bench/report.py [--requests 1000 --prompt-tokens 512 --output-tokens 64]`.

Writes a run with the product's own writers (plan, captures as vLLM would have answered, telemetry), then
times whole processes: decoding with summary and page, summary and page alone, and two such runs compared.
Printed are wall and CPU seconds, the peak resident memory of the largest process, and how large the page is.
`--repeats 3` prints the fastest of three.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from burstline.loadgen.capture.capture import Capture, CaptureWriter, Reads
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.tables import telemetry_table
from burstline.servers.host.telemetry import Row
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Plan, Shape, make_plan
from burstline.workloads.prompts import vocabulary_from_size
from burstline.workloads.spec import LoadSpec

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-9716abe54105b8f5","object":"text_completion","created":1795219608,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":%b,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":null}],'
    b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)
"""One of vLLM 0.32's, which counts in every event where it is asked to."""
GAUGES = ("running", "waiting", "kv_used_fraction", "preemptions", "generation_tokens", "prompt_tokens")
PROCESS = ("rss_bytes", "pss_bytes", "anon_bytes", "cpu_s", "n_threads")
EVERY_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, help="requests per second; all at once where not given")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(asked, asked.keep or Path(folder))


def measure(asked: argparse.Namespace, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Runs are made in a process of their own: a child's peak memory begins with that of who started it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(make_run, [folder] * 2, [asked] * 2, range(2)))
    told = f"{asked.requests:,} requests of {asked.prompt_tokens} -> {asked.output_tokens} tokens"
    print(f"{told}\n{'':24}  wall s   CPU s  peak MB")
    for run in runs:
        timed("report --decode", asked.repeats, "report", "--decode", str(run))
    timed("report", asked.repeats, "report", str(runs[0]))
    page = folder / "compared.html"
    both = ("compare", *map(str, runs), "--anyway", "--format", "html", "--out", str(page))
    timed("compare", asked.repeats, *both)
    timed("text", asked.repeats, "report", "--format", "text", str(runs[0]))
    timed("formats", asked.repeats, "report", str(runs[0]), "--to", str(folder / "exported"))
    sizes = {"page": runs[0] / "report.html", "compared": page, "records": runs[0] / "records.parquet"}
    print(", ".join(f"{name} {path.stat().st_size / 1e6:.2f} MB" for name, path in sizes.items()))


def timed(name: str, repeats: int, *argv: str) -> None:
    """The fastest of `repeats`; memory is the largest of any process that took part."""
    rows = sorted(_once(argv) for _ in range(repeats))
    wall_s, cpu_s, peak_mb = rows[0]
    print(f"{name:24}  {wall_s:6.2f}  {cpu_s:6.2f}  {peak_mb:7.0f}", flush=True)


def _once(argv: tuple[str, ...]) -> tuple[float, float, float]:
    began_s = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "burstline", *argv], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 4):  # 4: these runs are nothing that can be ranked
        raise SystemExit(f"burstline {argv[0]} ended with {child.returncode}")
    return time.perf_counter() - began_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def make_run(folder: Path, asked: argparse.Namespace, seed: int) -> Path:
    """A run of a server that never was: a queue of its own pace, one read for each event."""
    rng = np.random.default_rng(seed)
    due_s = np.arange(asked.requests) / asked.rate if asked.rate else np.zeros(asked.requests)
    lengths = (Lengths(n, n) for n in (asked.prompt_tokens, asked.output_tokens))
    plan = make_plan(Shape(*lengths), due_s.tolist(), vocabulary_from_size(32_000), seed=0)
    how = parse_arrival("constant" if asked.rate else "burst")
    spec = LoadSpec(arrival=how, rate=asked.rate, salt=f"5eed{seed}")
    title = f"{asked.requests:,} requests of {asked.prompt_tokens} -> {asked.output_tokens} tokens"
    manifest = Manifest(engine="vllm", workload="bench", title=title, asked=spec)
    run = RunDir.create(folder, manifest)
    run.save_plan(plan)
    spool, last_ns = CaptureWriter(run.captures), 0
    for capture in captures(plan, asked, rng):
        last_ns = max(last_ns, capture.closed_ns or 0)
        spool.put(lambda capture=capture: capture)
    spool.close()
    run.save("telemetry.parquet", [telemetry_table(telemetry(last_ns, rng))])
    run.save_manifest(replace(run.manifest, status="complete"))
    return run.path


def captures(plan: Plan, asked: argparse.Namespace, rng: np.random.Generator) -> Iterator[Capture]:
    """First tokens come 1 ms after each other in a burst, else 50 ms after the request; then each 20 ms."""
    n_tok = asked.output_tokens
    data, ends = reply(asked.prompt_tokens, n_tok)
    for k, due_ns in enumerate(plan.due_ns):
        sent_ns = due_ns + (0 if asked.rate else k * 10_000) + 50_000
        first_ns = sent_ns + int((0.05 + (0 if asked.rate else k * 0.001)) * 1e9 * rng.uniform(0.98, 1.02))
        gaps_ns = (rng.lognormal(0, 0.2, n_tok) * 20e6).astype(np.int64)
        at_ns = np.cumsum(np.r_[first_ns, gaps_ns])
        kernel_ns = at_ns - rng.integers(5_000, 60_000, len(at_ns))
        reads = Reads(at_ns, kernel_ns, ends, data, np.full(len(at_ns), -1))
        yield Capture(k, due_ns, sent_ns - 40_000, None, sent_ns, int(at_ns[-1]) + 20_000, reads)


def reply(n_prompt_tok: int, n_tok: int) -> tuple[bytes, np.ndarray]:
    """A reply's bytes and where each of its reads ends: one for each token, the head with the first."""
    events = [
        EVENT % (b'"length"' if k == n_tok else b"null", n_prompt_tok, n_prompt_tok + k, k)
        for k in range(1, n_tok + 1)
    ]
    events.append(b"data: [DONE]\n\n")
    reads = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    reads[0], reads[-1] = HEAD + reads[0], reads[-1] + b"0\r\n\r\n"
    return b"".join(reads), np.cumsum([len(read) for read in reads], dtype=np.int64)


def telemetry(last_ns: int, rng: np.random.Generator) -> Iterator[Row]:
    names = [("engine", name) for name in GAUGES]
    names += [(source, name) for source in ("server", "client") for name in PROCESS]
    names += [("gpu0", "memory_used_bytes"), ("gpu0", "power_w")]
    for at_ns in range(-1_000_000_000, last_ns + 1_000_000_000, int(EVERY_S * 1e9)):
        for (source, name), value in zip(names, rng.uniform(0, 1e9, len(names)).tolist(), strict=True):
            yield Row(at_ns, source, name, value)
        yield Row(at_ns, "host", "others_cpu_s", 1 + 1e-11 * at_ns)  # 1% of a core


if __name__ == "__main__":
    main()
