"""What a person does when a run says that this CPU is not calibrated: the commands that it names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

from burstline.loadgen.record.rundir import Run, open_run

# Tests have neighbours: what is asked here is whether verdicts hold, not whether a ceiling is right.
BESIDE_OTHERS = """
import sys
from burstline.cli import main
from burstline.machine.host_facts import Beside
Beside.others = lambda _: (0.0, "")
sys.exit(main(sys.argv[1:]))
"""
TRIES = 8


def calibrated(run: Run, env: Mapping[str, str] | None = None) -> Run:
    """The run, reported again on this machine's CPU where that was not calibrated for its model yet."""
    why = (run.manifest.hardware and run.manifest.hardware.absent) or ""
    for command in re.findall(r"`burstline ([^`]+)`", why) if "is not calibrated" in why else ():
        argv = [sys.executable, "-c", BESIDE_OTHERS, *shlex.split(command)]
        for _ in range(TRIES):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=env, check=False)
            if "two rounds" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
    return open_run(run.path)
