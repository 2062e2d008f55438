"""A run's forecast: made before its first request, read back and scored after its last."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

from burstline.errors import RooflineError
from burstline.loadgen.capture.files import write_json
from burstline.machine.hints import DEVICE_FILE
from burstline.machine.roofline_input import limits_of, setup_of
from burstline.measure.record.manifest import LoadFacts
from burstline.measure.record.run_writer import FORECAST, RunDir
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Summary
from burstline.measure.record.typed_json import MismatchError, from_json, to_json
from burstline.measure.stats.figure import Estimate
from burstline.roofline.predict.forecast import Forecast, NoForecast, PlannedLoad, Score, predicted_figures
from burstline.roofline.predict.simulate import Asked, Limits
from burstline.roofline.reconcile.inputs import Setup
from burstline.workloads.arrivals import STEADY_PATTERNS
from burstline.workloads.plan import Plan
from burstline.workloads.request import RequestKind, WorkloadError

MOST_BURST: Final = 20_000
"""A burst of more requests is not simulated: it would take seconds."""
MOST_STEADY: Final = 200
"""Of a longer open or closed loop, so many requests stand for all; of many streams, a few each."""

Ints = NDArray[np.int64]


def write_forecast(run: RunDir, plan: Plan, say: Callable[[str], None]) -> None:
    """Write the forecast of the run that is about to begin."""
    try:
        forecast: Forecast | NoForecast = _forecast(Run(run.path, run.manifest), plan)
    except (RooflineError, WorkloadError) as why:
        forecast = NoForecast(str(why))
    write_json(run.path / FORECAST, to_json(forecast))
    if isinstance(forecast, Forecast):
        e2e = forecast.figures["metrics.e2e.p50"]
        say(f"Forecast: E2E p50 {e2e.low:.3g} to {e2e.high:.3g} s")
    elif run.manifest.hardware is None or run.manifest.hardware.absent is None:  # which the page says
        say(f"No forecast: {forecast.absent}")


def read_forecast(run: Run) -> Forecast | NoForecast | None:
    """The forecast; None if the run ended before it was made."""
    if not (run.path / FORECAST).exists():
        return None
    try:
        row = orjson.loads((run.path / FORECAST).read_bytes())
        return from_json(NoForecast, row, FORECAST) if "absent" in row else from_json(Forecast, row, FORECAST)
    except (OSError, MismatchError, orjson.JSONDecodeError) as error:
        return NoForecast(f"{FORECAST} cannot be read: {error}")


def scored(forecast: Forecast | NoForecast | None, run: Run, summary: Summary) -> Score | NoForecast | None:
    """The forecast beside the summary's figures."""
    if not isinstance(forecast, Forecast):
        return forecast
    if run.status != "complete" or summary.counts.get("ok", 0) < summary.counts.get("planned", 0) * 0.99:
        return NoForecast("the run did not serve all of its load")
    figures = {name: summary.figure(*name.split(".")) for name in forecast.figures}
    measured = {name: each.point for name, each in figures.items() if isinstance(each, Estimate)}
    return Score(forecast.device, forecast.figures, measured, forecast.intervals)


def forecast_load(forecast: Forecast | NoForecast | None, run: Run) -> tuple[PlannedLoad, float] | None:
    """The load as planned and its makespan in seconds as forecast.

    None where there is none, or it is of a part of the load, or of other hardware than is named now.
    """
    if not isinstance(forecast, Forecast) or forecast.makespan_s is None or run.manifest.ended_s is not None:
        return None
    columns = run.plan_columns("n_prompt_tok", "n_output_tok", "due_ns")
    if columns is None or forecast.made_of != _hardware_hash(run):
        return None
    prompt_tok, output_tok, due_ns = (column.to_numpy() for column in columns.columns)
    return _planned(run, prompt_tok, output_tok, due_ns, forecast.limits), forecast.makespan_s


def _forecast(run: Run, plan: Plan) -> Forecast:
    spec = run.manifest.asked
    if run.manifest.hardware is None:  # nothing can be added to a run before its first request
        raise RooflineError("the hardware is not known")
    setup, assumed = setup_of(run)
    _check_modelled(run, plan, setup)
    prompt_tok, output_tok = plan.prompt_tok, plan.output_tok
    due_ns = np.frombuffer(plan.due_ns, dtype=np.int64)
    n_at_once = min(spec.concurrency or len(prompt_tok), len(prompt_tok))
    block_tok = run.manifest.block_tok
    blocks = np.sort(-(-(prompt_tok + output_tok) // block_tok))[-n_at_once:]
    at_once = n_at_once, int(blocks.sum()) * block_tok
    limits = limits_of(run, at_once, "as much as this load can use at once", assumed)
    load = _planned(run, prompt_tok, output_tok, due_ns, limits)
    in_burst = spec.concurrency is None and not due_ns.any()
    if in_burst and len(prompt_tok) > MOST_BURST:
        raise RooflineError(f"a burst of more than {MOST_BURST:,} requests is not simulated")
    most = max(MOST_STEADY, 4 * (spec.concurrency or 0))
    whole = in_burst or len(prompt_tok) <= most
    if not whole:
        load = replace(load, requests=load.requests[:most])
    figures, makespan_s, source = predicted_figures(load, setup.clock(), setup.deployment, setup.calibration)
    return Forecast(
        figures=figures,
        makespan_s=makespan_s if whole else None,
        n_simulated=len(load.requests),
        device=setup.deployment.device.id,
        made_of=_hardware_hash(run),
        limits=limits,
        assumed=tuple(assumed),
        intervals=source,
    )


def _check_modelled(run: Run, plan: Plan, setup: Setup) -> None:
    """RooflineError where the load or the server does what the simulator does not."""
    facts, spec = run.manifest.load or LoadFacts(), run.manifest.asked
    reasons = {
        "sessions are not simulated: replies decide when the next turn comes": facts.expected_cached_fraction
        is None,
        "prompts share prefixes, and what a cache holds of them is not simulated": bool(
            facts.expected_cached_fraction
        ),
        "requests that are abandoned are not simulated": spec.cancel_share is not None,
        f"{spec.request_kind} requests are not simulated": spec.request_kind is not RequestKind.GENERATE,
        "speculative decoding is not simulated": setup.draft_tok > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise RooflineError(reason)
    first = plan.requests[0]
    if not first.ignore_eos or first.n_prompt_tok < 1:
        raise RooflineError("the lengths of prompts or replies are not known before the run")


def _planned(run: Run, prompt_tok: Ints, output_tok: Ints, due_ns: Ints, limits: Limits) -> PlannedLoad:
    spec = run.manifest.asked
    rows = zip((due_ns / 1e9).tolist(), prompt_tok.tolist(), output_tok.tolist(), strict=True)
    requests = tuple(Asked(due_s, n_prompt, n_output) for due_s, n_prompt, n_output in rows)
    until_s = spec.duration_s if spec.concurrency is not None and spec.duration_s else math.inf
    one_rate = spec.concurrency is not None or spec.pattern in STEADY_PATTERNS
    return PlannedLoad(requests, limits, spec.concurrency, until_s, one_rate)


def _hardware_hash(run: Run) -> str:
    """Of all that a person can state anew with `burstline report`: model, device and facts of the engine."""
    hardware = orjson.dumps(to_json(run.manifest.hardware), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(hardware + (run.path / DEVICE_FILE).read_bytes()).hexdigest()
