"""What a driver on a Ray node costs beside a local one: CPU per token event, in pairs.

    python tests/bench/cluster.py [--pairs 5] [--tokens 64]

One raylet in a network namespace of its own, the truth server in C beside it, 1,000 requests at once; in turn
with one local driver and with one worker of the cluster. Needs root, iproute2 and Ray.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from burstline.loadgen.record.rundir import open_run
from tests.bench.wire import build
from tests.cluster.lab import Lab, lab

N_REQUESTS = 1000
GAP_US = 40_000
RAY = ("--ray", "10.97.0.1:6380", "--workers", "1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bl-", dir="/tmp") as name, lab(Path(name), 1, "bench") as made:
        made.start_raylet(made.hosts[0], {"client": 1})
        made.wait_for_nodes(1)
        print("CPU per event, us   command's time beyond the load, s")
        print("  local      Ray      local      Ray")
        ratios = []
        for k in range(args.pairs):
            both = {"local": (), "ray": RAY}
            order = sorted(both, reverse=k % 2 == 1)
            seen = {
                which: one_run(made, Path(name) / f"{k}{which}", both[which], args.tokens) for which in order
            }
            (local_us, local_s), (ray_us, ray_s) = seen["local"], seen["ray"]
            ratios.append(ray_us / local_us)
            print(f"{local_us:>7.2f}  {ray_us:>7.2f}    {local_s:>7.2f}  {ray_s:>7.2f}", flush=True)
    print(f"Ray / local, median of {len(ratios)} pairs: {statistics.median(ratios):.3f}", end="")
    print(f" ({min(ratios):.3f} to {max(ratios):.3f})")
    return 0


def one_run(made: Lab, out: Path, where: tuple[str, ...], n_tokens: int) -> tuple[float, float]:
    """CPU of the driver per token event, us, and what the command took beyond the load, s."""
    argv = [
        build("truth"),
        "0",
        str(n_tokens),
        "200000",
        str(GAP_US),
        os.devnull,
        "64",
        made.address(made.hosts[0]),
    ]
    with subprocess.Popen(
        made.command(made.hosts[0], argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as truth:
        assert truth.stdout is not None
        url = f"http://{made.address(made.hosts[0])}:{truth.stdout.readline().strip()}"
        words = [
            sys.executable,
            "-m",
            "burstline",
            "run",
            "--url",
            url,
            "--engine",
            "vllm",
            "--vocab-size",
            "1000",
        ]
        words += ["--requests", str(N_REQUESTS), "--output-tokens", str(n_tokens), "--out", str(out)]
        words += ["-q", *where]
        began_s = time.monotonic()
        done = subprocess.run(
            made.command(made.hosts[0], words), env=made.env(), capture_output=True, text=True
        )
        took_s = time.monotonic() - began_s
        truth.communicate()
    if done.returncode not in (0, 4):
        raise SystemExit(done.stdout + done.stderr)
    (folder,) = (path for path in out.iterdir() if (path / "manifest.json").exists())
    run = open_run(folder)
    (driver,) = run.manifest.drivers
    load_s = (run.records["closed_ns"].max() - run.records["sent_ns"].min()) / 1e9
    return 1e6 * driver.cpu_s / (N_REQUESTS * n_tokens), took_s - load_s


if __name__ == "__main__":
    sys.exit(main())
