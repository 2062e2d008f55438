"""Every child of a run and every way to lose it: what was asked for is accounted for, in time, in few words."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import psutil
import pytest

from burstline.measure.record.rundir import open_run
from tests.faults.lab import REPOSITORY, Command, Ended, noted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAULT = """
import os, signal, sys, threading, time

module, fault, delay_s = os.environ["LAB_FAULT"].split()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_while(fault):
    timer = threading.Timer(float(delay_s), fault)
    timer.daemon = True
    timer.start()


if module in sys.argv:
    if fault == "killed":
        killed()
    elif fault == "silent":
        time.sleep(3600)
    elif fault == "killed-later":
        in_a_while(killed)
    elif fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        in_a_while(lambda: os.kill(os.getpid(), signal.SIGTERM))
    else:
        in_a_while(lambda: os.kill(os.getpid(), signal.SIGSTOP))
"""
"""Runs in each of our processes before ours, and makes the one that is meant go wrong."""

N = 400
LOAD = ("--requests", str(N), "--rate", "100", "--prompt-tokens", "8", "--output-tokens", "4",
        "--deadline-s", "5", "-q")  # fmt: skip
MANY = ("--requests", "4000", "--prompt-tokens", "8", "--output-tokens", "4", "-q")
"""So many are decoded by children."""
CHILDREN = {
    "burstline.loadgen.driver.drive": (LOAD, 2.5),
    "burstline.servers.host.watch": (LOAD, 4.0),
    "burstline.servers.host.keeper": (LOAD, 4.0),
    "burstline.loadgen.driver.canary": (LOAD, 4.0),
    "burstline.measure.record.decode": (MANY, 0.7),
    "burstline.servers.truth.rig": (("--requests", "300", "--rate", "100"), 2.5),
}
"""What the child is a part of, and when it is in the middle of its work, in seconds from its start."""
FAULTS = ("killed", "killed-later", "stopped", "stopped-and-Ctrl-C", "silent", "deaf")
LIMIT_S = 75.0
"""For a whole run, the report included: on an idle machine it takes 12 to 30 s, with a start that is waited for 45 s.
What hangs takes twice as long: `Command.end` ends it."""
N_AT_ONCE = 4


def start(folder: Path, module: str, fault: str) -> Command:
    argv, delay_s = CHILDREN[module]
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(FAULT)
    out = folder / "out"
    whole = ("certify",) if module.endswith("rig") else ("run", "--engine", "truth", "--out", str(out))
    return Command(
        out, *whole, *argv,
        LAB_FAULT=f"{module} {fault.partition('-and')[0]} {delay_s}",
        PYTHONPATH=f"{folder / 'site'}:{REPOSITORY}", XDG_CACHE_HOME=str(folder / "cache"),
    )  # fmt: skip


def lost(folder: Path, module: str, fault: str) -> list[str]:
    """What is wrong with a run that loses this child in this way."""
    command = start(folder, module, fault)
    began_s = time.monotonic()
    if fault == "stopped-and-Ctrl-C":
        while command.alive() and not any(map(stands_still, command.family())):
            time.sleep(0.1)
        command.send(signal.SIGINT)
    try:
        ended = command.end(timeout_s=150)
    except AssertionError as error:
        return [str(error)]
    took_s = time.monotonic() - began_s
    wrong = [f"took {took_s:.1f} s"] if took_s > LIMIT_S else []
    wrong += [f"left {len(ended.orphans)} processes"] if ended.orphans else []
    wrong += [f"a traceback: {ended.out[-800:]}"] if "Traceback" in ended.out else []
    if not module.endswith("rig"):
        if module.endswith("canary") and fault in ("killed", "silent"):
            wrong += (
                []
                if "canary was lost" in ended.out
                else [f"the canary's loss is not told: {ended.out[-800:]}"]
            )
        wrong += problems_of(ended, 4000 if CHILDREN[module][0] is MANY else N)
    seen = f"exit {ended.code}: {' | '.join(ended.out.splitlines()[-1:])[:90]}"
    noted(f"{module.removeprefix('burstline.')} {fault}", "told, accounted for", wrong or seen, took_s)
    return [f"{module} {fault}: {each}" for each in wrong]


def stands_still(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def problems_of(ended: Ended, n: int) -> list[str]:
    runs = list(ended.out_dir.iterdir())
    if len(runs) != 1 or not (runs[0] / "report.html").exists():
        return [f"no report: {ended.out[-600:]}"]
    status = json.loads((runs[0] / "manifest.json").read_bytes())["status"]
    outcomes = Counter(open_run(runs[0]).request_table.column("outcome").to_pylist())
    found = ["it is still running"] if status == "running" else []
    return found + ([f"{sum(outcomes.values())} outcomes of {n}"] if sum(outcomes.values()) != n else [])


def test_no_child_can_take_the_run_with_it(tmp_path: Path) -> None:
    only = os.environ.get("LAB_ONLY", "")
    cases = [case for case in product(CHILDREN, FAULTS) if only in " ".join(case)]
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        found = list(pool.map(lambda case: lost(tmp_path / "-".join(case), *case), cases))
    assert not [each for wrong in found for each in wrong]
