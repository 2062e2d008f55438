"""All figures of many traces for any constants, in milliseconds: the product's formulas over whole arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from burstline.roofline.device.calibration import (
    NARROW,
    Calibration,
    Constants,
    HostFit,
    load_calibration,
    stack_host,
)
from burstline.roofline.device.collectives import collective_s
from burstline.roofline.model.ops import Op
from burstline.roofline.predict.bound import ceilings
from burstline.roofline.predict.kernels import Amounts, Products, decode_s, prefill_s, product_s
from research.points import Trace

NAMES = tuple(slot.name for slot in fields(Constants))


@dataclass(frozen=True)
class Change:
    """Other values of constants, for every device that has none of its own, and another host of a stack."""

    values: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, HostFit] = field(default_factory=dict)

    def known(self, shipped: Calibration) -> Constants:
        own = {name: getattr(shipped.constants, name) for name in shipped.own}
        return replace(shipped.constants, **{**self.values, **own})


class Tried:
    """The ops of all steps of all traces, by column, and what each step weighs in each figure."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = traces
        self.devices = list(dict.fromkeys(trace.load.device for trace in traces))
        self.shipped = {t.load.device: load_calibration(t.load.deployment.device) for t in traces}
        rows: list[tuple[float, ...]] = []
        steps: list[tuple[float, ...]] = []
        self.stacks = list(dict.fromkeys(trace.load.stack for trace in traces))
        self.figures: list[tuple[Trace, str]] = []
        weights: list[Amounts] = []
        for trace in traces:
            first = len(steps)
            for step, found in zip(trace.steps, trace.ops, strict=True):
                prompt_tok = float(step.new_tok[step.new_tok > 1].sum())
                steps.append((self.stacks.index(trace.load.stack), step.n_logits, prompt_tok))
                rows += _rows(trace, found, len(steps) - 1, self.devices.index(trace.load.device))
            for name, each in trace.weights.items():
                self.figures.append((trace, name))
                weights.append(np.stack([np.arange(first, len(steps)), np.asarray(each)]))
        self.op = SimpleNamespace(**dict(zip(_COLUMNS, np.array(rows, dtype=float).T, strict=True)))
        self.step = SimpleNamespace(
            **dict(zip(("stack", "n_logits", "prompt_tok"), np.array(steps, dtype=float).T, strict=True))
        )
        self.at = np.concatenate([each[0] for each in weights]).astype(int)
        self.weight = np.concatenate([each[1] for each in weights])
        self.figure = np.repeat(np.arange(len(weights)), [each.shape[1] for each in weights])
        self.rest_s = np.array([trace.rest_s[name] for trace, name in self.figures])
        self.measured = np.array([trace.load.measured[name] for trace, name in self.figures])
        self.is_rate = np.array([name == "throughput" for _, name in self.figures])

    def ratios(self, change: Change = Change()) -> Amounts:
        """Predicted over measured, one for each of `figures`."""
        table = np.array([[getattr(change.known(self.shipped[d]), n) for n in NAMES] for d in self.devices])
        of: Any = SimpleNamespace(**dict(zip(NAMES, table[self.op.device.astype(int)].T, strict=True)))
        seconds = self.op.count * _seconds(of, self.op)
        in_step = self.op.step.astype(int)
        kernels_s = np.bincount(in_step, seconds, len(self.step.stack))
        launches = np.bincount(in_step, self.op.count, len(self.step.stack))
        seconds = kernels_s + self._host_s(change, np.asarray(kernels_s), np.asarray(launches))
        figures = self.rest_s + np.bincount(self.figure, self.weight * seconds[self.at], len(self.figures))
        return np.asarray(np.where(self.is_rate, 1 / figures, figures) / self.measured)

    def _host_s(self, change: Change, kernels_s: Amounts, launches: Amounts) -> Amounts:
        found = np.zeros(len(kernels_s))
        for i, stack in enumerate(self.stacks):
            host = change.host.get(stack) or stack_host(stack)
            of = self.step.stack == i
            found[of] = host.added_s(
                self.step.n_logits[of], self.step.prompt_tok[of], launches[of], kernels_s[of]
            )
        return found


_COLUMNS = (
    "step", "device", "kind", "count", "m", "n", "k", "groups", "bytes", "flops", "kv_bytes",
    "activation_bytes", "keys", "ideal_s", "peak", "bytes_per_s", "narrow", "mixed", "bound_s",
)  # fmt: skip
_KINDS = {"matmul": 0, "decode": 1, "prefill": 2, "collective": 3, "elementwise": 4}


def _rows(trace: Trace, found: Sequence[Op], step: int, device_index: int) -> list[tuple[float, ...]]:
    device = trace.load.deployment.device
    rows: list[tuple[float, ...]] = []
    mixes = trace.load.backend == "vllm" and len({op.phase for op in found if op.kind == "attention"}) > 1
    for op, bound in zip(found, ceilings(found, device), strict=True):
        kind = op.phase if op.kind == "attention" else op.kind
        ideal = (
            collective_s(op.collective, op.link_bytes, op.n_ranks, device.links)[0] if op.collective else 0
        )
        keys = op.flops / (op.m * op.groups) / (4 * op.n_heads * op.k) if op.n_heads else 0.0
        peak = device.peak_flops_per_s(op.dtype) if kind in ("matmul", "decode", "prefill") else 1.0
        narrow = float(op.dtype in NARROW)
        bound_s = bound.seconds / op.count if op.kind in ("matmul", "attention") else 0.0
        rows.append(
            (step, device_index, _KINDS[kind], op.count, op.m, op.n, op.k, op.groups, op.bytes, op.flops,
             op.kv_bytes, op.activation_bytes, keys, ideal, peak, device.bytes_per_s, narrow,
             float(mixes and kind == "decode"), bound_s)
        )  # fmt: skip
    return rows


def _seconds(of: Any, op: Any) -> Amounts:
    """Of one run of each op; as `predict` has it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share, pad = np.where(op.narrow == 1, of.product_8, of.product), op.narrow * of.pad_8
        x = Products(op.m, op.n, op.k, op.groups, op.bytes)
        products = product_s(of, (op.peak, op.bytes_per_s), share, pad, x)
        decodes = decode_s(of, op.bytes_per_s, op.n, op.kv_bytes, op.activation_bytes)
        decodes = np.maximum(decodes, of.attention_s + op.flops / (of.prompt * op.peak))
        decodes = decodes * np.where(op.mixed == 1, of.mixed, 1.0)
        prefills = prefill_s(of, op.peak, op.flops, op.keys)
        prefills = np.maximum(prefills, of.attention_s + op.kv_bytes / (of.cache * op.bytes_per_s))
        links = of.launch_s + op.ideal_s / of.link
        passes = of.pass_s + op.bytes / (of.passes * op.bytes_per_s)
        found = np.select([op.kind == i for i in range(5)], [products, decodes, prefills, links, passes])
    return np.asarray(np.maximum(found, op.bound_s))
