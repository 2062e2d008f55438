"""What a device really reaches: a few physical parameters per device, fitted to measured kernels.

A prediction always names its tier: 0 the ceiling, 1 defaults pooled over devices, 2 a fit to this device's
own kernels, 3 this device's own measurement of this very shape. Formulas: `predict/kernels.py`.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from burstline.roofline.device.device import Device, Level, Link
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.step import Step

TIERS = ("ceiling", "generic defaults", "device fit", "measured shape")


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Dense products in one dtype. `eta_c`, `eta_m`: the share of peak and of bandwidth that big ones reach.

    `t0_s` is the launch floor; `quantise_s` that of the kernel that quantises the inputs of a product of 8 or
    4 bits, where no kernel before it does so (static scales are fused), and `quantise_byte_s` what one unit
    of the device takes for a byte of them. `chain_s` is what a tile takes for a column of k. `pad` weighs
    the idle part of tiles. With `operand_rows` = 0 kernels fill the device at any shape and only rows are
    padded, to `row_tile`; above 0 a tile of a x b costs ab + operand_rows (a + b) and tiles run in waves over
    the device's units. `reread` is the side of a wave's square of tiles in shares of its ideal, from which on
    operands are read again; 0: never seen. `p` joins compute and memory time as a p-norm.
    """

    eta_c: float
    eta_m: float
    t0_s: float
    pad: float = 0.0
    p: float = 4.0
    row_tile: int = 256
    operand_rows: float = 0.0
    reread: float = 0.0
    k_fill: float = 100.0
    quantise_s: float = 0.0
    quantise_byte_s: float = 0.0
    chain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Attention of one new token a request: a floor, and the cache at a share of the bandwidth.

    Each request is charged `extra_tok` keys more than it has, and never fewer than a tile; `wave` weighs the
    idle part of the last wave of (request, KV head) pairs over the device's units. `unit_byte_s` is what one
    unit takes for a byte of the cache, 0 where only the memory limits.
    """

    t0_s: float
    eta_m: float
    extra_tok: float = 0.0
    wave: float = 0.0
    unit_byte_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Attention over prompts: each query sees `extra_tok` keys more than the mask leaves it; `tail` weighs
    the device waiting for its longest tile; queries and outputs move at `eta_m` of the bandwidth."""

    t0_s: float
    eta_c: float
    extra_tok: float = 0.0
    tail: float = 0.0
    eta_m: float = 0.8


@dataclass(frozen=True, slots=True)
class PassFit:
    """Elementwise passes: a launch floor, and shares of the memory's bandwidth: `eta_cache`, above 1, for as
    much as the last-level cache holds since the op before, `eta_m` for the rest."""

    t0_s: float
    eta_m: float
    eta_cache: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """An all-reduce among `n_ranks`: a floor, and the ring at `eta` of one direction's bandwidth."""

    n_ranks: int
    t0_s: float
    eta: float


