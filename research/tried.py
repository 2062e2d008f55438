"""All figures of many traces for any constants, in milliseconds: the product's formula over whole arrays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from burstline.roofline.device.calibration import (
    Calibration,
    Constants,
    HostFit,
    load_calibration,
    stack_host,
)
from burstline.roofline.model.ops import Op
from burstline.roofline.predict.kernels import Amounts, Work, op_s
from burstline.roofline.predict.predict import ceilings, kernel, work
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
        rows: dict[str, list[list[float]]] = {}
        steps: list[tuple[float, ...]] = []
        self.stacks = list(dict.fromkeys(trace.load.stack for trace in traces))
        self.figures: list[tuple[Trace, str]] = []
        weights: list[Amounts] = []
        for trace in traces:
            first = len(steps)
            for step, found in zip(trace.steps, trace.ops, strict=True):
                prompt_tok = float(step.new_tok[step.new_tok > 1].sum())
                steps.append((self.stacks.index(trace.load.stack), step.n_logits, prompt_tok))
                at_device = self.devices.index(trace.load.device)
                for kind, row in _rows(trace, found, len(steps) - 1, at_device):
                    rows.setdefault(kind, []).append(row)
            for name, each in trace.weights.items():
                self.figures.append((trace, name))
                weights.append(np.stack([np.arange(first, len(steps)), np.asarray(each)]))
        self.ops = {kind: np.array(each, dtype=float).T for kind, each in rows.items()}
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
        n_steps = len(self.step.stack)
        kernels_s, launches = np.zeros(n_steps), np.zeros(n_steps)
        for kind, columns in self.ops.items():
            step, device, count, mixed, bound_s = columns[: len(_ROW)]
            of: Any = SimpleNamespace(**dict(zip(NAMES, table[device.astype(int)].T, strict=True)))
            one_s = op_s(kind, of, Work(*columns[len(_ROW) :])) * np.where(mixed == 1, of.mixed, 1.0)
            kernels_s += np.bincount(step.astype(int), count * np.maximum(one_s, bound_s), n_steps)
            launches += np.bincount(step.astype(int), count, n_steps)
        seconds = kernels_s + self._host_s(change, kernels_s, launches)
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


_ROW = ("step", "device", "count", "mixed", "bound_s")
"""What stands before an op's `Work`; seconds of the bound are of one run."""


def _rows(
    trace: Trace, found: Sequence[Op], step: int, device_index: int
) -> Iterator[tuple[str, list[float]]]:
    """Each op's kind of kernel, its `_ROW`, and its `Work`."""
    device = trace.load.deployment.device
    mixes = trace.load.backend == "vllm" and len({op.phase for op in found if op.kind == "attention"}) > 1
    for op, bound in zip(found, ceilings(found, device), strict=True):
        mixed = mixes and op.kind == "attention" and op.phase == "decode"
        bound_s = bound.seconds / op.count if op.kind in ("matmul", "attention") else 0.0
        yield kernel(op), [step, device_index, op.count, mixed, bound_s, *work(op, device)]
