"""This machine measured for the roofline: by `burstline calibrate`, and once by the first run of an engine.

A measurement is kept where it was made with nothing beside it, else refused.

The embedded engine's host time (scheduling, sampling and delivering each token over HTTP) is measured as
everything else is, by firing a burst: at an engine with the calibrated model and random weights. What its
steps last longer than their kernels is the host's. What the judged run took is never looked at. The server
computes and serves on the same cores, so that this time adds to every step. A narrower model will not do:
where steps are shorter than the delivery of their tokens, several tokens of a stream leave in one write.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from burstline import __version__
from burstline.bench.apart import job_of
from burstline.bench.fire import fire
from burstline.bench.server_session import serving
from burstline.console.server_options import ServerOptions
from burstline.cores import BLAS_THREADS, KEEPS_MEMORY
from burstline.errors import RooflineError
from burstline.loadgen.capture.files import write_bytes
from burstline.loadgen.wire.os_limits import ensure_fd_limit
from burstline.machine.hardware import note_hardware, path_of
from burstline.machine.hints import DEVICE_FILE, Hints
from burstline.machine.host_facts import MOST_OTHERS, Beside, host, libraries
from burstline.machine.roofline import seen_in, setup_of, step_of, timed_ops
from burstline.measure.record.columns import Floats
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import Run
from burstline.roofline.device.calibration import (
    Calibration,
    Conditions,
    HostFit,
    device_toml,
    read_device_file,
)
from burstline.roofline.device.device import Device
from burstline.roofline.model.families import read_config
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.servers.host.child import ChildLostError
from burstline.servers.messages import EngineError
from burstline.servers.reference.steplog import load_steps
from burstline.servers.registry import ENGINES
from burstline.workloads.data_sets import Server
from burstline.workloads.load import load_of
from burstline.workloads.prompts import vocabulary_from_size
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec

NO_CALIBRATE: Final = "BURSTLINE_NO_CALIBRATE"
"""The variable that leaves a run's measurement of the CPU out, as --no-calibrate does."""
LOOK_S: Final = 0.5
"""How long to look for other programs before anything is measured."""
MOST_S: Final = 17.0
"""What a run waits for the kernels at most; the host's burst takes 8 s more at most."""

_OURS: Final = f"{RooflineError.__module__}.{RooflineError.__qualname__}: "
"""How Python begins the last line of a traceback."""

ENGINE: Final = "reference"
BURST: Final = LoadSpec(requests=64, prompt_tokens="512", output_tokens="zipf:2,16..320", deadline_s=8.0)
"""Outputs of many lengths: requests end one by one, and half the batch lasts twice as many steps."""
N_CONTEXT_TOK: Final = 4096
SOURCE: Final = "measured on this machine by a burst at the same model"
LEAST_STEPS: Final = 16
MOST_LOOKED: Final = 100
"""So many steps tell how fast the machine was."""
LONGEST_PROMPTS_S: Final = 8.0
"""Where the burst's prompts alone take longer, steps are so long that the host's part is lost in them."""
Log = Mapping[str, Sequence[Any]]


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
    command = [sys.executable, "-P", "-m", "burstline.roofline.calibrate.calibrate", str(config), str(out)]
    command += ["--device", device, "--threads", str(threads), *(["--quick"] if quick else [])]
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [ours, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    # Our own threads take parts of the rows.
    env = {**os.environ, "PYTHONPATH": path, **dict.fromkeys(BLAS_THREADS, "1"), **KEEPS_MEMORY}
    how: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "timeout": timeout_s}
    try:
        done = subprocess.run(command, check=False, **how)
    except subprocess.TimeoutExpired:
        raise RooflineError(f"calibration on {device} did not end within {timeout_s:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RooflineError(f"calibration on {device} failed: {last.removeprefix(_OURS)}")


def _check_quiet(beside: Beside) -> float:
    """The share of the machine that others used; RooflineError where it is too much."""
    share, who = beside.others()
    if share > MOST_OTHERS:
        raise RooflineError(
            f"other processes used {share:.0%} of this machine, which is too much to measure it: {who}"
        )
    return share


def may_calibrate(asked: bool) -> bool:
    """Whether a run may measure the CPU: neither --no-calibrate nor the variable forbids it."""
    return asked and NO_CALIBRATE not in os.environ


def measure_again(run: RunDir, hints: Hints, say: Callable[[str], None]) -> None:
    """Measure the CPU whose calibration this run exceeded: its load is over, and its server stopped."""
    say("This run was faster than what was measured of this CPU, so that is measured again")
    (run.path / DEVICE_FILE).unlink()
    note_measured(run, hints, say, calibrate=True)


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
        note_hardware(run, hints, unmeasured=f" ({why})")
    else:
        note_hardware(run, hints)


def host_fit(
    config: Mapping[str, Any], threads: int, device: Device, calibration: Calibration, burst: LoadSpec = BURST
) -> HostFit | None:
    """Measure the host's time, in about 5 s. None if the burst did not complete."""
    model = read_config(config, "the calibrated model")
    deployment = Deployment(model, QUANTS["fp32"], Parallel(), device)
    kernels_s = Clock(deployment, replace(calibration, host=None))
    if (burst.requests or 0) * kernels_s(Step.of([(512, 512, 1)])) > LONGEST_PROMPTS_S:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="burstline-") as name:
            log = _burst_log(Path(name), config, threads, burst)
        return fit_of(log, kernels_s, _slowness(log, deployment, calibration))
    except (EngineError, WorkloadError, ChildLostError, OSError, ValueError):
        return None


