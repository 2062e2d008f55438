"""How good is my load generator? `python tests/bench/peers.py [--envs DIR] [--markdown] [TOOL ...]` (Linux)

Every tool in turn asks a server that knows the truth for the same: 1000 streams at once, 512 prompt tokens,
128 output tokens each, 50,000 events a second in all. Printed is what each reports beside what the server's
log says, and what the client cost. `sh tests/bench/peers_env.sh DIR` installs the others.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import psutil
from peer_tools import TOOLS, Load, Reported
from peer_truth import Shape, Truth, c_server, python_server
from wire import busy_s

from burstline.servers.host.sources import ProcessTree

PERIOD_S = 0.2
TIMEOUT_S = 150.0
HUB_NAME = "burstline/tiny"
CORES = sorted(os.sched_getaffinity(0))
HEADER = (
    *("tool", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "E2E p50, ms", "E2E p99, ms"),
    *("burst spread, ms", "most in flight", "start-up, s", "CPU, us/event (to its end)", "peak RSS, MB"),
)
LEGEND = """\
Cells: reported / true (error); true counts from when the kernel had the whole request to when the server
handed the event to the kernel, so that a tool's own queue before it sends is error where it counts that in.
Start-up: to the burst's first byte at the server. CPU: of all the tool's processes from that byte until its
sockets were empty after the last and the E2E p99 that it reports had passed; in brackets until it was done
(ours decodes only then, and writes its page). RSS: their sum. Nothing is subtracted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The tool's processes at one instant; `unread_bytes` wait in its sockets."""

    at_ns: int
    cpu_s: float
    rss_bytes: float
    unread_bytes: int


class Meter(threading.Thread):
    """Samples a process tree, nice'd and on the server's core: it must not take from the tool."""

    def __init__(self, pid: int, port: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._port = pid, port
        self._tree, self._over = ProcessTree(), threading.Event()
        self.samples: list[Sample] = []
        self._before_s = ended_cpu_s()
        self.start()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        os.sched_setaffinity(0, CORES[:1])
        self._tree.adopt([self._pid])
        while not self._over.wait(PERIOD_S):
            if len(self.samples) % 3 == 0:
                self._tree.adopt_descendants(self._pid)
            seen = self._tree.read()
            unread = unread_bytes(self._port)
            self.samples.append(Sample(time.monotonic_ns(), seen["cpu_s"], seen["rss_bytes"], unread))

    def stop(self) -> None:
        """Once the tool has ended: what it used after the last sample counts too."""
        self._over.set()
        self.join()
        self.cpu_s = max(ended_cpu_s() - self._before_s, *(sample.cpu_s for sample in self.samples), 0.0)

    def cpu_us(self, truth: Truth, e2e_ms: float) -> tuple[float, float]:
        """Per event, from the burst's first byte: until the tool had all events, and until it was done.

        That its sockets are empty does not say that it has looked at what it took from them; its E2E does.
        """
        known_ns = max(truth.ended_ns, int(truth.first_ns.min() + e2e_ms * 1e6))
        drained = (s.at_ns for s in self.samples if s.at_ns >= known_ns and not s.unread_bytes)
        at_ns, cpu_s = zip(*((s.at_ns, s.cpu_s) for s in self.samples), strict=True)
        start, end = np.interp([truth.first_ns.min(), next(drained, at_ns[-1])], at_ns, cpu_s)
        return (end - start) * 1e6 / truth.n_events, (self.cpu_s - start) * 1e6 / truth.n_events


def ended_cpu_s() -> float:
    """What all that this process started and waited for has used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def unread_bytes(port: int) -> int:
    """What came from a local port and was not read yet, by the kernel's own table."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(int(row[4].split(":")[1], 16) for row in rows if row[2].endswith(f":{port:04X}"))


def measured(name: str, args: argparse.Namespace, shape: Shape, folder: Path) -> tuple[list[str], str]:
    """A tool's row of the table, and a remark on its run."""
    tool, out = TOOLS[name], folder / name.replace(" ", "-")
    bin_ = tool.bin(args.envs, Path(sys.executable).parent)
    if not (bin_ / "python").exists():
        hint = f"not installed: sh tests/bench/peers_env.sh {args.envs} {tool.environment}"
        return [name, hint + ", or name one in BURSTLINE_VLLM_PYTHON" * (tool.package == "vllm")], ""
    named = f"{name} {version(tool.package, bin_)}"
    out.mkdir()
    os.sched_setaffinity(0, CORES[:1])
    with (python_server if args.python_server else c_server)(shape, out) as (port, log):
        os.sched_setaffinity(0, CORES if args.share_cores and tool.parallel else CORES[1:] or CORES)
        model = model_in(folder / "hub")
        lengths = shape.n_streams, shape.n_prompt_tok, shape.n_output_tok
        load = Load(f"http://127.0.0.1:{port}", *lengths, model, HUB_NAME, out)
        start_ns = time.monotonic_ns()
        failure, meter = run(tool.command(load, bin_), out, folder / "hub", port)
        truth = log().last(shape.n_streams)
    try:
        if failure:
            raise RuntimeError(failure)
        reported = tool.read(out)
    except (RuntimeError, OSError, LookupError, TypeError, StopIteration) as error:
        return [named, f"no result: {error!r}; see {out}/tool.log"], ""
    true = truth.as_reported(shape.n_output_tok, tool.itl_per_request)
    row = [
        named,
        *(beside(getattr(reported, row.name), getattr(true, row.name)) for row in fields(Reported)[1:6]),
        f"{truth.spread_ms:.1f}",
        str(truth.most_in_flight),
        f"{(truth.first_ns.min() - start_ns) / 1e9:.1f}",
        "{:.1f} ({:.1f})".format(*meter.cpu_us(truth, reported.e2e_p99 or true.e2e_p99)),
        f"{max(sample.rss_bytes for sample in meter.samples) / 1e6:,.0f}",
    ]
    done = f"{reported.n_ok} of {shape.n_streams} done by its word, {true.n_ok} by the server's"
    late = f"the server was late by {truth.late_ms(shape):.2f} ms at p99"
    return row, "; ".join(filter(None, [reported.remark, done, late]))


def run(argv: Sequence[str], out: Path, hub: Path, port: int) -> tuple[str | None, Meter]:
    """Runs a tool to its end, watched; why it failed, if it did."""
    offline = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_PROXY": "*"}
    with (out / "tool.log").open("wb") as file:
        process = psutil.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=os.environ | offline
        )
        meter = Meter(process.pid, port)
        try:
            code = process.wait(TIMEOUT_S)
        except psutil.TimeoutExpired:
            return f"not done after {TIMEOUT_S:.0f} s", meter
        finally:
            meter.stop()
            for each in [*process.children(recursive=True), process] if process.is_running() else ():
                each.kill()
    # Ours says with 4 that a run was not VALID; it has reported all the same.
    return None if code in (0, 4) else f"exit code {code}", meter


