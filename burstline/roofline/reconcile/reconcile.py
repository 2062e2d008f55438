"""A run compared with its device's ceiling: shares of peak, bounds, and a breakdown of the gap.

The layer above fills a `MeasuredRun` from records, telemetry and the engine's step log. Where there is no
log the simulator supplies the steps, and only the makespan is measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from burstline.errors import RooflineError
from burstline.roofline.device.calibration import Calibration
from burstline.roofline.device.device import Limit
from burstline.roofline.model.ops import Phase, Step
from burstline.roofline.predict.capacity import kv_bytes, weight_bytes
from burstline.roofline.predict.forecast import PlannedLoad
from burstline.roofline.predict.predict import MEASURED, Prediction, StepTimes
from burstline.roofline.predict.simulate import Limits
from burstline.roofline.reconcile.impossible import Check, judged, product_checks, run_checks
from burstline.roofline.reconcile.inputs import MeasuredRun, Setup, StepSeen
from burstline.roofline.reconcile.reconciliation import (
    BARS,
    OTHER_STEPS,
    WAITING,
    Bar,
    DeviceFacts,
    ModelFacts,
    OpRow,
    PhaseRow,
    Reconciliation,
    Utilisation,
    WhatIf,
    largest_gap,
)

_MOST_STEPS = 200  # of a phase, looked at op by op; of more, one for each group of equal work
_ROUNDING = 1e-9  # of the run: a bar that is a difference of sums is not known any better
_NEAREST = 9  # steps around the mean whose median is what an op was measured to take


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    """A step as seen and as predicted; `weight` counts the steps it stands for, whose mean time it has."""

    seen: StepSeen
    times: StepTimes
    weight: float
    measured: bool


def reconcile(
    run: MeasuredRun, setup: Setup, ahead: tuple[PlannedLoad, float] | None = None
) -> Reconciliation:
    """Everything the report says of the hardware. Raises where a request could never fit the limits.

    `ahead`: the load as it was planned, and its makespan in seconds as it was predicted before the run.
    """
    on = setup.deployment
    simulated: list[StepSeen] = []
    if ahead is None or not run.steps:
        served = _load(run, run.limits)
        clock = setup.clock()

        def recorded(step: Step) -> float:
            simulated.append(StepSeen(step, seconds := clock(step)))
            return seconds

        predicted_s = served.makespan_s(recorded)
        ahead = ahead or (served, predicted_s)
    steps = [one for one in run.steps or () if one.step.n_tok]  # an interrupted log may end with empty ones
    looked = look(steps or simulated, setup, measured=bool(steps))
    tok = run.limits.block_tok
    blocks = sorted(-(-(request.prompt_tok + request.output_tok) // tok) for request in run.requests)
    limits = replace(run.limits, kv_tok=max(run.limits.kv_tok, sum(blocks[-(run.concurrency or 0) :]) * tok))
    ideal_s = _load(run, limits).makespan_s(replace(setup, calibration=None).clock())
    of_phases: dict[Phase, list[Looked]] = {"prefill": [], "decode": []}
    for one in looked:
        of_phases[one.seen.step.phase].append(one)
    phases = tuple(phase_row(phase, of, setup) for phase, of in of_phases.items() if of)
    products = (timed_products(row, of_phases[row.phase]) for row in phases)
    suspicions, explained = judged(chain(run_checks(run), *products), setup)
    by_cache = limits.kv_tok > run.limits.kv_tok
    least_s, spans = _ROUNDING * run.makespan_s, _waterfall(run, setup, looked, ideal_s, by_cache)
    bars = tuple(bar if abs(bar.seconds) > least_s else replace(bar, seconds=0.0) for bar in spans)
    device = device_facts(setup)
    beyond = (
        f"{each.what[0].upper()}{each.what[1:]} beats the assumed set-up by {each.excess:.0%}; explained by "
        f"{' or '.join(each.by)}."
        for each in explained
    )
    return Reconciliation(
        sentence=" ".join([_sentence(phases, device, bars), *beyond]),
        phases=phases,
        waterfall=bars,
        predicted_s=ahead[1],
        ceiling_s=ideal_s,
        sensitivity=tuple(sensitivity(*ahead, setup)),
        assumed=tuple(_assumed(run, setup)),
        suspicions=tuple(suspicions),
        explained=tuple(explained),
        device=device,
        model=ModelFacts(on.model.name, on.model.params(), on.quant),
        by=str(setup.calibration) if setup.calibration else "ceilings",
    )


def _load(run: MeasuredRun, limits: Limits) -> PlannedLoad:
    """The requests as served, when they were sent; of a closed loop each as another ends."""
    if run.concurrency is None:
        return PlannedLoad(run.requests, limits)
    return PlannedLoad([replace(request, due_s=0.0) for request in run.requests], limits, run.concurrency)


def look(steps: Sequence[StepSeen], setup: Setup, *, measured: bool) -> list[Looked]:
    """Steps op by op: of many, one for each group of equal work. Every nth would miss what is periodic."""
    work = [(s.n_tok - s.n_logits, s.n_tok, int(s.context_tok.sum())) for s in (one.step for one in steps)]
    order = sorted(range(len(steps)), key=work.__getitem__)
    n_decode = sum(more == 0 for more, *_ in work)
    looked = []
    for part in filter(None, (order[:n_decode], order[n_decode:])):
        for group in np.array_split(part, min(len(part), _MOST_STEPS)):
            mean_s = float(np.mean([steps[i].seconds for i in group]))
            seen = replace(steps[group[len(group) // 2]], seconds=mean_s)
            times = setup.deployment.predict(seen.step, setup.calibration)
            looked.append(Looked(seen, times, len(group), measured))
    return looked


def timed_products(row: PhaseRow, looked: Sequence[Looked]) -> Iterator[Check]:
    """Each product of the phase's typical step that was timed, to be judged."""
    return product_checks(_nearest(looked)[0].seen.step, row.ops)


