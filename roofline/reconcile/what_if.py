"""What would have made a run shorter: fewer bits, more devices, a larger budget."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roofline.errors import RooflineError
from roofline.predict.capacity import kv_bytes, weight_bytes
from roofline.predict.simulate import Limits, simulate
from roofline.reconcile.inputs import Run, Setup
from roofline.reconcile.reconciliation import WhatIf


def sensitivity(run: Run, setup: Setup, base_s: float) -> Iterator[WhatIf]:
    """The run simulated again with one thing changed at a time; `base_s` is its makespan as it is."""
    if len(run.requests) > 3000:
        yield WhatIf("any", None, None, "more than 3000 requests are not simulated again")
        return
    on, limits = setup.deployment, run.limits
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
            room_tok = _kv_tok(run.limits.kv_tok, setup, changed)
            result = simulate(run.requests, replace(changed_limits, kv_tok=room_tok), changed.clock())
        except RooflineError as error:
            yield WhatIf(change, None, None, str(error))
        else:
            why = f"with a cache of {room_tok:,} tokens"
            yield WhatIf(change, result.makespan_s, result.makespan_s / base_s, why)


def _on(setup: Setup, **changed: Any) -> Setup:
    return replace(setup, deployment=replace(setup.deployment, **changed))


def _kv_tok(kv_tok: int, now: Setup, then: Setup) -> int:
    """The same memory, after weights and cache changed size."""
    (before, per_tok), (after, per_tok_then) = (
        (weight_bytes(on.model, on.quant, on.parallel), kv_bytes(on.model, on.quant, on.parallel, 1))
        for on in (now.deployment, then.deployment)
    )
    return int((kv_tok * per_tok + before - after) / per_tok_then)
