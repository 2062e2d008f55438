"""From the command to the first byte of its burst: `python tests/bench/startup.py [--repeats 5]`.

`burstline run` fires 1000 requests of 512 tokens at a truth server that is already there; seconds count from
just before the process is started to the kernel's stamp of the first byte of the first request, by the
server's log. Between them lie imports, plan, drivers, prompts, connections and the barrier.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from servers.truth.rig import TruthRig, truth_server
from servers.truth.script import Script

GOAL_S = 2.0
N_PROMPT_TOK = 512


def first_byte_s(truth: TruthRig, n_requests: int) -> tuple[float, list[tuple[float, str]]]:
    """Seconds to the first byte and to each thing that the command said on the way."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "burstline", "run", "--url", truth.url, "--engine", "truth"]
        argv += ["--no-certify", "--no-calibrate", "--out", folder]
        argv += ["--requests", str(n_requests), "--prompt-tokens", str(N_PROMPT_TOK), "--output-tokens", "8"]
        said = []
        start_ns = time.monotonic_ns()
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr or ():
                said.append(((time.monotonic_ns() - start_ns) / 1e9, line.rstrip()))
    served = [row for row in truth.log() if row.n_prompt_tok == N_PROMPT_TOK]
    if len(served) != n_requests:
        raise SystemExit(f"{len(served)} of {n_requests} requests arrived:\n" + "\n".join(s for _, s in said))
    truth.reset()
    return (min(row.first_byte_ns for row in served) - start_ns) / 1e9, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found = []
    with truth_server(Script(ttft_s=0.05, gaps_s=(0.01,))) as truth:
        for _ in range(args.repeats):
            seconds, said = first_byte_s(truth, args.requests)
            found.append(seconds)
            print(f"{seconds:.2f} s to the first byte; the command said:", flush=True)
            print("".join(f"    {at_s:5.2f} s  {line}\n" for at_s, line in said if at_s <= seconds), end="")
    told = f"{statistics.median(found):.2f} s, {min(found):.2f} to {max(found):.2f}"
    print(f"median of {len(found)} starts: {told} (goal: {GOAL_S:g} s)")


if __name__ == "__main__":
    main()