@dataclass(frozen=True, slots=True)
class HostFit:
    """What a serving stack's host adds to the kernels: `step_s` to a step, `launch_s` to each kernel of it,
    `token_s` for each token that it samples, `prompt_tok_s` for each prompt token that it computes.
    `source`: how all of that was measured.
    """

    engine: str
    step_s: float
    token_s: float
    prompt_tok_s: float
    source: str
    launch_s: float = 0.0

    def seconds(self, step: Step, n_launches: int) -> float:
        """What a step lasts longer than its kernels."""
        prompt_tok = int(step.new_tok[step.new_tok > 1].sum())
        own_s = self.step_s + self.launch_s * n_launches + self.token_s * step.n_logits
        return own_s + self.prompt_tok_s * prompt_tok

    def __str__(self) -> str:
        parts = [f"{self.step_s * 1e6:.0f} µs a step", f"{self.token_s * 1e6:.3g} µs a token"]
        if self.prompt_tok_s:
            parts.append(f"{self.prompt_tok_s * 1e6:.2g} µs a prompt token")
        if self.launch_s:
            parts.append(f"{self.launch_s * 1e6:.2g} µs a launch")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Spread:
    """Measured over predicted time on rows the fit never saw: 10th, 50th, 90th percentile, and how many."""

    low: float
    mid: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Measured seconds of one [m, k] x [k, n] product by m, ascending."""

    dtype: str
    n: int
    k: int
    m: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of a device beyond its ceilings.

    `gemm` and `spread` go by dtype ("bf16") and by kind ("gemm bf16", "decode", "prefill", "all_reduce").
    `mixed` multiplies attention where prefill and decode share a step; `sustained` is the share of the fitted
    compute rate that lasts under load, for tables that were timed in short runs. `host` is the serving
    stack's part, None where it is not known. `measured_spread` is the share by which repeats of one
    measurement differ, None for fits to published tables. `passes` go by what ends an op's name ("norm",
    "act", "rope", "write") where they were measured one by one. `decode_kv8` and `prefill_kv8` are attention
    over a KV cache of 8 bits; `nccl` are NCCL's all-reduces, `all_reduce` the engines' own.
    """

    name: str
    tier: int
    gemm: Mapping[str, GemmFit]
    decode: DecodeFit
    prefill: PrefillFit
    elementwise: PassFit
    all_reduce: tuple[LinkFit, ...] = ()
    mixed: float = 1.0
    spread: Mapping[str, Spread] = field(default_factory=dict)
    shapes: tuple[ShapeTimes, ...] = ()
    source: str = ""
    fitted_on: str = ""
    measured_spread: float | None = None
    passes: Mapping[str, PassFit] = field(default_factory=dict)
    host: HostFit | None = None
    sustained: float = 1.0
    decode_kv8: DecodeFit | None = None
    prefill_kv8: PrefillFit | None = None
    nccl: tuple[LinkFit, ...] = ()

    def attention_fits(self, kv_bytes: float) -> tuple[DecodeFit, PrefillFit]:
        """The fits for a KV cache of this many bytes an element; the generic ones where 8 bits have none."""
        if kv_bytes >= 2:
            return self.decode, self.prefill
        pooled = generic()
        decode = self.decode_kv8 or (pooled.decode_kv8 if self.measured_spread is None else None)
        prefill = self.prefill_kv8 or (pooled.prefill_kv8 if self.measured_spread is None else None)
        return decode or self.decode, prefill or self.prefill

    def pass_fit(self, op_name: str) -> PassFit:
        """The fit for an elementwise op."""
        return self.passes.get(op_name.rpartition("_")[2], self.elementwise)

    def gemm_fit(self, kernel: str) -> tuple[GemmFit, int]:
        """The fit for products of a dtype ("fp8") or kind of kernel ("fp8_block"), and its tier.

        This device's, else the generic one, else that of the nearest kind.
        """
        kind = self.measured_kernel(kernel)
        if kind is None:
            return self.gemm.get("bf16") or generic().gemm["bf16"], 1
        return (self.gemm[kind], self.tier) if kind in self.gemm else (generic().gemm[kind], 1)

    def measured_kernel(self, kernel: str) -> str | None:
        """The kind of kernel whose fit is taken for `kernel`: itself or the nearest; None: no near one."""
        if self.measured_spread is not None:  # its own products say more than other devices' experts
            kernel = kernel.removeprefix("experts_")
        pooled: Mapping[str, GemmFit] = generic().gemm if self.tier > 1 else {}
        for kind in (kernel, *_NEAREST_KERNELS.get(kernel, ())):
            if kind in self.gemm or kind in pooled:
                return kind
        return None

    def link_fit(self, n_ranks: int, *, nccl: bool = False) -> tuple[LinkFit, int]:
        """The all-reduce fit of the nearest number of ranks at or above, and its tier."""
        mine, pooled = (self.nccl, generic().nccl) if nccl else (self.all_reduce, generic().all_reduce)
        own = mine or pooled
        reach = [fit for fit in own if fit.n_ranks >= n_ranks]
        return (reach[0] if reach else own[-1]), self.tier if mine else 1


# Where a kind of kernel was not measured: fp16 runs as bf16 and int8 as fp8, vendors state equal peaks. Of
# what can stand for 4-bit products of an unmeasured device, 8-bit ones at their peak missed least.
_NEAREST_KERNELS: Mapping[str, tuple[str, ...]] = {
    "fp16": ("bf16",),
    "int8": ("fp8",),
    "fp8_block": ("fp8",),
    "fp4": ("fp8",),
    "experts_bf16": ("bf16",),
    "experts_fp16": ("experts_bf16", "bf16"),
    "experts_fp8": ("experts_fp8_block", "fp8"),
    "experts_fp8_block": ("fp8_block", "fp8"),
    "experts_int8": ("experts_fp8", "experts_fp8_block", "fp8"),
    "experts_fp4": ("fp4", "fp8"),
    "experts_int4": ("bf16",),
    "experts_mxfp4": ("bf16",),
}


