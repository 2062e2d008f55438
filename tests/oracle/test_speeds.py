"""Closed loops through the whole command at servers whose speed changes, or does not.

SPEED_RUNS=2 pytest -m thorough -s tests/oracle/test_speeds.py
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.measure.wandering import STEP_S, Shape, drift, step, wander
from tests.seeds import SEED
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script
from tests.truth.speed import Speed

N = int(os.environ.get("SPEED_RUNS", "40"))
AT_ONCE = 4
"""So many loads run at a time: each takes a twentieth of a core."""
USERS, TOK = 8, "32..96"
LOAD = ("--concurrency", str(USERS), "--prompt-tokens", "8", "--output-tokens", TOK, "--warmup", "0")
N_SCRIPTS = 2000
KINDS: dict[str, tuple[float, Shape | None, float]] = {
    "stands still": (27.0, None, 0.0),
    "slows by half": (27.0, drift(2.0), 0.0),
    "steps by 50%": (27.0, step(1.5), 0.0),
    "wanders over 1 s": (27.0, None, 1.0),
    "wanders over 3 s": (66.0, None, 3.0),
}
"""Of each kind how long a load is, seconds, its change and over how long the speed stays alike."""


def speed(kind: str, random: np.random.Generator) -> Speed:
    length_s, shape, correlation_s = KINDS[kind]
    at_s = np.arange(round((3 * length_s + 20) / STEP_S)) * STEP_S
    slow = wander(len(at_s), correlation_s, random)
    if shape is not None:
        slow = slow + shape(np.clip(at_s / length_s, 0, 1))
    return Speed(np.r_[0, np.cumsum(np.exp(-slow))[:-1] * STEP_S], STEP_S, USERS)


def scripts(random: np.random.Generator) -> list[Script]:
    """Prefills vary by a fifth, tokens by a fiftieth, for each request alone."""
    prefill_s = 0.05 * random.lognormal(0, 0.2, N_SCRIPTS)
    token_s = 0.01 * random.lognormal(0, 0.02, N_SCRIPTS)
    pairs = zip(prefill_s.tolist(), token_s.tolist(), strict=True)
    return [Script(ttft_s=ttft_s, gaps_s=(gap_s,)) for ttft_s, gap_s in pairs]


def fired(kind: str, k: int, folder: Path) -> dict:
    """The summary of load `k`."""
    random = np.random.default_rng([SEED, list(KINDS).index(kind), k])
    with truth_server(scripts(random), setup=TruthSetup(speed=speed(kind, random))) as server:
        words = ["run", "--url", server.url, "--engine", "truth", "-q", "--out", str(folder / str(k)), *LOAD]
        words += ["--duration-s", f"{KINDS[kind][0]:g}", "--seed", str(k)]
        done = subprocess.run(
            [sys.executable, "-m", "burstline", *words], capture_output=True, text=True, timeout=600
        )
    assert done.returncode in (0, 4), done.stdout + done.stderr
    (path,) = (folder / str(k)).glob("*/summary.json")
    return orjson.loads(path.read_bytes())


def alarmed(summary: dict) -> bool:
    return any(reason["code"] == "drifting" for reason in summary["verdict"]["reasons"])


def at_most(n_loads: int, share: float) -> int:
    """So many of `n_loads` or more come once in a hundred times, where the share of all is this."""
    chance = [math.comb(n_loads, k) * share**k * (1 - share) ** (n_loads - k) for k in range(n_loads + 1)]
    return next(k for k in range(n_loads + 1) if sum(chance[k + 1 :]) < 0.01)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        ("stands still", 0.0, 0.02),
        ("slows by half", 0.95, 1.0),
        ("steps by 50%", 0.95, 1.0),
        ("wanders over 1 s", 0.0, 0.02),
        ("wanders over 3 s", 0.0, 0.08),
    ],
)
def test_a_change_of_a_servers_speed_is_found_and_none_where_there_is_none(kind, least, most, tmp_path):
    """Where the speed only wanders, 95% intervals of the median hold that of all loads."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda k: fired(kind, k, tmp_path), range(N)))
    n_found = sum(map(alarmed, found))
    states = [summary["verdict"]["state"] for summary in found]
    print(f"{kind}: {n_found} of {N} found; {', '.join(sorted(set(states)))}")
    assert n_found <= at_most(N, most)
    assert N - n_found <= at_most(N, 1 - least)
    if KINDS[kind][1] is not None:
        return
    for metric in ("ttft", "tpot", "e2e"):
        medians = [summary["metrics"][metric]["p50"] for summary in found]
        truth = float(np.median([each["point"] for each in medians]))
        known = [each for each in medians if None not in (each["low"], each["high"])]
        n_held = sum(each["low"] <= truth <= each["high"] for each in known)
        print(
            f"{kind}: {metric} p50 {truth * 1e3:.2f} ms, in {n_held} of {len(known)} intervals of {N} loads"
        )
        assert len(known) - n_held <= at_most(len(known), 0.07)
