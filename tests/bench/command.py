"""The command around the burst: `python tests/bench/command.py [--repeats 5] [--cores N] [--tree DIR]`

`burstline run` fires 1000 requests of 512 tokens at the server in C (`truth.c`, Linux), 128 tokens each,
50,000 events a second. Printed, as minimum, median and maximum: seconds from the command to its first
request (and those of them in which the server answered what it was asked before), from the last token to its
end, and of `report`, `compare`, `--help` and a usage error, each beside P, the seconds of
`python -c "import pandas"` in the same minutes; their CPU seconds, which depend less on what else runs;
memory of all processes during the load and afterwards; how many modules each process has imported.
`--beside FILE` measures another client in turn, `vllm-rs` of vLLM's wheel; `--tree DIR` another checkout of
Burstline; `--over-time` adds the memory of each process over time, and what its imports took.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from c_truth import Shape, c_server

from burstline.models.model_folder import make_model
from tests.modules_probe.run import loaded_by_a_run
from tests.truth.rig import truth_server
from tests.truth.script import Script

CORES = sorted(os.sched_getaffinity(0))
PERIOD_S = 0.05
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
PACKAGES = ("burstline", "reports", "measure", "loadgen", "servers", "roofline", "workloads")


@dataclass(slots=True)
class Rows:
    """Every value that was measured, by the row's title; `per_p`: also shown as a multiple of P."""

    values: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def add(self, title: str, value: float, unit: str = "s") -> None:
        self.values.setdefault(title, []).append(value)
        self.units[title] = unit

    def lines(self) -> list[str]:
        p_s = statistics.median(self.values["P"])
        width = max(map(len, self.values))
        lines = []
        for title, values in self.values.items():
            three = (min(values), statistics.median(values), max(values))
            unit = self.units[title]
            shown = "  ".join(f"{value:8.2f}" if unit == "s" else f"{value:8,.0f}" for value in three)
            beside = f"   {three[1] / p_s:6.2f} P" if unit == "s" else ""
            lines.append(f"{title:<{width}}  {shown} {unit}{beside}")
        return lines


class Memory(threading.Thread):
    """The most memory that a command and all its descendants held together, each shared page counted once.

    `samples` are moments (ns, monotonic) and the MB of each process, by its role.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root, self._over = psutil.Process(pid), threading.Event()
        self.samples: list[tuple[int, Counter[str]]] = []
        self.start()

    def run(self) -> None:
        os.sched_setaffinity(0, CORES[:1])
        while not self._over.wait(PERIOD_S):
            held: Counter[str] = Counter()
            with suppress(psutil.Error):
                for process in (self._root, *self._root.children(recursive=True)):
                    with suppress(psutil.Error):
                        role = role_of(process.cmdline())
                        held[role] += process.memory_full_info().pss / 1e6
            self.samples.append((time.monotonic_ns(), held))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def most(self, start_ns: int, end_ns: int) -> float:
        return max((mb.total() for at, mb in self.samples if start_ns <= at <= end_ns), default=float("nan"))

    def lines(self, start_ns: int, n_rows: int = 16) -> list[str]:
        """MB of each process at some moments, seconds from `start_ns`."""
        roles = sorted({role for _, held in self.samples for role in held})
        rows = [self.samples[k * len(self.samples) // n_rows] for k in range(n_rows)] if self.samples else []
        lines = [f"{'s':>7}" + "".join(f"{role:>10}" for role in (*roles, "all"))]
        for at_ns, held in rows:
            cells = (*(held[role] for role in roles), held.total())
            lines.append(f"{(at_ns - start_ns) / 1e9:7.2f}" + "".join(f"{mb:10.0f}" for mb in cells))
        return lines


ROLES = {
    "burstline.loadgen.driver.drive": "driver",
    "burstline.servers.host.watch": "watcher",
    "burstline.measure.record.decode": "decoder",
    "burstline.loadgen.driver.canary": "canary",
    "burstline.servers.host.keeper": "keeper",
}


def role_of(argv: Sequence[str]) -> str:
    """A process of a run by its command line: the module that it runs."""
    return next((ROLES[word] for word in argv if word in ROLES), "main")


def import_lines(log: str) -> list[str]:
    """Of what PYTHONPROFILEIMPORTTIME printed: seconds by library, all processes together."""
    took: Counter[str] = Counter()
    for own_us, name in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", log):
        took[name.partition(".")[0]] += int(own_us) / 1e6
    rows = [f"{seconds:7.2f} s  {library}" for library, seconds in took.most_common(12)]
    return [f"{took.total():7.2f} s  imports of all processes, of which:", *rows]


def started(args: argparse.Namespace, argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A command on the client's cores; what it prints goes to `log`."""
    with log.open("wb") as file:
        # In its own tree: `-m` looks into the working directory first.
        process = subprocess.Popen(argv, env=args.env, cwd=args.tree, stdout=file, stderr=subprocess.STDOUT)
    psutil.Process(process.pid).cpu_affinity(args.cores)
    return process


