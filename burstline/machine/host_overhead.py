"""What the embedded engine's host costs: schedule, sample and deliver each token over HTTP, beside computing.

Measured as everything else is, by firing a burst: at a model of one narrow layer, whose steps are nearly all
host. What the judged run took is never looked at. The server computes and serves on the same cores, so that
this time adds to every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from burstline.bench.fire import DriverDiedError, fire
from burstline.bench.load_options import checked, job_of
from burstline.bench.server_session import Where, serving
from burstline.bench.wish import Wish
from loadgen.driver.os_limits import ensure_fd_limit
from roofline.calibrate.calibrate import device_toml
from roofline.device.calibration import HostFit, load_calibration
from roofline.device.device import load_device
from servers.engine import EngineError
from servers.reference.steplog import load_steps
from servers.registry import ENGINES
from workloads.prompts import vocabulary_from_size
from workloads.request import WorkloadError

ENGINE: Final = "reference"
BURST: Final = Wish(requests=128, prompt_tokens="512", output_tokens="zipf:2,16..640", deadline_s=10.0)
"""Outputs of many lengths: requests end one by one, and half the batch lasts twice as many steps."""
NARROW: Final[Mapping[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SOURCE: Final = "measured on this machine by a burst at a narrow model of one layer"
LEAST_STEPS: Final = 16
KERNELS: Final = ("_proj_ns", "lm_head_ns", "attention_ns")
Log = Mapping[str, Sequence[Any]]
Floats = npt.NDArray[np.float64]


def add_host(device_file: Path, vocab_size: int, threads: int) -> HostFit | None:
    """Measure, and write it into the device's file. None, and nothing written, where the burst failed."""
    host = host_fit(vocab_size, threads)
    if host is not None:
        device, calibration = load_device(str(device_file)), load_calibration(str(device_file))
        device_file.write_text(device_toml(device, replace(calibration, host=host)), "utf-8")
    return host


def host_fit(vocab_size: int, threads: int, burst: Wish = BURST) -> HostFit | None:
    """What the host costs here, in about 2 s. None where the burst did not come to its end."""
    try:
        with tempfile.TemporaryDirectory(prefix="burstline-") as name:
            return fit_of(_burst_log(Path(name), vocab_size, threads, burst))
    except (EngineError, WorkloadError, DriverDiedError, OSError, ValueError):
        return None


def _burst_log(folder: Path, vocab_size: int, threads: int, burst: Wish) -> Log:
    """The step log of the burst, from its start on."""
    model, load, engine = folder / "narrow", checked(burst), ENGINES[ENGINE]
    model.mkdir()
    (model / "config.json").write_bytes(orjson.dumps({**NARROW, "vocab_size": vocab_size}))
    ensure_fd_limit(load.n_at_once)
    where = Where(engine=ENGINE, model=str(model), engine_args=("--threads", str(threads)))
    vocabulary = vocabulary_from_size(vocab_size, "the narrow model")
    plan = load.plan(vocabulary)
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


def fit_of(log: Log) -> HostFit | None:
    """From steps in a row, of which the last 16 or more only decode; None where there are fewer of those.

    A step lasts until the next begins, in wall or CPU time, whichever is less: in the one other processes
    count, in the other a second core. What it lasts beside its kernels is, where prompts are done, a part of
    the step and one of each token; what these leave of the steps before is the prompts'.
    """
    names = ("n_logits", "prefill_tok", "decode_tok")
    n_tok, prompt_tok, decode_tok = (np.array(log[name][:-1], dtype=float) for name in names)
    spent_ns = np.minimum(np.diff(log["start_ns"]), np.diff(log["cpu_ns"])).astype(float)
    kernel_ns = np.sum([log[name][:-1] for name in log if name.endswith(KERNELS)], axis=0)
    kernel_ns = np.minimum(kernel_ns, spent_ns)
    begun = int(np.flatnonzero(prompt_tok)[-1]) + 1 if prompt_tok.any() else 0
    head, tail = slice(0, begun), slice(begun, None)
    if not begun or len(n_tok) - begun < LEAST_STEPS:
        return None
    of_token_ns = _undisturbed(kernel_ns[tail], n_tok[tail])
    beside_ns = spent_ns - of_token_ns * np.where(prompt_tok > 0, decode_tok, n_tok)
    weight = n_tok[tail] ** -0.5
    parts = np.stack([weight, weight * n_tok[tail]], axis=1)
    from scipy.optimize import nnls  # here: it takes half a second, and every run imports this module

    step_ns, token_ns = nnls(parts, weight * beside_ns[tail])[0]
    of_prompt_ns = _undisturbed(kernel_ns[head] - of_token_ns * decode_tok[head], prompt_tok[head])
    beside_ns -= step_ns + token_ns * n_tok + of_prompt_ns * prompt_tok
    prompt_tok_ns = max(0.0, beside_ns[head].sum() / prompt_tok.sum())
    return HostFit(ENGINE, step_ns / 1e9, token_ns / 1e9, prompt_tok_ns / 1e9, SOURCE)


def _undisturbed(ns: Floats, tok: Floats) -> float:
    """Kernels' time a token, in the large step where it is least: in most, other threads interrupt."""
    large = tok >= tok.max() / 2
    return float((ns[large] / tok[large]).min())