def load_calibration(device: Device | str) -> Calibration:
    """The best that is shipped for a device: its own fit, else its generation's, else the generic defaults.

    A string is the path of a device file that `burstline calibrate` wrote.
    """
    if isinstance(device, str):
        return _read(Path(device), tomllib.loads(Path(device).read_text("utf-8")).get("calibration"))
    for id_ in (device.id, _GENERATIONS.get(device.arch)):
        path = Path(__file__).parent / "calibrations" / f"{id_}.toml"
        if id_ is not None and path.is_file():
            known = shipped_calibration(id_)
            return known if id_ == device.id else replace(known, tier=1, host=None)
    return generic(device)


# Whose fit stands for an architecture: kernels transfer within one (H100 to H200: bf16 5%, fp8 8%).
_GENERATIONS = {
    "sm80": "a100-sxm4-80g", "sm89": "l40s", "sm90": "h100-sxm5-80g",
    "sm100": "b200-sxm", "sm103": "b300-sxm", "sm120": "rtx-pro-6000-server",
}  # fmt: skip


@cache
def stack_host(stack: str = "default") -> HostFit:
    """What the host of a stack in `stacks.toml` costs; raises RooflineError where it has none so named."""
    table = tomllib.loads((Path(__file__).parent / "stacks.toml").read_text("utf-8"))
    if stack not in table:
        raise RooflineError(f"unknown serving stack {stack!r}; known: {', '.join(table)}")
    return HostFit(engine=stack, **table[stack])


def with_host(calibration: Calibration, stack: str = "default") -> Calibration:
    """The calibration with a serving stack's host, unless its own was measured on this machine."""
    if calibration.host is not None or calibration.measured_spread is not None:
        return calibration
    return replace(calibration, host=stack_host(stack))


def generic(device: Device | None = None) -> Calibration:
    """Tier 1: defaults pooled over the measured devices, as they are for the memory of `device`."""
    pooled = shipped_calibration("generic")
    return in_memory(pooled, device.memory.name) if device else pooled


def in_memory(calibration: Calibration, memory: str) -> Calibration:
    """The calibration with the shares of bandwidth that kernels reach of graphics memory without ECC.

    It stays as it is for other kinds of memory.
    """
    if memory not in _LIKE_MEMORY:
        return calibration
    other = shipped_calibration(_LIKE_MEMORY[memory])
    return replace(
        calibration,
        gemm={
            kind: replace(fit, eta_m=other.gemm.get(kind, other.gemm["bf16"]).eta_m)
            for kind, fit in calibration.gemm.items()
        },
        decode=replace(calibration.decode, eta_m=other.decode.eta_m),
    )


# A card whose kernels tell the share for that kind of memory: never of the same kind, so that none stands for
# itself. The two agree within 2% (docs/roofline-accuracy.md, "Graphics memory").
_LIKE_MEMORY = {"GDDR6X": "rtx-pro-6000-server", "GDDR7": "rtx4090"}


@cache
def shipped_calibration(name: str) -> Calibration:
    """The shipped file of that device id, or "generic"."""
    path = Path(__file__).parent / "calibrations" / f"{name}.toml"
    return _read(path, tomllib.loads(path.read_text("utf-8")))


def _read(path: Path, table: Mapping[str, Any] | None) -> Calibration:
    if table is None:
        raise RooflineError(f"{path} has no [calibration] table; make one with `burstline calibrate`")
    try:
        return read_calibration(table)
    except (KeyError, TypeError) as error:
        raise RooflineError(f"{path} is not a calibration: {error}; make it again") from error