def model_in(hub: Path) -> Path:
    """A model folder with a tokenizer, lying where the Hub's own cache would have it."""
    root, revision = hub / "hub" / f"models--{HUB_NAME.replace('/', '--')}", "0" * 40
    folder = root / "snapshots" / revision
    if not folder.exists():
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text(revision)
        argv = [sys.executable, "-m", "burstline", "make-model", folder, "--like", "tiny"]
        subprocess.run(argv, check=True, capture_output=True)
    return folder


def version(package: str, bin_: Path) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([bin_ / "python", "-c", code], capture_output=True, text=True).stdout.strip()


def beside(reported: float | None, true: float) -> str:
    """What was reported, what was true, and by how much the first is off."""
    if reported is None:
        return f"- / {true:.2f}"
    return f"{reported:.2f} / {true:.2f} ({100 * (reported / true - 1):+.2f}%)"


def table(rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """The rows under their header; one that has only a remark to show runs on."""
    rows = [HEADER, *rows]
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|---" * len(HEADER) + "|", *lines[1:]])
    widths = [max(len(row[i]) for row in rows if len(row) == len(HEADER)) for i in range(len(HEADER))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def where(args: argparse.Namespace) -> str:
    """The load, the server, and who ran on which core."""
    server = "servers/truth (Python)" if args.python_server else "tests/bench/truth.c"
    load = f"{args.streams} streams, {args.output_tokens} events each, {args.rate_events:,.0f}/s, by {server}"
    if len(CORES) == 1:
        return f"{load}; one core for all."
    shared = ", which the parallel ones may use too" if args.share_cores else ""
    return f"{load} on core {CORES[0]}{shared}, each tool on {', '.join(map(str, CORES[1:]))}."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("tools", nargs="*", metavar="TOOL", help=f"of: {', '.join(TOOLS)} (all)")
    add("--envs", type=Path, default=Path(".venv-peers"), help="where peers_env.sh made the environments")
    add("--streams", type=int, default=1000)
    add("--output-tokens", type=int, default=128)
    add("--rate-events", type=float, default=50_000, help="events a second of all streams together")
    add("--ttft-ms", type=float, default=500, help="from a request's arrival to its first token")
    add("--share-cores", action="store_true", help="parallel tools may use the server's core too")
    add("--python-server", action="store_true", help="as where there is no cc: good for 25,000 events/s")
    add("--markdown", action="store_true")
    args = parser.parse_args()
    unknown = [name for name in args.tools if name not in TOOLS]
    if unknown:
        parser.error(f"{unknown[0]}: expected one of {', '.join(TOOLS)}")
    args.python_server |= shutil.which("cc") is None
    return args


def main() -> None:
    args = arguments()
    gap_us = round(args.streams / args.rate_events * 1e6)
    shape = Shape(args.streams, 512, args.output_tokens, round(args.ttft_ms * 1e3), gap_us)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    rows, remarks = [], []
    start, busy, own_s = time.monotonic(), busy_s(), sum(os.times()[:4])
    for name in dict.fromkeys(args.tools) or TOOLS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        row, remark = measured(name, args, shape, folder)
        rows.append(row)
        remarks.append(f"- {name}: {TOOLS[name].says}" + f" ({remark})" * bool(remark))
    wall_s = time.monotonic() - start
    others = (busy_s() - busy - sum(os.times()[:4]) + own_s) / wall_s / (os.cpu_count() or 1)
    print(table(rows, args.markdown))
    print(f"\n{where(args)} Others had {100 * others:.0f}% of the machine's CPU. {wall_s:.0f} s in all.")
    print("\n".join([LEGEND, *remarks]))
    print(f"What every tool wrote lies in {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
