"""Which module of the model each operator or kernel of a trace belongs to, step by step.

Products go by their shapes: rows of k numbers and a matrix of the model's. A GPU's kernel belongs to the
operator that launched it (correlation id); kernels of a CUDA graph, which no operator launches, go by their
order within a layer. What fits nothing is "not attributed", and is shown as that.
"""

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Final

from burstline.errors import RooflineError, tables_beside
from burstline.roofline.model.shapes import Attention, ModelShape, Parallel
from burstline.roofline.profile.trace import (
    COMPILED,
    Group,
    ProfilerTrace,
    TraceEvent,
    composition,
    traces_at,
)

ATTENTION, CACHE, PASSES, SAMPLING = "attention", "cache", "passes", "sampling"
COMMUNICATION, EXPERTS, HEAD, UNKNOWN = "communication", "experts", "lm_head", "not attributed"
_MODULES: Final = tables_beside(__file__, "modules.toml")
OPS: Final[Mapping[str, str]] = _MODULES["ops"]
_PRODUCT: Final = re.compile(r"(?:^|::|_)(?:add|ba)?(?:b?mm|matmul|linear)(?:_|$)|_pointwise|gemm|gemv|nvjet")
_REDUCES: Final = re.compile(r"splitk_?reduce|reduce_kernel")
_ROUNDED_US: Final = 0.01
"""Operators that follow at once may overlap by this: times since a machine's start have no more digits."""
_PADDED: Final = 257
"""Rows and columns that engines add to a matrix: to an MLP's for their kernels, to the vocabulary."""


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A forward pass: its requests, the rows of its products and of the head's, seconds by module.

    `seconds` is that of the engine's annotation, or on a GPU from its first kernel to the end of its last,
    with the operators that follow, which sample; `after_s` the rest until the next step, None for the last.
    """

    seconds: float
    prompts: Group
    decodes: Group
    rows: int
    n_logits: int
    dtypes: tuple[str, ...]
    parts: Mapping[str, float]
    after_s: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    steps: tuple[ProfiledStep, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Work:
    """What ran: an operator with what is inside it, or a kernel. A product has rows.

    `module` is "" for a kernel whose operator does not tell; `is_whole`: the module is that of all inside.
    `at_us`: when it was launched.
    """

    module: str = ""
    rows: int = 0
    dtype: str = ""
    is_whole: bool = False
    name: str = ""
    begin_us: float = 0.0
    us: float = 0.0
    at_us: float = 0.0


def profile_of(path: Path, model: ModelShape, parallel: Parallel) -> Profile:
    """The profile in a trace, or in a folder with one for each rank; RooflineError where there is none."""
    traces = traces_at(path)
    if len(traces) > parallel.n_devices:
        raise RooflineError(
            f"{path} holds traces of {len(traces)} ranks, but the model is on {parallel.n_devices}: give "
            f"--tp {len(traces)}, or name one file"
        )
    ranks = [_steps_of(trace, _Layers(model, parallel)) for trace in traces]
    if not all(ranks):
        raise RooflineError(f"{path} holds no whole step with products; record more of them")
    spoke = [sum(step.parts.get(COMMUNICATION, 0.0) for step in steps) for steps in ranks]
    busy = [sum(step.seconds for step in steps) - s for steps, s in zip(ranks, spoke, strict=True)]
    slowest = busy.index(max(busy))
    trace, steps = traces[slowest], ranks[slowest]
    on_gpu = any(event.kind == "kernel" for event in trace.events)
    notes = [f"times are of {'kernels' if on_gpu else 'operators'}"]
    if trace.n_steps > len(trace.steps):
        notes.append(f"of {trace.n_steps:,} steps the first {len(trace.steps):,} were read")
    if not trace.steps:
        notes.append("steps are not annotated: each ends with the product of the LM head")
    padded = [step for step in steps if step.rows and step.rows != step.prompts.n_tok + step.decodes.n_tok]
    if padded:
        notes.append(f"products of {len(padded):,} steps have other rows than the step has tokens (padding)")
    if len(ranks) > 1:
        waited_s = max(0.0, (sum(spoke) - len(spoke) * spoke[slowest]) / (len(ranks) - 1) / len(steps))
        waited = f"others wait {waited_s * 1e3:.3g} ms a step for it"
        notes.append(f"rank {slowest} of {len(ranks)} is the slowest and is shown; {waited}")
    return Profile(tuple(steps), tuple(notes))


def _steps_of(trace: ProfilerTrace, layers: "_Layers") -> list[ProfiledStep]:
    ops = [event for event in trace.events if event.kind == "cpu_op"]
    threads = Counter(event.thread for event in ops if _PRODUCT.search(event.name.lower()))
    thread = trace.steps[0].thread if trace.steps else max(threads, key=threads.__getitem__, default="")
    work, launched = _walk([e for e in trace.events if e.thread == thread], layers)
    if not any(one.rows for one in work):
        raise RooflineError(
            f"{trace.path} holds no matrix product of {layers.model}'s shapes: record the engine's worker, "
            "with shapes (torch.profiler's record_shapes=True), or give its own --model and --tp"
        )
    marks = trace.steps or _by_heads(work)
    kernels = sorted((e for e in trace.events if e.kind == "kernel"), key=lambda event: event.begin_us)
    if kernels:  # an operator is as long as its kernels, which run after its launch
        work = [
            replace(
                launched.get(kernel.correlation, _Work(at_us=kernel.begin_us)),
                name=kernel.name.lower(), begin_us=kernel.begin_us, us=kernel.us,
            )
            for kernel in kernels
        ]  # fmt: skip
    begins = [mark.begin_us for mark in marks]
    work_of = defaultdict[int, list[_Work]](list)
    for one in work:
        work_of[bisect_right(begins, one.at_us) - 1].append(one)
    n_whole = len(marks) - (trace.n_steps > len(marks))  # of the last one kernels may be missing
    follow = zip(marks[:n_whole], [*begins[1:], None], strict=False)
    steps = [_step(mark, next_us, work_of[i], layers, on_gpu=bool(kernels))
             for i, (mark, next_us) in enumerate(follow)]  # fmt: skip
    # vLLM marks idle steps, too.
    return [step for step in steps if step and step.prompts.n_tok + step.decodes.n_tok]


def _by_heads(work: Sequence[_Work]) -> tuple[TraceEvent, ...]:
    """Steps of a trace without annotations: up to the end of each product of the head."""
    cuts = [work[0].begin_us, *(one.begin_us + one.us for one in work if one.module == HEAD)]
    return tuple(TraceEvent("", "", "", begin, end - begin, (), "", None) for begin, end in pairwise(cuts))


def _step(
    mark: TraceEvent, next_us: float | None, work: Sequence[_Work], layers: "_Layers", *, on_gpu: bool
) -> ProfiledStep | None:
    """The step of an annotation; what was launched behind it, until the next step, samples."""
    inside = [one for one in work if one.at_us < mark.end_us]
    if not inside:
        return None
    sampling_s = sum(one.us for one in work if one.at_us >= mark.end_us) / 1e6
    parts = defaultdict[str, float](float, {SAMPLING: sampling_s} if sampling_s else {})
    modules = layers.modules_of(inside) if on_gpu else [one.module for one in inside]
    for module, one in zip(modules, inside, strict=True):
        parts[module] += one.us / 1e6
    forward_us = max(one.begin_us + one.us for one in inside) - inside[0].begin_us if on_gpu else mark.us
    rows = max((one.rows for one in inside if one.module != HEAD), default=0)
    n_logits = max((one.rows for one in inside if one.module == HEAD), default=0)
    own = Group(n_logits, rows or n_logits)  # of a graph only the head's rows are known: it decodes
    both = composition(mark.name) or ((Group(), own) if own.n_tok == n_logits else (own, Group()))
    dtypes = tuple(sorted({one.dtype for one in inside} - {""}))
    after_s = None if next_us is None else max(0.0, (next_us - mark.end_us) / 1e6 - sampling_s)
    return ProfiledStep(forward_us / 1e6 + sampling_s, *both, rows, n_logits, dtypes, dict(parts), after_s)


def _walk(events: Sequence[TraceEvent], layers: "_Layers") -> tuple[list[_Work], dict[int | None, _Work]]:
    """The work of one thread, and by correlation id the work that launched something, and when.

    The outermost operator with a module stands for all inside it; of others, what they took themselves is
    work. Together that is the time in which any operator ran.
    """
    work: list[_Work] = []
    launched: dict[int | None, _Work] = {}
    stack: list[tuple[float, _Work]] = []  # until when
    for event in sorted(events, key=lambda event: (event.begin_us, -event.us)):
        while stack and stack[-1][0] <= event.begin_us + _ROUNDED_US:
            stack.pop()
        one = stack[-1][1] if stack else None
        if event.kind != "cpu_op":
            if event.correlation is not None:
                of = one if one and one.is_whole else _Work()
                launched[event.correlation] = replace(of, at_us=event.begin_us)
            continue
        if one is None or not one.is_whole:
            if one:
                one.us -= event.us
            module, rows, is_whole = layers.module_of(event)
            dtype, begin_us = event.dtype if rows else "", event.begin_us
            one = _Work(module, rows, dtype, is_whole, event.name, begin_us, event.us, begin_us)
            work.append(one)
        stack.append((event.end_us, one))
    return [one for one in work if one.is_whole or one.us > 0], launched


class _Layers:
    """The model's products on one rank, by n, k and name, and where in a layer a thread is.

    That is its last product, and whether attention has begun since. Some engines keep parts of a product
    apart.
    """

    def __init__(self, model: ModelShape, parallel: Parallel) -> None:
        self.model = model.name
        self._products = [(-(-model.vocab // parallel.tp), model.d, HEAD, False)]  # True: a part
        for layer in model.layers:
            for one in layer.linears(model.d, parallel.tp, parallel.moe_tp, parallel.ep):
                self._products.append((one.n, one.k, one.name, False))
                if one.name.endswith("gate_up"):
                    self._products.append((one.n // 2, one.k, one.name, True))
            if isinstance(layer.attention, Attention):
                for heads in (layer.attention.n_heads // parallel.tp, layer.attention.kv_heads(parallel.tp)):
                    self._products.append((heads * layer.attention.head_dim, model.d, "qkv", True))
        self._layer = [one.name for one in model.layers[0].linears(model.d, parallel.tp)]
        self._place = {name: i for i, name in enumerate((*self._layer, HEAD))}
        self._last, self._attends = HEAD, False

    def module_of(self, event: TraceEvent) -> tuple[str, int, bool]:
        """An operator's module by its shapes or its name, its rows, and whether all inside belongs to it."""
        name = event.name.lower()
        module = _module_named(name)
        if module in ("", PASSES, EXPERTS) and _PRODUCT.search(name):
            if found := self._product(event.dims):
                self._last, self._attends = found[0], False
                return *found, True
            module = module or (ATTENTION if self._attends else UNKNOWN)
        if module:
            self._attends |= module in (CACHE, ATTENTION)
            return module, 0, True
        if event.name.startswith(COMPILED):  # what such a graph takes itself are its passes
            return PASSES, 0, False
        return ATTENTION if self._attends else PASSES if name.startswith("aten::") else UNKNOWN, 0, False

    def _product(self, dims: Sequence[tuple[int, ...]]) -> tuple[str, int] | None:
        """Its product and rows: m rows of k numbers with a matrix of n x k, or with an output of n columns.

        Of several that fit: one without padding, one that is whole, one with its matrix, "o" (which follows
        attention alone), then the one that comes next in the layer.
        """
        shapes = [(math.prod(size[:-1]), size[-1]) for size in dims if len(size) > 1]
        sizes = [
            (m, a if b == k else b, k, False) for (m, k), (a, b) in combinations(shapes, 2) if k in (a, b)
        ]
        sizes += [(m, b, k, True) for (m, k), (a, b) in permutations(shapes, 2) if a == m]
        fits = []
        for m, n, k, by_output in sizes:
            for own_n, own_k, name, is_part in self._products:
                is_near = 0 <= n - own_n < _PADDED and 0 <= k - own_k < _PADDED
                if is_near and (name != "o" or self._attends):
                    ahead = (self._place.get(name, 0) - self._place.get(self._last, 0)) % len(self._place)
                    is_padded = (n, k) != (own_n, own_k)
                    fits.append(((is_padded, is_part, by_output, name != "o", ahead), name, m))
        return min(fits)[1:] if fits else None

    def modules_of(self, kernels: Sequence[_Work]) -> list[str]:
        """The module of each kernel of a step; products of a graph go by their place between attentions.

        Where there are more or fewer products than a layer has, none of them is attributed.
        """
        names = [one.module or _module_named(one.name) for one in kernels]
        at_o = self._layer.index("o")
        cuts = [0, *(i for i, name in enumerate(names) if name == ATTENTION), len(names)]
        for k, (begin, end) in enumerate(pairwise(cuts)):
            expected = [
                *(self._layer[at_o:] if k else ()),
                *(self._layer[:at_o] if k < len(cuts) - 2 else ()),
            ]
            products = [
                i for i in range(begin, end)
                if names[i] in ("", PASSES) and not kernels[i].module and _PRODUCT.search(kernels[i].name)
            ]  # fmt: skip
            if len(products) != len(expected):
                expected = [UNKNOWN] * len(products)
            for i, name in zip(products, expected, strict=True):
                names[i] = name
        for i, one in enumerate(kernels):
            if i and not one.module and _REDUCES.search(one.name):
                names[i] = names[i - 1]
        return [name or UNKNOWN for name in names]


def _module_named(name: str) -> str:
    return next((module for module, words in _MODULES["words"].items() if re.search(words, name)), "")
