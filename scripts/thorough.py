"""Run parts of docs/thorough.md, and write there when a part was green.

python scripts/thorough.py [PART...]     # all, if none is named
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/thorough.md"
LIMIT_S = 3600


def parts() -> dict[str, str]:
    """The command of each part, as its row has it."""
    rows = [line.split("|") for line in TABLE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return {row[1].strip(): row[3].strip(" `") for row in rows[1:]}


def note(part: str, seconds: float) -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    cells = f" {datetime.now(UTC):%Y-%m-%d} | {commit.stdout.strip()} | {seconds:.0f} |"
    lines = TABLE.read_text("utf-8").splitlines(keepends=True)
    for i, line in enumerate(lines):
        if line.startswith(f"| {part} |"):
            lines[i] = "|".join(line.split("|")[:4]) + "|" + cells + "\n"
    TABLE.write_text("".join(lines), "utf-8")


def main(wanted: list[str]) -> int:
    known = parts()
    if unknown := [part for part in wanted if part not in known]:
        print(f"No part {', '.join(unknown)}: expected {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    for part in wanted or known:
        print(f"\n==== {part}: {known[part]}", flush=True)
        began_s = time.monotonic()
        done = subprocess.run(
            ["timeout", "--signal=INT", str(LIMIT_S), "bash", "-c", known[part]], cwd=ROOT, env=env
        )
        seconds = time.monotonic() - began_s
        if done.returncode == 0:
            note(part, seconds)
        else:
            failed.append(f"{part} (exit code {done.returncode}, {seconds:.0f} s)")
    print(f"\nnot green: {', '.join(failed)}" if failed else "\nall green")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