def _burst_log(folder: Path, config: Mapping[str, Any], threads: int, burst: LoadSpec) -> Log:
    """The step log of the burst, from its start on."""
    model, load, engine = folder / "model", load_of(burst), ENGINES[ENGINE]
    model.mkdir()
    config = {**config, "max_position_embeddings": N_CONTEXT_TOK}
    (model / "config.json").write_bytes(orjson.dumps(config))
    ensure_fd_limit(load.n_at_once)
    where = ServerOptions(engine=ENGINE, model=str(model), engine_args=("--threads", str(threads)))
    vocabulary = vocabulary_from_size(config["vocab_size"], "the calibrated model")
    plan = load.plan(Server(vocabulary))
    with serving(engine, where, folder, lambda _: None) as site:
        place = {"captures": folder / "captures", "counters": folder / "counters"}
        job = job_of(plan, load, engine=ENGINE, target=site.target, vocabulary=vocabulary, **place)
        fired = fire(job, 1, lambda _: None, lambda _: None)
    if fired.error is not None:
        raise fired.error
    if fired.interrupted:
        raise KeyboardInterrupt
    _, log = load_steps(folder / "steps.jsonl")
    first = int(np.searchsorted(log.get("start_ns", ()), fired.reports[0].t0_ns or 0))
    log = {name: column[first:] for name, column in log.items()}
    if sum(log.get("n_logits", ())) < sum(request.n_output_tok for request in plan.requests):
        raise EngineError(f"not all of the burst was answered within {burst.deadline_s:g} s")
    return log


def _slowness(log: Log, deployment: Deployment, calibration: Calibration) -> float:
    """How many times as long as calibrated the burst's kernels took: it may have met a slower machine."""
    found = []
    wall_ns, cpu_ns = np.diff(log.get("start_ns", ())), np.diff(log.get("cpu_ns", ()))
    for k in range(0, len(wall_ns), 1 + len(wall_ns) // MOST_LOOKED):
        row = {name: column[k] for name, column in log.items()}
        step = step_of(row["new_tok"], row["context_tok"], row["n_logits"])
        timed = timed_ops(row)
        names = {name for joined in timed for name in joined.split("+")}
        predictions = deployment.predict(step, calibration).predictions
        predicted_s = sum(each.seconds for each in predictions if each.op.name in names)
        found.append(min(1.0, cpu_ns[k] / wall_ns[k]) * sum(timed.values()) / predicted_s)
    return float(np.median(found)) if found else 1.0


def fit_of(log: Log, kernels_s: Callable[[Step], float], slowness: float = 1.0) -> HostFit | None:
    """From steps in a row, and what their kernels take; None where there are too few that only decode.

    `slowness` is how many times slower the machine was than when the kernels were measured. A step lasts
    until the next begins, in wall or CPU time, whichever is less: in the one other processes count, in the
    other a second core. What it lasts beside its kernels is, where it only decodes, a part of the step and
    one of each token, by least squares of the relative error; what these leave of the other steps is the
    prompts'.
    """
    rows = zip(log["new_tok"][:-1], log["context_tok"][:-1], log["n_logits"][:-1], strict=True)
    spent_s = np.minimum(np.diff(log["start_ns"]), np.diff(log["cpu_ns"])) / 1e9 / slowness
    return _fitted(ENGINE, [step_of(*row) for row in rows], spent_s, kernels_s, SOURCE)


def host_of(run: Run) -> HostFit | None:
    """The host of a run's engine, from the steps of its load, as logged or as its tokens arrived.

    RooflineError where the run's hardware is not known; None where it shows too few steps.
    """
    setup, assumed = setup_of(run)
    seen = [each for each in seen_in(run, assumed).steps or () if each.step.n_tok]
    if setup.calibration is None or setup.calibration.measured_spread is None:
        raise RooflineError("it did not run on a CPU that `burstline calibrate` measured")
    kernels_s = Clock(setup.deployment, replace(setup.calibration, host=None))
    spent_s = np.array([each.seconds for each in seen])
    return _fitted(run.manifest.engine, [each.step for each in seen], spent_s, kernels_s, f"run {run.name}")


def _fitted(
    engine: str, steps: Sequence[Step], spent_s: Floats, kernels_s: Callable[[Step], float], source: str
) -> HostFit | None:
    n_tok = np.array([step.n_logits for step in steps], dtype=float)
    prompt_tok = np.array([step.new_tok[step.new_tok > 1].sum() for step in steps], dtype=float)
    decodes = prompt_tok == 0
    if decodes.sum() < LEAST_STEPS or decodes.all():
        return None
    beside_s = spent_s - np.array([kernels_s(step) for step in steps])
    from scipy.optimize import nnls  # here: it takes half a second, and every run imports this module

    parts = np.stack([np.ones_like(n_tok), n_tok], axis=1)[decodes] / spent_s[decodes, None]
    step_s, token_s = nnls(parts, beside_s[decodes] / spent_s[decodes])[0]
    left_s = (beside_s - step_s - token_s * n_tok)[~decodes].sum()
    prompt_tok_s = max(0.0, left_s / prompt_tok.sum())
    return HostFit(engine, float(step_s), float(token_s), float(prompt_tok_s), source)
