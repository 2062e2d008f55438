"""What the product says of its numbers, tried out: `python tests/bench/claims.py [--only bursts|canary]`.

1. Ten identical bursts at the embedded engine: how often three repeats' intervals hold the median of all
   ten, and how often bursts of one system are called different: single ones (45 pairs) and three and three.
2. The canary's p99 beside the true p99 error of the same driver at a server in C, under five disturbances.
   Events that share a read are off by the gaps between them, so the server's gaps are drawn as the canary's:
   20 ms, half to one and a half of it.

Exits with 1 where a claim does not hold: a canary's p99 is further off than 20% and 50 us, a pair of single
bursts is called different, or more than 1 in 20 of three against three.
On a quiet machine with two cores: about 8 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from burstline.loadgen.driver.canary import canary
from burstline.measure.record.rundir import open_run
from burstline.measure.stats.estimates import Estimate
from burstline.measure.stats.significance import Answer, Contrast
from burstline.reports.model.comparison import Contender, contrasts_of, view_of
from tests.bench.wire import ours, server

N_BURSTS = 10
BURST = ("--requests", "200", "--prompt-tokens", "64", "--output-tokens", "32")
FIGURES = tuple(
    (section, *rest)
    for section, *rest in (
        *(("metrics", metric, p) for metric in ("ttft", "tpot", "itl", "e2e") for p in ("p50", "p90")),
        ("throughput", "output_tok_per_s"),
    )
)
N_TRIPLES = 200
STREAMS, GAP_MS, SECONDS = 100, 20, 30
"""5,000 events a second, and 600 of the canary: a p99 of fewer is noise."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("bursts", "canary"))
    parser.add_argument("--bursts", type=int, default=N_BURSTS)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of each disturbance")
    args = parser.parse_args()
    holds = True
    if args.only != "canary":
        with tempfile.TemporaryDirectory() as folder:
            holds &= bursts(Path(folder), args.bursts)
    if args.only != "bursts":
        holds &= canaries(args.seconds)
    sys.exit(not holds)


def bursts(folder: Path, n: int) -> bool:
    """Print coverage and false differences of `n` identical bursts at one start of the embedded engine.

    Whether as few are called different as is claimed.
    """
    argv = [sys.executable, "-m", "burstline", "run", "--engine", "reference", "--repeats", str(n), *BURST]
    argv += ["-q", "--out", str(folder / "runs")]
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, check=False)
    paths = sorted(p for p in (folder / "runs").iterdir() if not p.name.endswith("-repeats"))
    views = tuple(view_of(open_run(path)) for path in paths)
    whole = Contender("all", views)
    print(f"{len(views)} bursts ({' '.join(BURST)}): {', '.join(v.summary.verdict.state for v in views)}")
    print(f"{'figure':28}{'median of all':>14}{'CV':>7}   held by the intervals of three repeats")
    held = total = 0
    for path in FIGURES:
        values = np.array(whole.points(path))
        grand = float(np.median(values))
        groups = [Contender("", views[k : k + 3]).figure(*path) for k in range(0, len(views) - 2, 3)]
        inside = [g.low <= grand <= g.high for g in groups if isinstance(g, Estimate) and g.low is not None]
        held, total = held + sum(inside), total + len(inside)
        spread = float(values.std(ddof=1) / values.mean())
        print(f"{' '.join(path[1:]):28}{grand:14.5g}{spread:7.1%}   {sum(inside)} of {len(inside)}")
    print(f"held in all: {held} of {total} (95% are to be)")
    singles, triples = different(pairs_of(whole, 1)), different(pairs_of(whole, 3))
    print(f"single bursts called different, noise unknown: {singles}")
    print(f"three against three called different: {triples} (random disjoint triples)")
    return not singles.n_any and triples.n_any <= triples.n / 20


