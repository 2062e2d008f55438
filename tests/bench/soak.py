"""Ten minutes at 200 requests a second: how memory, open files and the disk grow.

    python tests/bench/soak.py [--minutes 10] [--rate 200]

One driver against the known-truth server, both on this machine. Every five seconds the memory and the open
files of each part and the size of the run's folder are noted; at the end stand the slopes of the last three
quarters, by least squares, with their standard errors: a leak is a slope far above its error. The captures
grow with every request, which is their purpose: their bytes per request are printed instead.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

PERIOD_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=200.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="burstline-soak-") as folder:
        return soak(Path(folder), args.minutes * 60, args.rate)


def soak(folder: Path, duration_s: float, rate: float) -> int:
    command = [sys.executable, "-m", "burstline", "run", "--engine", "truth", "--no-certify", "-q"]
    command += ["--no-calibrate", "--concurrency", "32", "--max-rate", str(rate), "--out", str(folder)]
    command += ["--requests", str(int(rate * duration_s)), "--prompt-tokens", "32", "--output-tokens", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    samples: dict[str, list[tuple[float, float, float]]] = {}
    disk: list[tuple[float, float]] = []
    began_s = time.monotonic()
    while process.poll() is None:
        at_s = time.monotonic() - began_s
        for name, child in parts_of(process.pid):
            try:
                samples.setdefault(name, []).append((at_s, child.memory_info().rss, child.num_fds()))
            except psutil.Error:
                continue
        disk.append((at_s, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())))
        time.sleep(PERIOD_S)
    print((process.stdout or sys.stdin).read())
    print(f"{'part':<10} {'samples':>7} {'RSS MB':>8} {'MB/min':>16} {'fds':>5} {'fds/min':>16}")
    steady = [name for name, rows in samples.items() if len(rows) >= 12]
    for name in steady:
        rows = np.array(samples[name])
        rows = rows[rows[:, 0] > rows[0, 0] + (rows[-1, 0] - rows[0, 0]) / 4]
        memory, files = (slope(rows[:, 0], rows[:, k]) for k in (1, 2))
        growth = f"{memory[0] * 60e-6:>8.3f} ± {memory[1] * 60e-6:.3f}"
        opened = f"{rows[:, 2].max():>5.0f} {files[0] * 60:>8.3f} ± {files[1] * 60:.3f}"
        print(f"{name:<10} {len(rows):>7} {rows[:, 1].max() / 1e6:>8.1f} {growth} {opened}")
    n = rate * duration_s
    print(f"disk: {disk[-1][1] / n:,.0f} bytes a request, {disk[-1][1] / 1e6:,.1f} MB in all")
    return process.returncode


def parts_of(pid: int) -> list[tuple[str, psutil.Process]]:
    """The processes of the run that last, by name."""
    names = {"loadgen.driver.drive": "driver", "servers.host.watch": "watcher", "servers.truth": "server"}
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
