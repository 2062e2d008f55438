"""Random shots at whole runs: signals, children that are killed or stopped, a terminal that goes away.

`LAB_SHOTS=200 pytest -m slow tests/faults/test_shots.py` for a thorough search; `TEST_SEED` for the same shots.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from burstline.loadgen.capture.capture import read_captures
from burstline.measure.record.rundir import open_run
from tests.faults.lab import Command, noted, verb
from tests.faults.test_processes import FROM_LOAD_ON, phase_of, runs_in
from tests.seeds import SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

N_SHOTS = int(os.environ.get("LAB_SHOTS", "20"))
N_AT_ONCE = int(os.environ.get("LAB_AT_ONCE", "2"))
N = 2000
"""So many are decoded by two children."""
LOAD = ("--engine", "truth", "--requests", str(N), "--rate", "700", "--prompt-tokens", "8",
        "--output-tokens", "4", "--deadline-s", "5")  # fmt: skip
KINDS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGINT twice", "terminal gone", "reader gone", "kill a child",
         "stop a child", "stop a child, SIGINT")  # fmt: skip
HANG_S, WHOLE_S = 10.0, 10.0
"""How long an end may take, the report included, where a whole run takes at most so long."""
STILL_S = 25.0
"""What a stopped child may cost: 10 s until it is seen to stand still, the deadline of what it had, and 10 s."""
CUT = {"cancelled", "not_sent", "driver_lost"}


@dataclass
class Fired:
    """One shot: what was done, in which phase, how long it took to end from then on, and what is wrong."""

    kind: str
    phase: str
    took_s: float
    wrong: list[str]


def shoot(folder: Path, kind: str, at_s: float, rng: random.Random, slowness: float) -> Fired:
    out = folder / "out"
    argv = ("run", "--out", str(out), *LOAD, *(() if kind == "terminal gone" else ("-q",)))
    master, slave = pty.openpty() if kind == "terminal gone" else (None, None)
    command = Command(out, *argv, terminal=slave, XDG_CACHE_HOME=str(folder / "cache"))
    if master is not None and slave is not None:
        os.close(slave)
        threading.Thread(target=drained, args=(master, at_s), daemon=True).start()
    time.sleep(at_s)
    phase = phase_of(out)
    done = act(command, kind, rng)
    began_s = time.monotonic()
    try:
        ended = command.end(timeout_s=100)
    except AssertionError as error:
        return Fired(kind, phase, time.monotonic() - began_s, [str(error)[:600]])
    took_s = time.monotonic() - began_s
    goes_on = ("child" in kind and "SIGINT" not in kind) or kind == "reader gone"
    limit_s = HANG_S * slowness + (STILL_S if goes_on else 0.0)
    wrong = [f"took {took_s:.1f} s"] if took_s > limit_s else []
    wrong += [f"left {[p.pid for p in ended.orphans]}"] if ended.orphans else []
    # The interpreter prints its own where it is interrupted before the first line of ours.
    if "Traceback" in ended.out and "in _terminable_verb" in ended.out:
        wrong.append(f"a traceback: {ended.out[-1200:]}")
    for run in runs_in(out):
        wrong += problems(run, must_be_whole=phase in FROM_LOAD_ON and done != "nothing")
    shutil.rmtree(folder, ignore_errors=True)
    fired = Fired(f"{kind}: {done}" if "child" in kind else kind, phase, took_s, wrong)
    sys.stderr.write(f"{fired}\n")
    return fired


def drained(master: int, for_s: float) -> None:
    """Read what is written on the terminal for so long; then it is gone."""
    until_s = time.monotonic() + for_s
    os.set_blocking(master, False)
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            os.read(master, 1 << 16)
        time.sleep(0.01)
    os.close(master)


def act(command: Command, kind: str, rng: random.Random) -> str:
    """Do it; what was hit."""
    if kind.startswith("SIG"):
        for _ in range(1 + kind.endswith("twice")):
            command.send(getattr(signal, kind.split()[0]))
            time.sleep(0.05)
    elif kind == "reader gone":
        assert command.process.stdout is not None
        command.process.stdout.close()
    elif "child" in kind:
        hit = shot_child(command, signal.SIGKILL if "kill" in kind else signal.SIGSTOP, rng)
        if "SIGINT" in kind:
            time.sleep(0.5)
            command.send(signal.SIGINT)
        return hit
    return kind


def shot_child(command: Command, number: int, rng: random.Random) -> str:
    children = []
    for process in command.family():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            ours = [word for word in words if word.startswith("burstline.")]
            if ours and ours[-1] != "burstline.servers.truth":  # the server is not ours to keep alive
                children.append((process, ours[-1]))
    if not children:
        return "nothing"
    process, name = rng.choice(sorted(children, key=lambda each: each[1]))
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
    return name.removeprefix("burstline.")


def problems(run: Path, *, must_be_whole: bool) -> list[str]:
    """What a reader would miss in this folder."""
    wrong = []
    if json.loads((run / "manifest.json").read_bytes())["status"] == "running" and must_be_whole:
        wrong.append("the manifest says that it still runs")
    if not (run / "report.html").exists():
        code, said = verb("report", run)
        if must_be_whole and (code != 0 or not (run / "report.html").exists()):
            wrong.append(f"no report, and `report RUN` exits {code}: {said[-600:]}")
        if "Traceback" in said:
            wrong.append(f"`report RUN`: {said[-600:]}")
    if not (run / "plan.parquet").exists():
        return wrong
    table = open_run(run).request_table
    outcomes = dict(zip(table.column("index").to_pylist(), table.column("outcome").to_pylist(), strict=True))
    captured = {each.index for each in read_captures(run / "captures") if each.failure is None}
    missed = [index for index in captured if outcomes.get(index) in CUT | {None}]
    wrong += [f"{len(missed)} of {len(captured)} whole replies are not reported"] if missed else []
    wrong += [f"{len(outcomes)} records of {N}"] if len(outcomes) != N else []
    return wrong


def test_random_shots_end_in_time_with_every_captured_request_reported(tmp_path: Path) -> None:
    whole = Command(tmp_path / "whole", "run", "--out", str(tmp_path / "whole"), *LOAD, "-q").end()
    assert whole.code in (0, 4), whole.out  # 4: a busy machine may serve no 700 a second
    slowness = max(1.0, whole.time_s / WHOLE_S)
    rng = random.Random(f"shots {SEED}")
    shots = [(KINDS[k % len(KINDS)], whole.time_s * 1.2 * rng.random(), rng.random()) for k in range(N_SHOTS)]
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        fired = list(
            pool.map(
                lambda k: shoot(
                    tmp_path / str(k), shots[k][0], shots[k][1], random.Random(shots[k][2]), slowness
                ),
                range(N_SHOTS),
            )
        )
    for kind in KINDS:
        of_kind = [each for each in fired if each.kind.partition(":")[0] == kind]
        right = sum(not each.wrong for each in of_kind)
        phases = dict(Counter(each.phase for each in of_kind))
        longest_s = max((each.took_s for each in of_kind), default=0.0)
        noted(f"{kind}, {len(of_kind)} shots", "all right", f"{right} right; {phases}", longest_s)
    bad = [f"{each.kind} in {each.phase}: {each.wrong}" for each in fired if each.wrong]
    assert not bad, "\n".join(bad)