def _nearest(looked: Sequence[Looked]) -> list[Looked]:
    """The steps nearest the mean in tokens and context, the typical one first."""
    at = [(one.seen.step.n_tok, one.seen.step.context_tok.mean()) for one in looked]
    tok, context = (float(np.mean(column)) for column in zip(*at, strict=True))
    far = [abs(np.log(n / tok)) + abs(np.log(c / context)) for n, c in at]
    return [looked[i] for i in np.argsort(far, kind="stable")[:_NEAREST]]


def phase_row(phase: Phase, looked: Sequence[Looked], setup: Setup) -> PhaseRow:
    steps = [one.seen.step for one in looked]
    rows = [(step.n_tok, step.n_requests, step.context_tok.mean()) for step in steps]
    tok, requests, context = (float(np.mean(column)) for column in zip(*rows, strict=True))
    ideal_s = sum(one.weight * one.times.ceiling_s for one in looked)
    reachable_s = sum(one.weight * one.times.predicted_s for one in looked)
    measured_s = sum(one.weight * one.seen.seconds for one in looked) if looked[0].measured else None

    def share(amount: float, per_s: float) -> Utilisation:
        measured = amount / (per_s * measured_s) if measured_s else None
        return Utilisation(measured, amount / (per_s * ideal_s), amount / (per_s * reachable_s))

    device = setup.deployment.device
    peak = device.peak_flops_per_s(setup.deployment.quant.activations)
    return PhaseRow(
        phase=phase,
        n_steps=round(sum(one.weight for one in looked)),
        mean_tok=tok,
        mean_requests=requests,
        mean_context_tok=context,
        mfu=share(_total(looked, "flops"), peak),
        mfu_full=share(_total(looked, "flops_full"), peak),
        mbu=share(_total(looked, "bytes"), device.bytes_per_s),
        limit_shares=_limit_shares(looked),
        ops=tuple(_op_rows(_nearest(looked), setup)),
        n_mixed=round(sum(one.weight for one in looked if len(one.seen.step.phases()) > 1)),
        seconds=reachable_s if measured_s is None else measured_s,
    )


def _total(looked: Sequence[Looked], what: str) -> float:
    """FLOPs or bytes; of elementwise passes only the cache they write, as in the ceilings."""
    total = 0.0
    for one in looked:
        for p in one.times.predictions:
            fused = what == "bytes" and p.op.kind == "elementwise"
            total += one.weight * p.op.count * (p.op.kv_bytes if fused else getattr(p.op, what))
    return total


def _limit_shares(looked: Sequence[Looked]) -> dict[Limit, float]:
    """Of the predicted time, how much each kind of limit holds."""
    seconds: dict[Limit, float] = {}
    for one in looked:
        for limit, limit_s in one.times.limit_s.items():
            seconds[limit] = seconds.get(limit, 0.0) + one.weight * limit_s
    total = sum(seconds.values())
    return {limit: s / total for limit, s in sorted(seconds.items(), key=lambda item: -item[1])}


