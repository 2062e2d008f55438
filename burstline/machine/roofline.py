"""A run as the roofline reads it: its set-up, what was measured, and its forecast.

The forecast is made before the run's first request, read back and scored after its last.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from burstline.dtypes import FLOATS, SHORT
from burstline.errors import RooflineError
from burstline.loadgen.capture.files import write_json
from burstline.machine.hints import DEVICE_FILE, Stated
from burstline.measure.record.columns import Columns
from burstline.measure.record.manifest import HardwareFacts, LoadFacts
from burstline.measure.record.run_writer import FORECAST, RunDir
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Summary
from burstline.measure.record.typed_json import MismatchError, from_json, to_json
from burstline.measure.stats.figure import Estimate
from burstline.roofline.device.calibration import read_device_file, stack_host, with_host
from burstline.roofline.device.device import Device
from burstline.roofline.model.checkpoint import quant_of
from burstline.roofline.model.families import read_config
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import QUANTS, ModelShape, Parallel, Quant
from burstline.roofline.predict.forecast import Forecast, NoForecast, PlannedLoad, Score, predicted_figures
from burstline.roofline.predict.predict import Deployment
from burstline.roofline.predict.simulate import Asked, Limits
from burstline.roofline.reconcile import inputs
from burstline.roofline.reconcile.inputs import Known, Setup, StepSeen, Streamed, steps_seen
from burstline.servers.identity import Admission, Identity
from burstline.servers.registry import ENGINES
from burstline.workloads.arrivals import STEADY_PATTERNS
from burstline.workloads.plan import Plan
from burstline.workloads.request import RequestKind, WorkloadError

PACED: Final = 0.8
"""Of an open loop's time, the share in which requests arrived, above which no queue was left to serve."""
MOST_REQUESTS: Final = 20_000
"""More are not simulated: it would take minutes."""

_TIMED_WITH_ATTENTION: Final = "rope+kv_write+attention"
"""Names of attention in the embedded engine's step log."""
KEEPS_UP: Final = 0.8
"""An open loop of which a smaller share is served has a queue that no few requests tell of."""
MOST_STEADY: Final = 200
"""Of a longer open or closed loop, so many requests stand for all; of many streams, a few each."""

Ints = NDArray[np.int64]


def setup_of(run: Run) -> tuple[Setup, list[str]]:
    """The set-up of a run: which facts are certain and which are assumed.

    RooflineError where its model or its device is unknown, WorkloadError where its device file is damaged.
    """
    hardware, path = run.manifest.hardware, run.path / DEVICE_FILE
    if hardware is None:
        raise RooflineError("the run's device is unknown; `burstline report RUN --device NAME` adds it")
    if hardware.absent or hardware.model_config is None or not path.exists():
        raise RooflineError(hardware.absent or f"{DEVICE_FILE} is missing from the run's folder")
    config, identity = hardware.model_config, run.manifest.identity
    try:
        device, calibration = read_device_file(path.read_bytes(), path)
    except RooflineError as error:
        raise WorkloadError(f"{error}; remove it to report without it") from error
    if calibration.host and calibration.host.engine != run.manifest.engine:
        # A CPU computes the model itself: nothing of the host's work hides behind a device.
        on_cpu = calibration.measured_spread is not None
        calibration = replace(calibration, host=stack_host("synchronous") if on_cpu else None)
    admission = _admission(run)
    calibration = with_host(calibration, "default" if admission is None or admission.ahead else "synchronous")
    facts = _Facts(run, Stated.from_json(hardware.stated or {}))
    model = read_config(config, str(identity.model if identity else "") or None)
    quant, weights, kv = facts.quant(config, model)
    parallel, known = facts.layout(device)
    # How weights are stored says nothing of how a CPU multiplies: one may have no fast 16-bit products.
    told = facts.dtype or facts.stated.quant or facts.self_describing
    compute = device.arch != "measured" or bool(told)
    known = replace(known, weights=weights, kv=kv, compute=compute, speculation=facts.draft_tok() is not None)
    deployment = Deployment(model, quant, parallel, device, facts.stated.expert_share or 1.0)
    return Setup(deployment, calibration, known, facts.draft_tok() or 0), facts.assumed


