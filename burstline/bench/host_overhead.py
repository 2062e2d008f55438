"""The embedded engine's host time: scheduling, sampling and delivering each token over HTTP.

It is measured as everything else is, by firing a burst: at an engine with the calibrated model and random
weights. What its steps last longer than their kernels is the host's. What the judged run took is never
looked at. The server computes and serves on the same cores, so that this time adds to every step. A narrower
model will not do: where steps are shorter than the delivery of their tokens, several tokens of a stream leave
in one write.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from burstline.bench.fire import fire
from burstline.bench.requests_apart import job_of
from burstline.bench.server_session import serving
from burstline.console.server_options import ServerOptions
from burstline.errors import RooflineError
from burstline.loadgen.wire.os_limits import ensure_sockets
from burstline.machine.roofline import seen_in, setup_of, step_of, timed_ops
from burstline.measure.record.columns import Floats
from burstline.measure.record.rundir import Run
from burstline.roofline.device.calibration import Calibration, HostFit
from burstline.roofline.device.device import Device
from burstline.roofline.model.families import read_config
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.servers.host.child import ChildLostError
from burstline.servers.messages import EngineError
from burstline.servers.redact import Secret
from burstline.servers.reference.steplog import load_steps
from burstline.servers.registry import ENGINES
from burstline.workloads.data_sets import Server
from burstline.workloads.load import load_of
from burstline.workloads.prompts import vocabulary_from_size
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec

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
LOST: Final = HostFit(ENGINE, 0.0, 0.0, 0.0, "not seen in steps as long as this model's")
Log = Mapping[str, Sequence[Any]]


def host_fit(
    config: Mapping[str, Any], threads: int, device: Device, calibration: Calibration, burst: LoadSpec = BURST
) -> HostFit | None:
    """Measure the host's time, in about 5 s; `LOST` in long steps. None if the burst did not complete."""
    model = read_config(config, "the calibrated model")
    deployment = Deployment(model, QUANTS["fp32"], Parallel(), device)
    kernels_s = Clock(deployment, replace(calibration, host=None))
    if (burst.requests or 0) * kernels_s(Step.of([(512, 512, 1)])) > LONGEST_PROMPTS_S:
        return LOST
    try:
        with tempfile.TemporaryDirectory(prefix="burstline-") as name:
            log = _burst_log(Path(name), config, threads, burst)
        return fit_of(log, kernels_s, _slowness(log, deployment, calibration))
    except (EngineError, WorkloadError, ChildLostError, OSError, ValueError):
        return None


def _burst_log(folder: Path, config: Mapping[str, Any], threads: int, burst: LoadSpec) -> Log:
    model, load, engine = folder / "model", load_of(burst), ENGINES[ENGINE]
    model.mkdir()
    config = {**config, "max_position_embeddings": N_CONTEXT_TOK}
    (model / "config.json").write_bytes(orjson.dumps(config))
    ensure_sockets(load.n_at_once)
    where = ServerOptions(ENGINE, model=str(model), engine_args=Secret.words("--threads", str(threads)))
    vocabulary = vocabulary_from_size(config["vocab_size"])
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
    """How many times as long as calibrated the burst's GEMMs took: it may have met a slower machine.

    Attention does not count: between others its small operations take twice as long as alone: the host's.
    """
    found = []
    wall_ns, cpu_ns = np.diff(log.get("start_ns", ())), np.diff(log.get("cpu_ns", ()))
    for k in range(0, len(wall_ns), 1 + len(wall_ns) // MOST_LOOKED):
        row = {name: column[k] for name, column in log.items()}
        step = step_of(row["new_tok"], row["context_tok"], row["n_logits"])
        timed = {name: took_s for name, took_s in timed_ops(row).items() if "+" not in name}
        predictions = deployment.predict(step, calibration).predictions
        predicted_s = sum(each.seconds for each in predictions if each.op.name in timed)
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