def _op_rows(nearest: Sequence[Looked], setup: Setup) -> Iterator[OpRow]:
    """The ops of the first of these steps; measured as the median step of these has it."""
    typical = nearest[0]
    total_s = sum(p.seconds for p in typical.times.predictions)
    shares = [_measured_shares(one) for one in nearest]
    for p in typical.times.predictions:
        op, key = p.op, (p.op.name, p.op.phase)
        seen = [by_op[key] for by_op in shares if key in by_op]
        measured_s = p.seconds * float(np.median(seen)) if seen else None
        flops = op.count * op.flops
        yield OpRow(
            name=op.name,
            kind=f"{op.kind} {op.phase}".strip(),
            count=op.count,
            m=op.m,
            n=op.n,
            k=op.k,
            flops=flops,
            bytes=op.count * op.bytes,
            intensity=op.intensity,
            ridge=setup.deployment.device.ridge(op.dtype) if op.flops else None,
            limit=p.limit,
            ideal_s=p.bound.seconds,
            predicted_s=p.seconds,
            low_s=p.low_s,
            high_s=p.high_s,
            measured_s=measured_s,
            share=p.seconds / total_s,
            predicted_flops_per_s=flops / p.seconds if p.seconds else 0.0,
            achieved_flops_per_s=flops / measured_s if measured_s else None,
            by=p.by,
            slow_s=p.seconds * float(np.quantile(seen, 0.9)) if seen else None,
        )


def _measured_shares(one: Looked) -> dict[tuple[str, str], float]:
    """Measured over predicted seconds by op; ops that were timed together share as predicted."""
    found: dict[tuple[str, str], float] = {}
    for names, seconds in one.seen.op_seconds.items():
        timed = [p for p in one.times.predictions if p.op.name in names.split("+")]
        if predicted_s := sum(p.seconds for p in timed):
            found |= {(p.op.name, p.op.phase): seconds / predicted_s for p in timed}
    return found


def _waterfall(
    run: MeasuredRun, setup: Setup, looked: Sequence[Looked], ideal_s: float, by_cache: bool
) -> Iterator[Bar]:
    parts: dict[tuple[str, str], float] = {}  # by bar and constant
    bound_s = busy_s = device_s = 0.0
    for one in looked:
        busy_s += one.weight * one.seen.seconds
        for p in one.times.predictions:
            bound_s += one.weight * p.bound.seconds
            device_s += one.weight * p.seconds
            for key, seconds in _parts(p, setup.calibration):
                parts[key] = parts.get(key, 0.0) + one.weight * seconds
    why, least_s = ("paced", bound_s) if run.paced else ("ceiling", ideal_s)
    yield Bar("ceiling", least_s, OTHER_STEPS[why])
    for bar, why in BARS.items():
        of = {name: seconds for (own, name), seconds in parts.items() if own == bar}
        yield Bar(bar, sum(of.values()), why + _by(of, setup.calibration))
    yield from _host_bars(looked, setup, busy_s - device_s)
    rest_s = run.makespan_s - bound_s - sum(parts.values()) - (busy_s - device_s)
    if run.paced:
        yield Bar(WAITING, rest_s, "requests arrived over the whole run: no loss of the server's")
        return
    name = "KV waves" if by_cache and bound_s > ideal_s else "batching"
    yield Bar(name, bound_s - ideal_s, OTHER_STEPS[name])
    what = "queue and idle" if looked[0].measured else "queue and unexplained"
    yield Bar(what, rest_s, "no step ran" if looked[0].measured else "measured less predicted")


def _by(seconds: Mapping[str, float], known: Calibration | None) -> str:
    """The constants behind a bar, by how much of it they set."""
    if known is None:
        return ""
    named = [
        name if name == MEASURED else f"{name} {getattr(known.constants, name):.3g}"
        for name in sorted(seconds, key=lambda name: -abs(seconds[name]))
        if seconds[name]
    ]
    return f" ({', '.join(named)})" if named else ""


def _host_bars(looked: Sequence[Looked], setup: Setup, above_s: float) -> Iterator[Bar]:
    """`above_s`, by which steps are longer than the device's part: as far as it is known, the host's."""
    host_s = sum(one.weight * one.times.host_s for one in looked)
    why = "what each step waits for the engine's scheduler"
    if setup.calibration and setup.calibration.host:
        why = f"schedule, sample, deliver: {setup.calibration.host}"
    if not looked[0].measured:
        yield Bar("host", above_s, why)
    elif 0 < host_s <= above_s:  # more than all that is above the device's part, it is not of this engine
        yield Bar("host", host_s, why)
        yield Bar("unexplained", above_s - host_s, "steps above what kernels and host are predicted to take")
    else:
        yield Bar("host and unexplained", above_s, "the engine's steps above the device's predicted part")