def read_calibration(table: Mapping[str, Any]) -> Calibration:
    """The calibration that `calibration_table` wrote; raises KeyError or TypeError where it is another's."""
    plain = {name: table[name] for name in ("name", "tier", "mixed", "source", "fitted_on")}
    return Calibration(
        **plain,
        gemm={dtype: GemmFit(**fit) for dtype, fit in table["gemm"].items()},
        decode=DecodeFit(**table["decode"]),
        prefill=PrefillFit(**table["prefill"]),
        elementwise=PassFit(**table["elementwise"]),
        all_reduce=tuple(LinkFit(**fit) for fit in table.get("all_reduce", ())),
        spread={kind: Spread(**spread) for kind, spread in table.get("spread", {}).items()},
        shapes=tuple(
            ShapeTimes(row["dtype"], row["n"], row["k"], tuple(row["m"]), tuple(row["seconds"]))
            for row in table.get("shapes", ())
        ),
        measured_spread=table.get("measured_spread"),
        passes={kind: PassFit(**fit) for kind, fit in table.get("passes", {}).items()},
        host=HostFit(**table["host"]) if "host" in table else None,
        sustained=table.get("sustained", 1.0),
        decode_kv8=DecodeFit(**table["decode_kv8"]) if "decode_kv8" in table else None,
        prefill_kv8=PrefillFit(**table["prefill_kv8"]) if "prefill_kv8" in table else None,
        nccl=tuple(LinkFit(**fit) for fit in table.get("nccl", ())),
    )


def calibration_toml(calibration: Calibration, prefix: str = "") -> str:
    """The calibration as TOML; with `prefix` as that table of a larger file."""
    head = [f"[{prefix}]"] if prefix else []
    dot = f"{prefix}." if prefix else ""
    for name in ("name", "tier", "mixed", "sustained", "source", "fitted_on", "measured_spread"):
        value = getattr(calibration, name)
        if value is not None:
            head.append(f"{name} = {_toml(value)}")
    tables: list[tuple[str, object]] = [
        *((f"gemm.{dtype}", fit) for dtype, fit in calibration.gemm.items()),
        ("decode", calibration.decode),
        ("prefill", calibration.prefill),
        *((("decode_kv8", calibration.decode_kv8),) if calibration.decode_kv8 else ()),
        *((("prefill_kv8", calibration.prefill_kv8),) if calibration.prefill_kv8 else ()),
        ("elementwise", calibration.elementwise),
        *((f"passes.{kind}", fit) for kind, fit in calibration.passes.items()),
        *((f'spread."{kind}"', spread) for kind, spread in calibration.spread.items()),
        *((("host", calibration.host),) if calibration.host else ()),
    ]
    lists: list[tuple[str, object]] = [
        *(("all_reduce", fit) for fit in calibration.all_reduce),
        *(("nccl", fit) for fit in calibration.nccl),
        *(("shapes", shape) for shape in calibration.shapes),
    ]
    parts = ["\n".join(head)]
    parts += [f"[{dot}{name}]\n{_rows(fit)}" for name, fit in tables]
    parts += [f"[[{dot}{name}]]\n{_rows(fit)}" for name, fit in lists]
    return "\n\n".join(parts) + "\n"


def _rows(fit: Any) -> str:
    return "\n".join(f"{slot.name} = {_toml(getattr(fit, slot.name))}" for slot in fields(fit))


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def device_toml(device: Device, calibration: Calibration) -> str:
    """Both as one file, which `load_device` and `load_calibration` read."""
    texts = ("id", "name", "vendor", "arch", "source", "assurance", "note")
    head = [f"{name} = {json.dumps(getattr(device, name))}" for name in texts if getattr(device, name)]
    head += [f"{name} = {value}" for name in ("n_units", "tdp_w") if (value := getattr(device, name))]
    peaks = ", ".join(f"{dtype} = {peak:.4e}" for dtype, peak in device.peaks.items())
    head.append(f"peak_flops_per_s = {{ {peaks} }}")
    head += ["levels = [", *map(_inline, device.levels), "]"]
    if device.links:
        head += ["links = [", *map(_inline, device.links), "]"]
    return "\n".join(head) + "\n\n" + calibration_toml(calibration, "calibration")


def _inline(part: Level | Link) -> str:
    """A level or a link as one line of a TOML list; what is None is left out."""
    values = [(slot.name, getattr(part, slot.name)) for slot in fields(part)]
    shown = (
        f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {json.dumps(value)}"
        for name, value in values
        if value is not None and value is not False
    )
    return f"    {{ {', '.join(shown)} }},"


def cached_file(model: str, device: str, threads: int, *, quick: bool) -> Path:
    """Where this machine's calibration for a model is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burstline"
    kind = "quick" if quick else "full"
    return cache / f"device-{Path(model).name}-{device.replace(':', '')}-{threads}-{kind}.toml"
