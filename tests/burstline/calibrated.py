"""What a person does when a run says that this CPU is not calibrated: the commands that it names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from burstline.measure.record.rundir import Run, open_run

BESIDE_OTHERS = """
import sys
from burstline.cli import main
from burstline.machine.host_facts import Beside
Beside.others = lambda *_: (0.0, {})
sys.exit(main(sys.argv[1:]))
"""
"""Tests have neighbours: what is asked here is whether verdicts hold, not whether a ceiling is right."""
UNSTEADY = """
from burstline.roofline.calibrate.measurements import Timer
Timer.ceiling = lambda *_: (0.0, 0.0)
"""
"""Python runs it as it starts, in the process that measures too: the fastest rounds may differ."""


def calibrated(run: Run, env: Mapping[str, str] | None = None) -> Run:
    """The run, reported again on this machine's CPU where that was not calibrated for its model yet."""
    why = (run.manifest.hardware and run.manifest.hardware.absent) or ""
    for command in re.findall(r"`burstline ([^`]+)`", why) if "is not calibrated" in why else ():
        calibrate(*shlex.split(command), env=env)
    return open_run(run.path)


def calibrate(*words: str, env: Mapping[str, str] | None = None) -> None:
    """The command `burstline ...` that measures this CPU, whatever its neighbours do."""
    argv = [sys.executable, "-c", BESIDE_OTHERS, *words]
    with TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(UNSTEADY)
        paths = os.pathsep.join([folder, str(Path(__file__).parents[2])])
        beside = {**(os.environ if env is None else env), "PYTHONPATH": paths}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=beside, check=False)
    assert done.returncode == 0, done.stderr
