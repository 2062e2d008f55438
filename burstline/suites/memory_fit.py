"""What of a suite fits the memory of its platforms' devices, by the roofline's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from burstline.bench.load_options import checked
from burstline.reports.number_format import counted
from burstline.roofline.device.device import load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import load_model
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS
from burstline.roofline.predict.capacity import largest_batch, room
from burstline.servers.settings import Settings
from burstline.suites.suite import Slot

_QUANTS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def fits(slots: Sequence[Slot]) -> Iterator[str]:
    """A line for each load of each model on each platform whose device is stated."""
    seen = set()
    for slot in slots:
        if slot.platform is None or slot.platform.device is None or slot.engine.server.url is not None:
            continue
        settings = slot.engine.at(slot.model, slot.platform).settings
        parallel = Parallel(tp=settings.tensor_parallel_size or 1, pp=settings.pipeline_parallel_size or 1)
        if (slot.cell, parallel) not in seen:
            seen.add((slot.cell, parallel))
            n = parallel.tp * parallel.pp
            yield f"{slot.cell}, {counted(n, 'GPU')}: {_fit(slot, settings, parallel)}"


def _fit(slot: Slot, settings: Settings, parallel: Parallel) -> str:
    n_tok = checked(slot.workload.spec).longest_tok
    assert slot.platform is not None
    assert slot.platform.device is not None
    try:
        model, quant = load_model(slot.model.like or slot.model.path or "")
        quant = QUANTS[_QUANTS[settings.dtype]] if settings.dtype in _QUANTS else quant
        device = load_device(slot.platform.device)
        kv = room(model, quant, parallel, device, utilisation=settings.gpu_memory_utilization or 0.9)
    except RooflineError as error:
        return f"does not fit: {error}"
    fit = f"fits, {kv.weight_bytes / 1e9:.1f} GB of weights a GPU"
    if n_tok is None:
        return fit
    most = largest_batch(model, quant, parallel, kv, n_tok)
    return f"{fit}, room for {counted(most, 'request')} of {n_tok:,} tokens"
