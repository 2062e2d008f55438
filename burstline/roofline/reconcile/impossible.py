"""Impossible rates: beyond every set-up that is consistent with the known facts of the server.

Three bounds, each on an interval that starts when a request was sent and ends when a token arrived, so that
no delay on the way can shorten it: all requests together, the prompts alone, and one request from end to end.
They need no scheduling rule and no token budget: FLOPs over the peak, bytes over the bandwidth, and one pass
over the weights for each token that follows another.

So does one product, where the engine or its profiler timed it: `product_checks`.

A rate above its bound is first put down to what is unknown: more devices, fewer bits, speculative decoding.
Only where none of these explains it is it impossible, or the peak that was measured on this machine too low.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from burstline.roofline.device.calibration import AGREES
from burstline.roofline.device.device import Device
from burstline.roofline.model.ops import Step, ops
from burstline.roofline.model.shapes import ModelShape, Parallel, Quant, token_kv_bytes
from burstline.roofline.predict.predict import ceiling, ceilings, working_set_bytes
from burstline.roofline.reconcile.inputs import Known, MeasuredRun, Setup, StepSeen
from burstline.roofline.reconcile.reconciliation import CAUSES, EXPLANATIONS, Explained, OpRow, Suspicion

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_TOK_A_STEP = 32
"""Tokens of one request in one step that speculation can explain: drafts in use are of 1 to 16 tokens."""
BARS: Final = {"specified": (0.02, 0.02), "measured": AGREES}
"""The shares of peak and of bandwidth by which a rate may exceed them."""
_WINDOWS, _ENDS = 6, 10  # how many beginnings and ends of windows over the prompts are looked at
_MOST_STEPS = 400


@dataclass(frozen=True, slots=True)
class _Machine:
    """A set-up as its bound sees it: all devices together, those that can work on one request, the model."""

    model: ModelShape
    quant: Quant
    fleet: Device | None
    """None: any number of devices, so that requests together have no bound."""
    one_request: Device
    tok_a_step: int


Bound = Callable[[_Machine], float]
Check = tuple[str, Bound, float]
"""What is judged, the least seconds that it takes on a machine, and the seconds measured."""


def judged(checks: Iterable[Check], setup: Setup) -> tuple[list[Suspicion], list[Explained]]:
    """Rates that no consistent set-up could reach, and rates that only an unstated one could."""
    known = setup.calibration is not None and setup.calibration.measured_spread is not None
    of_peak, of_bandwidth = BARS["measured" if known else "specified"]
    fast = setup.deployment.device.times(1 + of_peak, 1 + of_bandwidth)
    lenient = replace(setup, deployment=replace(setup.deployment, device=fast))
    unknown = [part for part in EXPLANATIONS if not getattr(setup.known, part)]

    def reach(measured_s: float, bound: Bound, *loose: str) -> bool:
        return bound(_machine(lenient, setup.known, loose)) <= measured_s

    impossible, explained = [], []
    for what, bound, measured_s in checks:
        if measured_s <= 0 or reach(measured_s, bound):
            continue
        bound_s = bound(_machine(setup, setup.known, ()))
        excess, tolerance = bound_s / measured_s - 1, bound_s / bound(_machine(lenient, setup.known, ())) - 1
        if not unknown or not reach(measured_s, bound, *unknown):
            impossible.append(Suspicion(what, excess, tolerance, CAUSES))
            continue
        words = [EXPLANATIONS[part] for part in unknown if reach(measured_s, bound, part)] or [
            "together, " + " and ".join(EXPLANATIONS[part] for part in unknown)
        ]
        explained.append(Explained(what, excess, tuple(words)))
    return impossible, explained


def _machine(setup: Setup, known: Known, loose: tuple[str, ...]) -> _Machine:
    """The set-up as assumed, but with the best possible case of every part in `loose`."""
    on, quant = setup.deployment, setup.deployment.quant
    device = on.device
    if "weights" in loose:
        device, quant = _fewest_bits(device, quant)
    if "compute" in loose:
        device = device.times(math.inf, 1)
    if "kv" in loose:
        quant = replace(quant, kv="fp4")
    n_all, n_one = on.parallel.n_devices, on.parallel.n_for_one_request
    fleet: Device | None = _joined(device, n_all)
    if "devices" in loose:
        fleet = None if known.at_most is None else _joined(device, max(n_all, known.at_most))
        n_one = max(n_one, known.one_request)
    one = _joined(device, n_one)
    tok = MOST_TOK_A_STEP if "speculation" in loose else setup.draft_tok + 1
    return _Machine(on.model, quant, fleet, one, tok)


def _fewest_bits(device: Device, quant: Quant) -> tuple[Device, Quant]:
    """4-bit weights and the fastest peak; a device measured in one dtype may have a faster one."""
    if device.arch == "measured":
        return device.times(math.inf, 1), replace(quant, weights="fp4", group=None)
    fastest = max(
        (dtype for dtype in device.peaks if dtype not in ("int4", "tf32")), key=device.peaks.__getitem__
    )
    return device, Quant("fp4", fastest, quant.kv)


def _joined(device: Device, n: int) -> Device:
    """`n` devices as one: no way to divide a model among them is faster than all of it on this one."""
    return replace(device.times(n, n, n), links=())


def _of_fleet(bound: Callable[[_Machine, Device], float]) -> Bound:
    """The bound of all devices together: none where any number of them may serve."""
    return lambda machine: 0.0 if machine.fleet is None else bound(machine, machine.fleet)


def run_checks(run: MeasuredRun) -> Iterator[Check]:
    """(what, its bound, the seconds measured)."""
    yield "the whole run", _of_fleet(lambda machine, fleet: _all_s(machine, fleet, run)), run.makespan_s
    if run.first_s is not None and run.last_s is not None:
        yield from _prompt_checks(run, run.first_s)
        yield from _request_checks(run, run.first_s, run.last_s)
    yield from _step_checks(run)


def _amounts(run: MeasuredRun) -> tuple[Floats, Ints, Ints, Ints]:
    """Per request: when it was sent, its prompt, the part of it that was computed, its output."""
    rows = [(r.due_s, r.prompt_tok, r.prompt_tok - r.cached_tok, r.output_tok) for r in run.requests]
    sent, prompt, computed, output = (np.array(column) for column in zip(*rows, strict=True))
    return sent.astype(np.float64), prompt, np.maximum(computed, 1), output


def _compute_s(machine: _Machine, device: Device, step: Step) -> float:
    found = ops(machine.model, machine.quant, Parallel(), step)
    return sum(ceiling(op, device).compute_s for op in found)


def _prefill(new: Ints, context: Ints) -> Step:
    return Step(new, context, np.ones_like(new))


def _decode(prompt: Ints, output: Ints) -> Step:
    """All tokens after the first, as one step: the FLOPs of theirs, and each query's own keys."""
    many = output > 1
    new = output[many] - 1
    return Step(new, prompt[many] + new, new)