def answered(process: subprocess.Popen[bytes], log: Path) -> int:
    """When (monotonic ns) a command's figures stood in what it prints; waits until it has ended otherwise."""
    while b"TTFT" not in log.read_bytes() and not os.waitid(os.P_PID, process.pid, ENDED):
        time.sleep(0.005)
    return time.monotonic_ns()


def waited(process: subprocess.Popen[bytes], log: Path, codes: Sequence[int]) -> tuple[int, float]:
    """When (monotonic ns) a command ended, and the CPU seconds of it and of all that it waited for."""
    _, status, used = os.wait4(process.pid, 0)
    end_ns = time.monotonic_ns()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in codes:
        raise SystemExit(f"{process.args} ended with {process.returncode}:\n{log.read_text()}")
    return end_ns, used.ru_utime + used.ru_stime


def fired(args: argparse.Namespace, tool: str, command: list[str], out: Path, rows: Rows) -> None:
    """One run of a load generator at a server of its own."""
    gap_us = round(args.streams / args.rate_events * 1e6)
    shape = Shape(args.streams, 512, args.output_tokens, 200_000, gap_us)
    out.mkdir(parents=True)
    with c_server(shape, out) as (port, log):
        argv = [word.replace("PORT", str(port)) for word in command]
        start_ns = time.monotonic_ns()
        process = started(args, argv, out / "log.txt")
        memory = Memory(process.pid) if args.memory else None
        answer_ns = answered(process, out / "log.txt")
        end_ns, cpu_s = waited(process, out / "log.txt", (0, 4))
        if memory:
            memory.stop()
        everything = log()
        truth = everything.last(args.streams)
    first_ns, last_ns = int(truth.first_ns.min()), truth.ended_ns
    if memory:
        rows.add(f"{tool}: memory during the load", memory.most(first_ns, last_ns), "MB")
        rows.add(f"{tool}: memory afterwards", memory.most(last_ns, end_ns), "MB")
        first_s, last_s = ((at_ns - start_ns) / 1e9 for at_ns in (first_ns, last_ns))
        moments = f"first request {first_s:.2f} s, last token {last_s:.2f} s"
        if tool == "burstline":
            args.held = [*memory.lines(start_ns), moments]
        return
    rows.add(f"{tool}: first request", (first_ns - start_ns) / 1e9)
    rows.add(f"{tool}: of it the server's answer before", everything.answered_s_before(args.streams))
    rows.add(f"{tool}: last token to the answer", (answer_ns - last_ns) / 1e9)
    rows.add(f"{tool}: last token to the end", (end_ns - last_ns) / 1e9)
    rows.add(f"{tool}: own time beyond the load", (end_ns - start_ns - last_ns + first_ns) / 1e9)
    rows.add(f"{tool}: CPU of all processes", cpu_s)
    rows.add(f"{tool}: spread of the burst", truth.spread_ms, "ms")


def ended(args: argparse.Namespace, title: str, argv: Sequence[str], rows: Rows, *codes: int) -> None:
    """How long a command takes that fires nothing."""
    start_ns = time.monotonic_ns()
    end_ns, cpu_s = waited(started(args, argv, args.log), args.log, codes or (0,))
    rows.add(title, (end_ns - start_ns) / 1e9)
    rows.add(f"{title}: CPU", cpu_s)