def pairs_of(whole: Contender, k: int) -> Iterator[tuple[Contender, Contender]]:
    """Two contenders of k of its runs each."""
    views = whole.views
    if k == 1:
        yield from ((Contender("A", (a,)), Contender("B", (b,))) for a, b in combinations(views, 2))
        return
    random = np.random.default_rng(1)
    for _ in range(N_TRIPLES):
        order = random.permutation(len(views))
        a, b = (tuple(views[i] for i in part) for part in (order[:k], order[k : 2 * k]))
        yield Contender("A", a), Contender("B", b)


@dataclass(frozen=True)
class Differences:
    """How many of `n` pairs differ in any judged number, and how many of all verdicts do."""

    n_any: int
    n: int
    n_different: int
    n_verdicts: int

    def __str__(self) -> str:
        return f"{self.n_any} of {self.n} pairs, {self.n_different} of {self.n_verdicts} verdicts"


def different(pairs: Iterator[tuple[Contender, Contender]]) -> Differences:
    n = n_any = n_verdicts = n_different = 0
    for a, b in pairs:
        (contrasts,) = contrasts_of((a, b), {"A": (), "B": ()}).values()
        answers = [
            each.answer == Answer.DIFFERENT for each in contrasts.values() if isinstance(each, Contrast)
        ]
        n, n_any = n + 1, n_any + any(answers)
        n_verdicts, n_different = n_verdicts + len(answers), n_different + sum(answers)
    return Differences(n_any, n, n_different, n_verdicts)


def canaries(seconds: int) -> bool:
    """Print the canary's p99 beside the truth under each disturbance; whether all are near enough."""
    holds = True
    print(
        f"\n{'disturbance':34}{'canary p50':>11}{'p99':>9}{'true p50':>10}{'p99':>9}  us; within 20% or 50 us"
    )
    with tempfile.TemporaryDirectory() as name:
        spin = compiled(Path(name))
        cases: dict[str, Callable[[int], AbstractContextManager[object]]] = {
            "none": lambda pid: nullcontext(),
            "a C process at nice -5, same core": lambda pid: busy([*on_core(1), "nice", "-n", "-5", spin], 1),
            "2 busy processes": lambda pid: busy([spin], 2),
            "4 busy processes": lambda pid: busy([spin], 4),
            "quota: 5 ms of every 25": squeezed,
        }
        for name, disturb in cases.items():
            n_tok = seconds * 1000 // GAP_MS
            with server(n_tok, 200_000, GAP_MS * 1000, jitter=True) as port, canary() as bird:
                found = ours(port, STREAMS, 3000, canary_port=bird.port, meanwhile=disturb)
            told = found.canary
            if told is None:
                print(f"{name:34}no canary")
                holds = False
                continue
            p99, true = told.p99_ns / 1e3, found.kernel_lag[1]
            near = abs(p99 - true) <= max(0.2 * true, 50)
            holds &= near
            verdict = "yes" if near else "NO"
            share = told.cpu_s / seconds / (os.cpu_count() or 1)
            row = f"{told.p50_ns / 1e3:11.1f}{p99:9.1f}{found.kernel_lag[0]:10.1f}{true:9.1f}  {verdict}"
            print(f"{name:34}{row} ({told.n} events, {share:.2%} of the machine's CPU)", flush=True)
    return holds


def compiled(folder: Path) -> str:
    (folder / "spin.c").write_text("int main(void) { for (volatile long i = 0;; i++); }")
    subprocess.run(["cc", "-O2", "-o", folder / "spin", folder / "spin.c"], check=True)
    return str(folder / "spin")


def on_core(core: int) -> list[str]:
    return ["taskset", "-c", str(core)] if (os.cpu_count() or 1) > 1 else []


@contextmanager
def busy(argv: list[str], n: int) -> Iterator[None]:
    # Each in a session of its own: Linux shares the CPU between sessions first (autogroup).
    running = [subprocess.Popen(argv, start_new_session=True) for _ in range(n)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def squeezed(pid: int) -> Iterator[None]:
    """A CPU quota by hand: the driver may run 5 ms out of 25."""
    done = threading.Event()

    def squeeze() -> None:
        while not done.wait(0.005):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                done.wait(0.02)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=squeeze, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
