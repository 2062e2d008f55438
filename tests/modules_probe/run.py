"""Which modules each process of a `burstline run` has imported at its first request, and at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.truth.rig import TruthRig
from tests.verdicts import done

HERE = Path(__file__).parent
OURS = HERE.parents[1]
TIMEOUT_S = 60.0
AT_ONCE = 4
"""So many requests at once are the load: what comes before it asks one after another."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one process had imported at one moment ("load" or "exit"); `pss_bytes` is its share of memory."""

    role: str
    moment: str
    modules: frozenset[str]
    pss_bytes: int

    @property
    def foreign(self) -> set[str]:
        """The top names of what is neither the standard library's nor ours."""
        tops = {name.partition(".")[0] for name in self.modules}
        ours = sys.stdlib_module_names | {"burstline", "__main__", "__mp_main__", "sitecustomize"}
        return {top for top in tops - ours if not top.startswith(("_", "cython"))}


def loaded_by_a_run(
    truth: TruthRig | None, folder: Path, argv: Sequence[str], python_path: Path = OURS
) -> list[Loaded]:
    """Run `burstline run ARGV` to its end.

    The truth server's script must leave a second between the requests and their end; without one only the
    ends of the processes are seen.
    """
    notes = folder / "modules"
    notes.mkdir(parents=True)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(python_path), str(HERE)]),
        "BURSTLINE_MODULES_TO": str(notes),
        "HF_HUB_OFFLINE": "1",
    }
    where = ["--engine", "truth", "--out", str(folder / "runs")]
    where += ["--url", truth.url] if truth else []
    command = [sys.executable, "-m", "burstline", "run", *where, *argv]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        until_s = time.monotonic() + TIMEOUT_S
        while truth and truth.metrics()["truth:requests_running"] < AT_ONCE and run.poll() is None:
            if time.monotonic() > until_s:
                run.kill()
            time.sleep(0.02)
        if truth:
            _ask_all(run.pid)
        output, _ = run.communicate(timeout=TIMEOUT_S)
    if not done(run.returncode, folder):
        raise RuntimeError(f"exit code {run.returncode}:\n{output}")
    return [_read(path) for path in sorted(notes.iterdir())]


def _ask_all(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)


def _read(path: Path) -> Loaded:
    role, _, moment = path.stem.split("-")
    said = json.loads(path.read_text())
    return Loaded(role, moment, frozenset(said["modules"]), said["pss_kb"] * 1024)