def _parts(p: Prediction, known: Calibration | None) -> Iterator[tuple[tuple[str, str], float]]:
    """What `p` lasts above its bound, by bar and by the constant that sets it."""
    if known is None:
        return
    above_s, rate = p.seconds - p.bound.seconds, p.by[0]
    floor = p.by[1] if len(p.by) > 1 else "launch_s"
    if p.op.kind in ("elementwise", "collective"):
        bar = "elementwise" if p.op.kind == "elementwise" else "communication"
        floor_s = min(p.floor_s, above_s)
        yield (bar, floor), floor_s
        yield (bar, rate), above_s - floor_s
        return
    mixed_s = p.seconds * (1 - 1 / known.constants.mixed) if "mixed" in p.by else 0.0
    floor_s = min(p.floor_s, above_s - mixed_s)
    yield ("mixed steps", "mixed"), mixed_s
    yield ("launch floors", floor), floor_s
    yield ("kernel efficiency", rate), above_s - mixed_s - floor_s


def device_facts(setup: Setup) -> DeviceFacts:
    on, known = setup.deployment, setup.calibration
    device, dtype = on.device, on.quant.activations
    peak = device.peak_flops_per_s(dtype)
    of = known.constants if known else None
    return DeviceFacts(
        id=device.id,
        name=device.name,
        dtype=dtype,
        n_devices=on.parallel.n_devices,
        peak_flops_per_s=peak,
        levels=device.levels,
        reached_flops_per_s=of.of_products(dtype)[1] * peak if of else None,
        reached_bytes_per_s=of.memory * device.bytes_per_s if of else None,
        measured_spread=known.measured_spread if known else None,
        host=known.host if known else None,
    )


def _assumed(run: MeasuredRun, setup: Setup) -> Iterator[str]:
    yield from run.assumed
    if run.steps is None:
        yield "the engine keeps no step log: its steps are simulated"
    on, known = setup.deployment, setup.calibration
    yield f"peaks and bandwidth of {on.device.name}: {on.device.source} ({on.device.assurance})"
    if known is None:
        yield "no calibration: predictions are ceilings"
    else:
        yield from known.sentences()
    quant = on.quant
    yield f"weights {quant.weights}, activations {quant.activations}, KV cache {quant.kv}"
    yield f"a KV cache of {run.limits.kv_tok:,} tokens in blocks of {run.limits.block_tok}"


def _sentence(phases: Sequence[PhaseRow], device: DeviceFacts, bars: Sequence[Bar]) -> str:
    uses = [f"{row.phase.capitalize()} is {row.use(device)}." for row in reversed(phases)]
    gap = largest_gap(bars)
    told = f"The largest gap is {gap.name}: {gap.seconds:.3g} s." if gap.seconds > 0 else ""
    return " ".join(filter(None, [*uses, told]))


def sensitivity(load: PlannedLoad, base_s: float, setup: Setup) -> Iterator[WhatIf]:
    """The load simulated again with one thing changed at a time; `base_s` is its makespan as it is."""
    if len(load.requests) > 3000:
        yield WhatIf("any", None, None, "more than 3000 requests are not simulated again")
        return
    on, limits = setup.deployment, load.limits
    quant = on.quant
    fp8 = replace(quant, weights="fp8", activations="fp8", group=None)
    wider = replace(on.parallel, tp=2 * on.parallel.tp)
    bigger = replace(limits, max_num_batched_tokens=4 * limits.max_num_batched_tokens)
    changes: list[tuple[str, Setup, Limits]] = [
        ("fp8 weights", _on(setup, quant=fp8), limits),
        ("fp8 KV cache", _on(setup, quant=replace(quant, kv="fp8")), limits),
        (f"TP {wider.tp}", _on(setup, parallel=wider), limits),
        (f"a budget of {bigger.max_num_batched_tokens} tokens a step", setup, bigger),
    ]
    for change, changed, changed_limits in changes:
        try:
            room_tok = _kv_tok(limits.kv_tok, setup, changed)
            within = replace(load, limits=replace(changed_limits, kv_tok=room_tok))
            makespan_s = within.makespan_s(changed.clock())
        except RooflineError as error:
            yield WhatIf(change, None, None, str(error))
        else:
            why = f"with a cache of {room_tok:,} tokens"
            yield WhatIf(change, makespan_s, makespan_s / base_s, why)


def _on(setup: Setup, **changed: Any) -> Setup:
    return replace(setup, deployment=replace(setup.deployment, **changed))


def _kv_tok(kv_tok: int, now: Setup, then: Setup) -> int:
    """The same memory, after weights and cache changed size."""
    (before, per_tok), (after, per_tok_then) = (
        (weight_bytes(on.model, on.quant, on.parallel), kv_bytes(on.model, on.quant, on.parallel, 1))
        for on in (now.deployment, then.deployment)
    )
    return int((kv_tok * per_tok + before - after) / per_tok_then)
