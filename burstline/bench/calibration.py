"""This machine measured for the roofline: by `burstline calibrate`, and once by the first run of an engine.

A measurement is kept where it was made with nothing beside it, else refused.
"""

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from burstline import __version__
from burstline.compute_threads import BLAS_THREADS, KEEPS_MEMORY
from burstline.errors import RooflineError
from burstline.loadgen.capture.files import write_bytes
from burstline.machine.catalogue import path_of
from burstline.machine.hardware import note_hardware
from burstline.machine.hints import DEVICE_FILE, Hints
from burstline.machine.host_facts import MOST_OTHERS, Beside, host, libraries
from burstline.measure.record.run_writer import RunDir
from burstline.roofline.device.calibration import Conditions, device_toml, read_device_file
from burstline.servers.host.child import command, import_path
from burstline.wording import took

NO_CALIBRATE: Final = "BURSTLINE_NO_CALIBRATE"
"""The variable that leaves a run's measurement of the CPU out, as --no-calibrate does."""
LOOK_S: Final = 0.5
"""How long to look for other programs before anything is measured."""
MOST_S: Final = 17.0
"""What a run waits for the kernels at most; the host's burst takes 8 s more at most."""

_OURS: Final = f"{RooflineError.__module__}.{RooflineError.__qualname__}: "
"""How Python begins the last line of a traceback."""


def measured(
    config: Mapping[str, Any],
    model: str,
    threads: int,
    device: str = "cpu",
    *,
    quick: bool,
    most_s: float | None,
) -> str:
    """The device file of this machine for the model of `config`, which is called `model`.

    RooflineError where it failed or, on a CPU, where others used more than MOST_OTHERS of it.
    """
    beside, on_cpu = Beside(), device == "cpu"
    if on_cpu:
        if (quota := host().cpu_quota) is not None and quota < threads:
            why = f"a CPU quota allows {quota:g} CPUs' time, so the figure would be the quota's"
            raise RooflineError(f"--threads {threads}: {why}; raise the quota (docker run --cpus)")
        time.sleep(LOOK_S)
        _check_quiet(beside)
    with tempfile.TemporaryDirectory(prefix="burstline-") as name:
        config_file, file = Path(name, "config.json"), Path(name, "device.toml")
        config_file.write_bytes(orjson.dumps(config))
        calibrate_pinned(config_file, file, device, threads, quick=quick, timeout_s=most_s)
        found, calibration = read_device_file(file.read_bytes(), file)
        if on_cpu:
            from burstline.bench.host_overhead import host_fit  # here: it is a run and its report

            _check_quiet(beside)
            of_host = host_fit(config, threads, found, calibration)
            calibration = replace(calibration, host=of_host or calibration.host)
        others = _check_quiet(beside) if on_cpu else beside.others()[0]
        versions = f"Burstline {__version__}, numpy {libraries()['numpy']}, Linux {platform.release()}"
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return device_toml(found, replace(calibration, conditions=Conditions(now, others, model, versions)))


def calibrate_pinned(
    config: Path, out: Path, device: str, threads: int, *, quick: bool, timeout_s: float | None = None
) -> None:
    """Write `out` in a process of its own on the last `threads` cores that this one may use.

    `config` is a model's config.json. RooflineError where that process fails, or is not done by `timeout_s`.
    """
    argv = [*command("burstline.roofline.calibrate.calibrate"), str(config), str(out)]
    argv += ["--device", device, "--threads", str(threads), *(["--quick"] if quick else [])]
    # Our own threads take parts of the rows.
    env = {**os.environ, "PYTHONPATH": import_path(), **dict.fromkeys(BLAS_THREADS, "1"), **KEEPS_MEMORY}
    how: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "timeout": timeout_s}
    try:
        done = subprocess.run(argv, check=False, **how)
    except subprocess.TimeoutExpired:
        raise RooflineError(f"calibration on {device} did not end within {timeout_s:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RooflineError(f"calibration on {device} failed: {last.removeprefix(_OURS)}")


def _check_quiet(beside: Beside) -> float:
    """The share of the machine that others used; RooflineError where it is too much."""
    share, by_process = beside.others()
    if share > MOST_OTHERS:
        what = f"other processes used {share:.0%} of this machine, too much to measure"
        raise RooflineError(f"{what}{took(share, by_process)}")
    return share


def may_calibrate(asked: bool) -> bool:
    """Whether a run may measure the CPU: neither --no-calibrate nor the variable forbids it."""
    return asked and NO_CALIBRATE not in os.environ


def measure_again(run: RunDir, hints: Hints, say: Callable[[str], None]) -> None:
    """Measure the CPU whose calibration this run exceeded: its load is over, and its server stopped."""
    say("This run was faster than what was measured of this CPU, so that is measured again")
    (run.path / DEVICE_FILE).unlink()
    note_measured(run, hints, say, calibrate=True)
    run.save_manifest()


def note_measured(run: RunDir, hints: Hints, say: Callable[[str], None], *, calibrate: bool) -> None:
    """Note the run's hardware, and before it, unless told not to, measure a CPU that never was."""
    lacking = note_hardware(run, hints)
    if lacking is None or not (may_calibrate(calibrate) and run.manifest.on_this_machine):
        return
    say("Measuring this CPU for the roofline, in at most 25 s (--no-calibrate leaves it out)")
    try:
        text = measured(lacking.config, lacking.model, lacking.n_cores, quick=True, most_s=MOST_S)
        path = path_of(lacking.n_cores, lacking.config, quick=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode())
    except (RooflineError, OSError) as why:
        say(f"This CPU was not measured: {why}")
        note_hardware(run, hints, unmeasured=str(why))
    else:
        note_hardware(run, hints)