def _all_s(machine: _Machine, fleet: Device, run: MeasuredRun) -> float:
    _, prompt, computed, output = _amounts(run)
    compute_s = _compute_s(machine, fleet, _prefill(computed, prompt))
    after = _decode(prompt, output)
    if after.n_requests:
        compute_s += _compute_s(machine, fleet, after)
    longest = int(output.argmax())
    passes_s = _decode_memory_s(machine, fleet, prompt[[longest]], output[[longest]])
    return max(compute_s, passes_s, _cache_s(machine, fleet, prompt, output))


def _decode_memory_s(machine: _Machine, device: Device, prompt: Ints, output: Ints) -> float:
    """One request's tokens one after the other: a pass over the weights and its keys for each."""
    n_steps = -(-(int(output[0]) - 1) // machine.tok_a_step)
    found = ops(machine.model, machine.quant, Parallel(), Step.decode(1, int(prompt[0]) + 1))
    return n_steps * sum(bound.memory_s for bound in ceilings(found, device))


def _cache_s(machine: _Machine, device: Device, prompt: Ints, output: Ints) -> float:
    """Every token reads its request's keys, and shares the weights' passes of the longest request."""
    if (output < 2).all():
        return 0.0
    step = _decode(prompt, output)
    moved = 0.0
    for layer in machine.model.layers:
        per_tok = token_kv_bytes(layer.attention, 1, machine.quant.kv) * layer.count
        moved += per_tok * step.keys_seen(layer.attention.window) / machine.tok_a_step
    found = ops(machine.model, machine.quant, Parallel(), Step.decode(1, int(prompt.max()) + 1))
    swept = working_set_bytes(found)
    weights_s = sum(ceiling(op, device, swept).memory_s for op in found if op.kind == "matmul")
    if swept < 4 * device.cache_bytes:  # much of the keys may stay in the cache
        return 0.0
    return moved / device.bytes_per_s + (int(output.max()) - 1) / machine.tok_a_step * weights_s


def _prompt_checks(run: MeasuredRun, first_s: Floats) -> Iterator[Check]:
    """Prompts sent after one instant and answered before another were computed between the two.

    Of several such windows the one that leaves the least time for a token is judged.
    """
    sent, prompt, computed, _ = _amounts(run)
    windows: list[tuple[float, float, Ints]] = []
    for begin in np.unique(np.quantile(sent, np.linspace(0, 0.9, _WINDOWS), method="lower")):
        after = np.flatnonzero(sent >= begin)
        after = after[np.argsort(first_s[after], kind="stable")]
        for n in np.unique(np.linspace(1, len(after), _ENDS).round().astype(int)):
            chosen = after[:n]
            seconds = float(first_s[chosen[-1]] - begin)
            windows.append((seconds / computed[chosen].sum(), seconds, chosen))
    _, seconds, chosen = min(windows, key=lambda window: window[0])
    step = _prefill(computed[chosen], prompt[chosen])
    yield "prefill", _of_fleet(lambda machine, fleet: _compute_s(machine, fleet, step)), seconds


def _request_checks(run: MeasuredRun, first_s: Floats, last_s: Floats) -> Iterator[Check]:
    """The request with the least time for its prompt, and the one with the least for its tokens."""
    sent, prompt, computed, output = _amounts(run)
    quick = int(((first_s - sent) / computed).argmin())

    def to_first(machine: _Machine) -> float:
        return _compute_s(machine, machine.one_request, _prefill(computed[[quick]], prompt[[quick]]))

    yield "a first token", to_first, float(first_s[quick] - sent[quick])
    dense = int(((last_s - sent) / output).argmin())

    def to_last(machine: _Machine) -> float:
        own = prompt[[dense]], output[[dense]]
        prefill_s = _compute_s(machine, machine.one_request, _prefill(computed[[dense]], prompt[[dense]]))
        return prefill_s + _decode_memory_s(machine, machine.one_request, *own)

    yield "a request from end to end", to_last, float(last_s[dense] - sent[dense])


def _step_checks(run: MeasuredRun) -> Iterator[Check]:
    """Steps of the engine's own log, by phase. Steps inferred from the stream rest on assumptions."""
    if run.steps is None or not run.logged:
        return
    at = np.linspace(0, len(run.steps) - 1, min(len(run.steps), _MOST_STEPS)).round().astype(int)
    steps = [run.steps[i] for i in np.unique(at)]
    for phase in ("decode", "prefill"):
        of = [seen for seen in steps if seen.step.phase == phase]
        if not of:
            continue

        def bound(machine: _Machine, fleet: Device, of: Sequence[StepSeen] = of) -> float:
            found = (ops(machine.model, machine.quant, Parallel(), seen.step) for seen in of)
            return sum(b.seconds for each in found for b in ceilings(each, fleet))

        yield f"{phase} steps", _of_fleet(bound), sum(seen.seconds for seen in of)


def product_checks(step: Step, ops_seen: Sequence[OpRow]) -> Iterator[Check]:
    """Each matrix product of a step that was timed by itself."""
    for row in ops_seen:
        if row.measured_s is None or not row.kind.startswith("matmul"):
            continue

        def bound(machine: _Machine, fleet: Device, name: str = row.name) -> float:
            found = ceilings(ops(machine.model, machine.quant, Parallel(), step), fleet)
            return sum(b.seconds for b in found if b.op.name == name)

        yield f"the product {row.label}", _of_fleet(bound), row.measured_s