@dataclass(frozen=True, slots=True)
class _Facts:
    """Certain facts of the engine: stated by the user, reported by it, or from its command line."""

    run: Run
    stated: Stated
    assumed: list[str] = field(default_factory=list)

    @property
    def self_describing(self) -> bool:
        """Whether the engine's identity leaves nothing open."""
        engine = self.run.manifest.engine
        return engine in ENGINES and ENGINES[engine].self_describing

    @property
    def dtype(self) -> str | None:
        identity = self.run.manifest.identity
        return FLOATS.get(str(identity.dtype if identity else None))

    def _started_without(self, *words: str) -> bool:
        """Whether it was started here, and no argument of its command holds any of `words`."""
        server = self.run.manifest.server
        if server is None or server.attached:
            return False
        return not any(word in arg for arg in server.argv or () for word in words)

    def draft_tok(self) -> int | None:
        if self.stated.draft_tokens is not None:
            return self.stated.draft_tokens
        if self.self_describing or self._started_without("specul", "draft", "eagle", "medusa", "mtp"):
            return 0
        self.assumed.append("speculative decoding is not stated: none")
        return None

    def quant(self, config: Mapping[str, Any], model: ModelShape) -> tuple[Quant, bool, bool]:
        """How numbers are kept, and whether weights and KV cache are certain to be kept so."""
        identity = self.run.manifest.identity
        ours = self.dtype
        if self.stated.quant is not None:
            stored, certain = QUANTS[self.stated.quant], True
        else:
            stored = quant_of(config, model)
            if ours and stored == stored.plain:
                stored = Quant(ours, ours, ours)
            elif ours:
                stored = replace(stored, kv=ours)
            if (hardware := self.run.manifest.hardware) and hardware.held:
                stored = stored.holding(hardware.held)
                said = f"the weight files hold {hardware.held:.0%} of the bytes that config.json says"
                self.assumed.append(said)
            certain = self.self_describing or (ours is not None and self._started_without("quant"))
            if not ours:
                self.assumed.append(
                    f"the engine does not state its dtype: {stored.activations}, the checkpoint's"
                )
        kv = self.stated.kv_dtype or SHORT.get(str(identity.kv_cache_dtype if identity else None))
        kv_certain = kv is not None or self.self_describing
        kv_certain = kv_certain or self._started_without("kv-cache-dtype", "kv_cache_dtype")
        if not kv_certain:
            self.assumed.append(f"the KV cache's dtype is not stated: {stored.kv}")
        return (replace(stored, kv=kv) if kv else stored), certain, kv_certain

    def layout(self, device: Device) -> tuple[Parallel, Known]:
        """The ranks, and how many devices there may be where they are not certain."""
        stated, identity = self.stated, self.run.manifest.identity
        if stated.ranks:
            return Parallel(stated.tp or 1, stated.pp or 1, stated.ep or 1, stated.dp or 1), Known()
        tp, pp, dp = (
            getattr(identity, f"{kind}_parallel_size", None) for kind in ("tensor", "pipeline", "data")
        )
        server = self.run.manifest.server
        started = server is not None and not server.attached
        if self.self_describing or (started and device.arch == "measured"):
            return Parallel(), Known()
        other_ranks = ("pipeline", "data-parallel", "data_parallel", "-dp", "--dp", "-pp", "--pp")
        stated_all = pp is not None and dp is not None and not (identity and identity.expert_parallel)
        if tp is not None and (stated_all or self._started_without(*other_ranks)):
            return Parallel(tp=tp, pp=pp or 1, dp=dp or 1), Known()
        only = f"only tensor parallelism is stated: {tp}"
        self.assumed.append("parallelism is not stated: one device" if tp is None else only)
        if device.arch == "measured":  # this machine's CPU: a server may use more cores than were measured
            host = self.run.manifest.host
            cores = host.cores or host.cores_allowed or device.n_units or 1
            n = -(-cores // (device.n_units or 1))
            return Parallel(tp=tp or 1), Known(devices=False, at_most=n, one_request=n)
        here = len(self.run.manifest.devices)
        if started and here:
            return Parallel(tp=tp or 1), Known(devices=False, at_most=here, one_request=here)
        joined = max((link.n_devices for link in device.links if link.scope != "network"), default=1)
        return Parallel(tp=tp or 1), Known(devices=False, at_most=None, one_request=joined)


def seen_in(run: Run, assumed: list[str]) -> inputs.MeasuredRun:
    """The measurements; assumptions are added to `assumed`."""
    c = run.columns
    n_replies = int(np.count_nonzero(c.n_events))
    if not n_replies:
        raise RooflineError("no request got a token")
    if n_replies > MOST_REQUESTS:
        raise RooflineError(f"{n_replies:,} requests are too many to simulate; at most {MOST_REQUESTS:,}")
    replies = list(_replies(c))
    most = _most_at_once(replies, run.manifest.block_tok)
    limits = limits_of(run, most, "the most that were seen at once", assumed)
    logged = _logged(run, replies)
    steps = logged
    # It must be known for every reply which of its events carries how many tokens.
    splits = {"spread", "no-text", "unknown"}
    if logged is None and splits.isdisjoint(c.table.column("split").to_pylist()):
        steps = steps_seen(replies, limits.max_num_batched_tokens)
        assumed.append("steps are inferred from the stream: each gap in a chain of long replies is one step")
    due_s, last_s = (of(reply.sent_s for reply in replies) for of in (min, max))
    makespan_s = max(float(reply.token_s[-1]) for reply in replies) - due_s
    spec = run.manifest.asked
    pauses = spec.of_sessions or spec.data is not None  # of a data set each row may be a conversation
    return inputs.MeasuredRun(
        requests=[
            Asked(reply.sent_s, reply.prompt_tok, len(reply.token_s), reply.cached_tok) for reply in replies
        ],
        makespan_s=makespan_s,
        limits=limits,
        steps=steps or None,
        logged=logged is not None,
        first_s=np.array([reply.token_s[0] for reply in replies]),
        last_s=np.array([reply.token_s[-1] for reply in replies]),
        assumed=tuple(assumed),
        paced=spec.concurrency is None and last_s - due_s > PACED * makespan_s,
        concurrency=None if pauses else spec.concurrency,
    )


def _replies(c: Columns) -> Iterator[Streamed]:
    """Every request that got a token; tokens that came in one event lie evenly in the gap before it."""
    for i in range(len(c)):
        at_s, n = c.event_s[c.starts[i] : c.starts[i + 1]], c.event_n[c.starts[i] : c.starts[i + 1]]
        if not len(at_s):
            continue
        prompt = c.prompt_tok[i] if c.prompt_tok[i] > 0 else c.planned_prompt_tok[i]
        cached = min(int(np.nan_to_num(c.cached_tok[i])), int(prompt) - 1)
        n = n.astype(int)
        gap_s = np.diff(at_s, prepend=at_s[:1])
        behind = np.concatenate([np.arange(k - 1, -1, -1) / k for k in n])
        token_s = np.asarray(np.repeat(at_s, n) - np.repeat(gap_s, n) * behind)
        yield Streamed(float(c.sent_s[i]), int(prompt), token_s, cached)


def limits_of(run: Run, most: tuple[int, int], why: str, assumed: list[str]) -> Limits:
    """The engine's limits in its own words; what it does not say is assumed.

    `most` requests and tokens of the cache stand for limits that are not stated; `why` says what they are.
    """
    engine = run.manifest.engine
    identity = run.manifest.identity or Identity(engine)
    hardware = run.manifest.hardware or HardwareFacts()
    stated = Stated.from_json(hardware.stated or {})
    seqs, kv_tok = identity.max_num_seqs, identity.kv_tok
    batched = stated.token_budget or identity.max_num_batched_tokens
    if seqs is None:
        seqs = most[0]
        assumed.append(f"max_num_seqs is not stated: {seqs:,}, {why}")
    if batched is None:
        batched = max(2048, seqs)
        assumed.append(f"max_num_batched_tokens is not stated: {batched:,}")
    if kv_tok is None:
        kv_tok = most[1]
        assumed.append(f"the KV cache's size is not stated: {kv_tok:,} tokens, {why}")
    admission = _admission(run)
    if admission is None:
        admission = Admission()
        assumed.append("requests are admitted by vLLM V1's rules")
    elif admission.reserve_output:
        assumed.append(f"requests are admitted as {engine} does: whole prompts, room for the whole output")
    return Limits(seqs, batched, kv_tok, run.manifest.block_tok, **asdict(admission))


def _admission(run: Run) -> Admission | None:
    engine = run.manifest.engine
    return ENGINES[engine].admission_of(run.manifest.identity) if engine in ENGINES else None


def _most_at_once(replies: Sequence[Streamed], block_tok: int) -> tuple[int, int]:
    """Requests between their first and their last token, and the tokens in their blocks, at the fullest."""
    first = np.array([reply.token_s[0] for reply in replies])
    last = np.array([reply.token_s[-1] for reply in replies])
    blocks = np.array([-(-(reply.prompt_tok + len(reply.token_s)) // block_tok) for reply in replies])
    order = np.argsort(np.concatenate([first, last]), kind="stable")
    ones = np.concatenate([np.ones(len(first), dtype=np.int64), -np.ones(len(first), dtype=np.int64)])
    n = np.cumsum(ones[order]).max()
    tok = np.cumsum((ones * np.concatenate([blocks, blocks]))[order]).max() * block_tok
    return int(n), int(max(tok, blocks.max() * block_tok))


def _logged(run: Run, replies: Sequence[Streamed]) -> list[StepSeen] | None:
    if run.steps is None:
        return None
    begin_ns = min(reply.sent_s for reply in replies) * 1e9
    steps = run.steps[run.steps["end_ns"] > begin_ns]
    # A step lasts until the next begins, where that follows at once: the host's part is in it. A request that
    # decodes next was there already, and so was one that waits: the engine did not idle.
    at_once = (steps["n_waiting"] > 0) | (steps["decode_tok"].shift(-1) > 0)
    follows_ns = steps["start_ns"].shift(-1).fillna(steps["end_ns"])  # none follows where the run was cut off
    steps = steps.assign(until_ns=follows_ns.where(at_once, steps["end_ns"]))
    rows = [{str(name): value for name, value in row.items()} for row in steps.to_dict("records")]
    lasted_s = ((steps["until_ns"] - steps["start_ns"]) / 1e9).tolist()
    made = (step_of(row["new_tok"], row["context_tok"], int(row["n_logits"])) for row in rows)
    return [StepSeen(*seen) for seen in zip(made, lasted_s, map(timed_ops, rows), strict=True)] or None


def timed_ops(row: Mapping[str, Any]) -> dict[str, float]:
    """What a step's log timed, in seconds by our op names."""
    gemms = {
        name.removesuffix("_ns").removesuffix("_proj"): float(ns) / 1e9
        for name, ns in row.items()
        if name.endswith("_proj_ns") or name == "lm_head_ns"
    }
    return gemms | {_TIMED_WITH_ATTENTION: row["attention_ns"] / 1e9}


def step_of(new_tok: Sequence[int], context_tok: Sequence[int], n_logits: int) -> Step:
    # Only the last request's chunk can have been cut by the budget, so that it has no logits yet.
    logits = [1] * (len(new_tok) - 1) + [n_logits - len(new_tok) + 1]
    return Step.of(zip(new_tok, context_tok, logits, strict=True))


def write_forecast(run: RunDir, plan: Plan, say: Callable[[str], None]) -> None:
    try:
        forecast: Forecast | NoForecast = _forecast(Run.of(run), plan)
    except (RooflineError, WorkloadError) as why:
        forecast = NoForecast(str(why))
    run.forecast = forecast
    write_json(run.path / FORECAST, to_json(forecast))
    if isinstance(forecast, Forecast):
        e2e = forecast.figures["metrics.e2e.p50"]
        say(f"Forecast: E2E p50 {e2e.low:.3g} to {e2e.high:.3g} s")
    elif run.manifest.hardware is None or run.manifest.hardware.absent is None:  # which the page says
        say(f"No forecast: {forecast.absent}")


def read_forecast(run: Run) -> Forecast | NoForecast | None:
    """The forecast; None if the run ended before it was made."""
    if run.forecast is not None or not (run.path / FORECAST).exists():
        return run.forecast
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
    if in_burst and len(prompt_tok) > MOST_REQUESTS:
        raise RooflineError(f"a burst of more than {MOST_REQUESTS:,} requests is not simulated")
    most = max(MOST_STEADY, 4 * (spec.concurrency or 0))
    whole = in_burst or len(prompt_tok) <= most
    if not whole:
        load = replace(load, requests=load.requests[:most])
    figures, makespan_s, source = predicted_figures(load, setup.clock(), setup.deployment, setup.calibration)
    served = figures.get("throughput.requests_per_s")
    if not whole and spec.rate and served and served.point < KEEPS_UP * spec.rate:
        why = "requests would arrive faster than they are served"
        raise RooflineError(f"{why}, and only the first {most:,} are simulated")
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
    cached = facts.expected_cached_fraction
    for holds, reason in (
        (cached is None, "sessions are not simulated: replies decide when the next turn comes"),
        (cached, "prompts share prefixes, and what a cache holds of them is not simulated"),
        (spec.cancel_share is not None, "requests that are abandoned are not simulated"),
        (spec.request_kind != RequestKind.GENERATE, f"{spec.request_kind} requests are not simulated"),
        (setup.draft_tok > 0, "speculative decoding is not simulated"),
    ):
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
