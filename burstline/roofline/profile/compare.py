"""A profile beside the roofline: what each product took, its ceiling, and what a better kernel would gain."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Final

import numpy as np

from burstline.roofline.model.ops import Phase, Step
from burstline.roofline.profile.attribute import ATTENTION, CACHE, OPS, PASSES, Profile, ProfiledStep
from burstline.roofline.profile.trace import Group
from burstline.roofline.reconcile.impossible import Check, judged
from burstline.roofline.reconcile.inputs import Setup, StepSeen
from burstline.roofline.reconcile.reconcile import device_facts, look, phase_row, timed_products
from burstline.roofline.reconcile.reconciliation import PhaseRow, Profiled
from burstline.wording import time_text

N_TYPICAL: Final = 30
"""Steps of a phase that count: those whose number of tokens is nearest the median."""
NO_OPERATOR, SPREAD = "no operator", "disturbances"


def compare(profile: Profile, setup: Setup, decode_context_tok: float) -> Profiled:
    """The profile's typical steps against `setup`, which says what they should take.

    `decode_context_tok` is the mean context of a decoding request, where the trace does not say it.
    """
    steps_of: dict[Phase, list[ProfiledStep]] = {"prefill": [], "decode": []}
    for step in profile.steps:
        steps_of["prefill" if step.prompts.n_requests else "decode"].append(step)
    found = [_phase(phase, steps, setup, decode_context_tok) for phase, steps in steps_of.items() if steps]
    phases = tuple(row for row, _ in found)
    suspicions, _ = judged(chain.from_iterable(checks for _, checks in found), setup)
    notes = list(profile.notes)
    ran = {dtype for step in profile.steps for dtype in step.dtypes}
    if ran - {setup.deployment.quant.activations}:
        assumed = f"the comparison assumes {setup.deployment.quant.activations} (--quant)"
        notes.append(f"products ran in {' and '.join(sorted(ran))}; {assumed}")
    if any(step.decodes.n_requests and step.decodes.context_tok is None for step in profile.steps):
        notes.append(f"a request decodes at {decode_context_tok:.0f} tokens: the trace tells no contexts")
    sentences = tuple(sentence for phase in phases for sentence in _sentences(phase))
    return Profiled(sentences, phases, device_facts(setup), tuple(notes), tuple(suspicions))


def _phase(
    phase: Phase, steps: Sequence[ProfiledStep], setup: Setup, context_tok: float
) -> tuple[PhaseRow, Iterator[Check]]:
    """The typical steps as one, each part a median; and its products, to be judged.

    Disturbances are what the median step is longer than their sum: other programs stop each step elsewhere.
    """
    sizes = np.array([step.prompts.n_tok + step.decodes.n_tok for step in steps])
    nearest = np.argsort(np.abs(sizes - np.median(sizes)), kind="stable")[:N_TYPICAL]
    typical = [steps[i] for i in nearest]
    looked = look([_seen(step, context_tok) for step in typical], setup, measured=True)
    row = phase_row(phase, looked, setup)
    products = timed_products(row, looked)
    measured = {op.name for op in row.ops if op.measured_s}
    lone = {
        name for step in typical for name in step.parts if not measured & set(_ops_of(name, step).split("+"))
    }
    rest = {name: median(step.parts.get(name, 0.0) for step in typical) for name in sorted(lone)}
    rest[NO_OPERATOR] = median(step.seconds - sum(step.parts.values()) for step in typical)
    row = replace(row, n_steps=len(steps), rest=rest)
    spread_s = max(0.0, median(step.seconds for step in typical) - row.step_s)
    row = replace(row, rest=rest | {SPREAD: spread_s})
    ops = tuple(replace(op, share=(op.measured_s or 0.0) / row.step_s) for op in row.ops)
    afters = [step.after_s for step in typical if step.after_s is not None]
    return replace(row, ops=ops, after_s=median(afters) if afters else None), products


def _ops_of(module: str, step: ProfiledStep) -> str:
    """Attention that no cache writes or passes stand beside holds them itself."""
    inside = {"+kv_write": CACHE, "+rope": PASSES} if module == ATTENTION else {}
    return OPS.get(module, module) + "".join(op for op, own in inside.items() if own not in step.parts)


def _seen(step: ProfiledStep, decode_context_tok: float) -> StepSeen:
    """The step as the roofline takes it: requests of one phase share its tokens and contexts evenly."""
    prompts, decodes = step.prompts, step.decodes
    decoding_tok = round(decode_context_tok * decodes.n_requests)
    rows = [*_shared(prompts, prompts.n_tok), *_shared(decodes, decoding_tok)]
    new, context = np.array(rows, dtype=np.int64).T
    logits = (np.arange(len(rows)) >= len(rows) - (step.n_logits or len(rows))).astype(np.int64)
    seconds = {_ops_of(name, step): seconds for name, seconds in step.parts.items()}
    return StepSeen(Step(new, np.maximum(new, context), logits), step.seconds, seconds)


def _shared(group: Group, context_tok: int) -> Iterator[tuple[int, int]]:
    n, tok = group.n_requests, context_tok if group.context_tok is None else group.context_tok
    for i in range(n):
        yield group.n_tok // n + (i < group.n_tok % n), tok // n + (i < tok % n)


def _sentences(phase: PhaseRow) -> Iterator[str]:
    """What is lost where, most first; then where the model itself errs."""
    step_s, told = phase.step_s, list[str]()
    timed = [(op, op.measured_s) for op in phase.ops if op.measured_s and op.kind != "elementwise"]
    for op, took_s in sorted(timed, key=lambda pair: pair[0].ideal_s - pair[1])[:3]:
        lost_s = max(0.0, took_s - op.ideal_s)
        ceiling = f"the {op.limit} ceiling" if op.limit in ("memory", "compute") else "its ceiling"
        lost = f"{time_text(lost_s)} of the step ({lost_s / step_s:.0%}) are lost there"
        told.append(f"{op.label} reaches {op.ideal_s / took_s:.0%} of {ceiling}: {lost}")
    if (gap_s := phase.rest[NO_OPERATOR]) > 0.03 * step_s:
        told.append(f"no operator runs for {time_text(gap_s)} ({gap_s / step_s:.0%})")
    if phase.after_s:
        told.append(f"the next step begins {time_text(phase.after_s)} later")
    begin = phase.phase.capitalize()
    yield f"{begin}: {'; '.join(told)}."
    missed = [
        f"{op.label} took {time_text(took_s)} ({time_text(op.low_s)} to {time_text(op.high_s)})"
        for op, took_s in timed
        if not op.low_s <= took_s <= op.high_s
    ]
    if missed:
        why = "a slower one is a miss of the model or of the kernel, a faster one of the model"
        yield f"{begin}: outside the range that the model states: {'; '.join(missed)}: {why}."