def of_burstline(args: argparse.Namespace, tokenizer: Path, folder: Path) -> Callable[[int, Rows], None]:
    """One round of all rows of ours."""
    ours = [sys.executable, "-m", "burstline"]
    words = "run --engine vllm --url http://127.0.0.1:PORT --model truth -q"
    words += f" --requests {args.streams} --prompt-tokens 512 --output-tokens {args.output_tokens}"
    run = [*ours, *words.split(), "--tokenizer", str(tokenizer), "--out"]

    words = f"bench serve --backend vllm --model truth --prompt-token-ids --num-prompts {args.streams}"
    words += " --base-url http://127.0.0.1:PORT --ignore-eos --dataset-name random --random-input-len 512"
    words += f" --random-output-len {args.output_tokens}"
    beside = [str(args.beside), *words.split(), "--tokenizer", str(tokenizer)]

    def one_round(k: int, rows: Rows) -> None:
        ended(args, "P", [sys.executable, "-c", "import pandas"], rows)
        made = []
        for args.memory in (False, True):
            out = folder / f"run-{k}-{args.memory}"
            fired(args, "burstline", [*run, str(out / "runs")], out, rows)
            made += map(str, (out / "runs").iterdir())
            if args.beside:
                fired(args, args.beside.name, beside, folder / f"beside-{k}-{args.memory}", rows)
        ended(args, "burstline report", [*ours, "report", made[0]], rows)
        words = ["compare", *made, "--anyway", "--format", "html", "--out", str(folder / "compare.html")]
        ended(args, "burstline compare", [*ours, *words], rows, 0, 4)
        ended(args, "burstline --help", [*ours, "--help"], rows)
        ended(args, "burstline run --help", [*ours, "run", "--help"], rows)
        ended(args, "a usage error (--requests 0)", [*ours, "run", "--requests", "0"], rows, 2)

    if args.over_time:
        out, plain = folder / "imports", args.env
        args.memory, args.env = False, plain | {"PYTHONPROFILEIMPORTTIME": "1"}
        fired(args, "imports", [*run, str(out / "runs")], out, Rows())
        args.env = plain
        print("\n".join(import_lines((out / "log.txt").read_text(errors="replace"))))
    return one_round


def print_modules(args: argparse.Namespace, folder: Path) -> None:
    """By process: modules at the first request and at the end."""
    with truth_server(Script(ttft_s=1.5, gaps_s=(0.05,)), thread=True) as truth:
        load = ("--requests", "8", "--prompt-tokens", "16", "--output-tokens", "3")
        found = loaded_by_a_run(truth, folder / "modules", load, args.tree)
    for moment in ("load", "exit"):
        each = [one for one in found if one.moment == moment]
        said = ", ".join(f"{one.role} {len(one.modules)} ({one.pss_bytes / 1e6:.0f} MB)" for one in each)
        print(f"modules at the {moment:<4}  {sum(len(one.modules) for one in each):,} in all: {said}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--repeats", type=int, default=5)
    add("--streams", type=int, default=1000)
    add("--output-tokens", type=int, default=128)
    add("--rate-events", type=float, default=50_000, help="events a second of all streams together")
    add("--cores", type=int, default=len(CORES), help="on so many cores the command runs, the last ones")
    add("--tree", type=Path, default=Path(__file__).parents[2], help="the checkout that is measured")
    add("--beside", type=Path, metavar="FILE", help="a client to measure in turn: vllm-rs")
    add("--over-time", action="store_true", help="memory of each process over time, and import times")
    args = parser.parse_args()
    args.tree = args.tree.resolve()
    if shutil.which("cc") is None:
        parser.error("the server that is fired at needs a C compiler")
    args.cores = CORES[-args.cores :]
    args.env = os.environ | {"PYTHONPATH": str(args.tree), "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    # As an installed package has it: bytecode is there, even where Python is told to write none.
    args.env.pop("PYTHONDONTWRITEBYTECODE", None)
    packages = [args.tree / name for name in PACKAGES]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *packages], env=args.env, check=True)
    return args


def main() -> None:
    args = arguments()
    folder, rows = Path(tempfile.mkdtemp(prefix="command-")), Rows()
    args.log = folder / "log.txt"
    one_round = of_burstline(args, make_model(folder / "model", "tiny"), folder)
    for k in range(args.repeats):
        one_round(k, rows)
    print(f"{args.streams} x 512 -> {args.output_tokens} on cores {args.cores}; minimum, median, maximum")
    print("\n".join(rows.lines()))
    if args.over_time:
        print("\n".join(["MB of each process", *args.held]))
    print_modules(args, folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
