"""Ten minutes at 200 requests a second: how memory, open files and the disk grow.

    python tests/bench/soak.py [--minutes 10] [--rate 200]

One driver against the known-truth server, both on this machine, arrivals at a constant rate. Every two
seconds of the load the memory and the open files of each part and the sizes of the run's files are noted. At
the end stand the slopes of the last three quarters, by least squares, with their standard errors. Exit code 1
where one is beyond noise: above four standard errors, and in each third of the time above LEAK. What grows on
purpose is printed, not judged: the log of the known-truth server, and telemetry. Of captures, the bytes a
request must stay the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

PERIOD_S = 2.0
N_STEADY = 12
"""Fewer samples than this say nothing of a slope."""
LEAK = {"memory": 0.1e6 / 60, "files": 0.5 / 60, "disk": 1e3 / 60}
"""Bytes, open files and bytes per second: a smaller growth is none."""
N_ERRORS = 4.0
BY_DESIGN = ("server", "telemetry")
CAPTURES_SHARE = 0.1

Samples = dict[str, list[tuple[float, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=200.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="burstline-soak-") as folder:
        return soak(Path(folder), args.minutes * 60, args.rate)


def soak(folder: Path, duration_s: float, rate: float) -> int:
    command = [sys.executable, "-m", "burstline", "run", "--engine", "truth", "-q"]
    command += ["--arrival", "constant", "--rate", str(rate), "--out", str(folder)]
    command += ["--requests", str(int(rate * duration_s)), "--prompt-tokens", "32", "--output-tokens", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory: Samples = defaultdict(list)
    files: Samples = defaultdict(list)
    disk: Samples = defaultdict(list)
    began_s = time.monotonic()
    while process.poll() is None:
        at_s = time.monotonic() - began_s
        if any(folder.glob("*/captures/*.partial")):  # the load: before and after it other things grow
            for name, child in parts_of(process.pid):
                with suppress(psutil.Error):
                    memory[name].append((at_s, child.memory_info().rss))
                    files[name].append((at_s, child.num_fds()))
            for name, n_bytes in sizes(folder).items():
                disk[name].append((at_s, n_bytes))
        time.sleep(PERIOD_S)
    print((process.stdout or sys.stdin).read())
    leaks = [
        *judged("memory", memory, 1e-6, "MB"),
        *judged("files", files, 1.0, "fds"),
        *judged("disk", disk, 1e-6, "MB"),
        *steady_captures(disk["captures"], rate),
    ]
    print("\n".join(f"GROWS: {leak}" for leak in leaks) or "No slope is beyond noise.")
    return 1 if leaks else process.returncode if process.returncode not in (0, 4) else 0


def judged(kind: str, samples: Samples, scale: float, unit: str) -> list[str]:
    """Print the slope of each part; those that are beyond noise."""
    print(f"\n{kind:<10} {'samples':>7} {'most ' + unit:>10} {unit + '/min':>10} {'±':>8}")
    leaks = []
    for name, rows in samples.items():
        if len(rows) < N_STEADY:
            continue
        at_s, value = np.array(rows).T
        late = at_s > at_s[0] + (at_s[-1] - at_s[0]) / 4
        growth, error = slope(at_s[late], value[late])
        per_min = 60 * scale
        figures = value.max() * scale, growth * per_min, error * per_min
        print(f"{name:<10} {late.sum():>7} {figures[0]:>10.3f} {figures[1]:>10.4f} {figures[2]:>8.4f}")
        # A leak grows all the time; connections that a pause of the machine opened are a single step.
        parts = zip(np.array_split(at_s[late], 3), np.array_split(value[late], 3), strict=True)
        thirds = [slope(*part)[0] for part in parts]
        is_leak = growth > N_ERRORS * error and min(growth, *thirds) > LEAK[kind]
        if is_leak and name not in (*BY_DESIGN, "captures"):
            leaks.append(f"{kind} of {name}: {growth * per_min:.3f} ± {error * per_min:.3f} {unit}/min")
    return leaks


def steady_captures(rows: list[tuple[float, float]], rate: float) -> list[str]:
    """What a request leaves on disk, in the two halves of the load's last three quarters."""
    rows = rows[len(rows) // 4 :]
    if len(rows) < N_STEADY:
        return ["the load was too short to judge"]
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    early, late = (slope(*np.array(half).T)[0] / rate for half in halves)
    said = f"captures: {early:,.0f} bytes a request, then {late:,.0f}"
    print(f"\n{said}")
    return [said] if late > (1 + CAPTURES_SHARE) * early else []


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the run's files: captures, telemetry, the rest."""
    found = {"captures": 0, "telemetry": 0, "rest": 0}
    for path in folder.rglob("*"):
        with suppress(OSError):
            kind = "captures" if path.parent.name == "captures" else path.name.partition(".")[0]
            found[kind if kind in found else "rest"] += path.stat().st_size if path.is_file() else 0
    return found


def parts_of(pid: int) -> list[tuple[str, psutil.Process]]:
    """The processes of the run that last, by name."""
    names = {
        "burstline.loadgen.driver.drive": "driver",
        "burstline.servers.host.watch": "watcher",
        "burstline.servers.truth": "server",
    }
    found = []
    try:
        main_process = psutil.Process(pid)
        found.append(("main", main_process))
        for child in main_process.children(recursive=True):
            words = child.cmdline()
            found += [(name, child) for module, name in names.items() if module in words]
    except psutil.Error:
        pass
    return found


def slope(at_s: np.ndarray, value: np.ndarray) -> tuple[float, float]:
    """Least squares: the slope per second and its standard error."""
    x = at_s - at_s.mean()
    b = float((x * value).sum() / (x * x).sum())
    rest = value - value.mean() - b * x
    return b, float(np.sqrt((rest * rest).sum() / max(len(x) - 2, 1) / (x * x).sum()))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
