"""What devices and serving stacks really reach: a few constants, shared by all devices, in `constants.toml`.

Each has a name, which predictions give beside every figure that it sets. A device has constants of its own
where they were shown to halve an error, and so has a machine that `burstline calibrate` measured. Formulas:
`predict/kernels.py`; what each constant stands for and how far it is trusted: docs/roofline.md.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, Final

import numpy as np

from burstline.errors import RooflineError, parse_toml, tables_beside
from burstline.roofline.device.device import Device, read_device
from burstline.roofline.model.ops import Step


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares of ceilings, seconds, and weights. Names that end with `_s` are seconds.

    `product`, `product_8`, `product_4`: the share of the dense peak that large products of 16, 8 and 4 bits
    reach; kernels of the last two compute `pad_8` of the idle rows of their tiles. `memory`: the share of
    the bandwidth that products reach; `launch_s`: the floor of a product or a collective. `cache`: the share
    of the bandwidth at which decode attention reads keys and values; `prompt`: the share of the peak that
    prefill attention reaches; `attention_s`: the floor of both. `mixed`: how many times as long decode
    attention takes in a step that prefills. `passes`: the share of the bandwidth that elementwise passes
    reach, above 1 where caches serve them; `pass_s`: their floor. `link`: the share of a link's bandwidth
    that collectives reach. The others are costs that no count of bytes has: `kernels.parts`.
    """

    product: float
    product_8: float
    pad_8: float
    memory: float
    launch_s: float
    cache: float
    prompt: float
    attention_s: float
    mixed: float
    passes: float
    pass_s: float
    link: float
    product_4: float
    scan_s: float
    scan_tok_s: float
    sparse_s: float
    sparse_request_s: float
    exchange_s: float
    exchange_bytes_per_s: float
    shot_s: float
    rank_s: float
    one_link: float
    two_link: float

    def of_products(self, dtype: str) -> tuple[str, float]:
        """The name and value of the share of the peak for a dtype."""
        name = {"4": "product_4", "8": "product_8"}.get(dtype[-1], "product")
        return name, getattr(self, name)


@dataclass(frozen=True, slots=True)
class HostFit:
    """What a serving stack's host adds to the kernels: `step_s` to a step, `launch_s` to each kernel of it,
    `token_s` for each token that it samples, of up to `most_tok` in a step, and `prompt_tok_s` for each
    prompt token that it computes. `source`: how all of that was measured.
    """

    engine: str
    step_s: float
    token_s: float
    prompt_tok_s: float
    source: str
    launch_s: float = 0.0
    most_tok: float = 1e9

    def seconds(self, step: Step, n_launches: float, kernels_s: float) -> float:
        """What a step lasts longer than its kernels."""
        prompt_tok = int(step.new_tok[step.new_tok > 1].sum())
        return float(self.added_s(step.n_logits, prompt_tok, n_launches, kernels_s))

    def added_s(self, n_tok: Any, prompt_tok: Any, n_launches: Any, kernels_s: Any) -> Any:
        """The same for counts or arrays of them."""
        seen_s = self.token_s * np.minimum(n_tok, self.most_tok)
        tokens_s = np.maximum(seen_s, self.token_s * n_tok - kernels_s)
        return self.step_s + self.launch_s * n_launches + tokens_s + self.prompt_tok_s * prompt_tok

    def __str__(self) -> str:
        parts = [f"{self.step_s * 1e6:.0f} µs a step", f"{self.token_s * 1e6:.3g} µs a token"]
        if self.most_tok < 1e9:
            parts[-1] += f" of up to {self.most_tok:.0f}"
        if self.prompt_tok_s:
            parts.append(f"{self.prompt_tok_s * 1e6:.2g} µs a prompt token")
        if self.launch_s:
            parts.append(f"{self.launch_s * 1e6:.2g} µs a launch")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Spread:
    """Measured over predicted time on rows that set nothing: 10th and 90th percentile."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Measured seconds of one [m, k] x [k, n] product by m, ascending."""

    dtype: str
    n: int
    k: int
    m: tuple[float, ...]
    seconds: tuple[float, ...]


AGREES: Final = (0.05, 0.2)
"""The shares by which peak and bandwidth differ at most between two measurements of one idle machine."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """When and beside what a machine was measured; `others` is the share of its CPU that others took."""

    date: str
    others: float
    model: str
    versions: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration of a device.

    `own` names the constants that are this device's, not the shared ones. `spread` goes by kind of op
    ("product", "product_8", "decode", "prefill"). `host` is the serving stack's part, None where it is not
    known. `shapes`: this machine's own products, which say more than constants. `measured_spread` is the
    share by which repeats of one measurement differ, None for shipped constants.
    """

    name: str
    constants: Constants
    source: str
    own: tuple[str, ...] = ()
    spread: Mapping[str, Spread] = field(default_factory=dict)
    shapes: tuple[ShapeTimes, ...] = ()
    measured_spread: float | None = None
    host: HostFit | None = None
    conditions: Conditions | None = None

    def __str__(self) -> str:
        if not self.own:
            return "shared constants"
        return f"shared constants, but {', '.join(f'{n} {getattr(self.constants, n):.3g}' for n in self.own)}"

    def sentences(self) -> Iterator[str]:
        """What predicts, and how much time predictions add for the serving stack's host."""
        yield f"predicted by {self}: {self.source}"
        if self.host:
            yield f"host time: {self.host}, {self.host.source}"
        else:
            yield "host time is not included in predictions: it was not measured"

    def changed(self, values: Mapping[str, float]) -> "Calibration":
        """The same with other values of some constants; raises where there is none so named."""
        known = {slot.name for slot in fields(Constants)}
        for name, value in values.items():
            if name not in known:
                raise RooflineError(f"no constant {name!r}; known: {', '.join(sorted(known))}")
            if not 0 <= value < math.inf or (value == 0 and not name.endswith("_s") and name != "pad_8"):
                raise RooflineError(f"constant {name} cannot be {value:g}; expected a number above 0")
        own = tuple(dict.fromkeys([*self.own, *values]))
        return replace(self, constants=replace(self.constants, **values), own=own)


@cache
def shipped() -> Mapping[str, Any]:
    """The tables of `constants.toml`."""
    return tables_beside(__file__, "constants.toml")


@cache
def shared() -> Calibration:
    """The constants of a device of which nothing more is known."""
    values = {name: row["value"] for name, row in shipped()["constants"].items()}
    spread = {kind: Spread(*ends) for kind, ends in shipped()["spread"].items()}
    return Calibration("shared", Constants(**values), "docs/roofline.md", spread=spread)


def load_calibration(device: Device) -> Calibration:
    """The constants of a device: the shared ones, and its own, its architecture's or its memory's over it."""
    own: dict[str, float] = {}
    for key in (device.memory.name, device.arch, device.id):
        own |= shipped()["of"].get(key, {})
    known, unmeasured = replace(shared().changed(own), name=device.id), shipped()["unmeasured"]
    if device.arch not in unmeasured["archs"]:
        return known
    source = f"{known.source}; nothing was measured on {device.arch}, and {unmeasured['source']}"
    return replace(known, source=source, spread=dict.fromkeys(known.spread, Spread(*unmeasured["spread"])))


def interval_factors(
    device: Device, calibration: Calibration | None, *, dense: bool
) -> tuple[dict[str, float], str]:
    """What a forecast's points are multiplied with and divided by, by figure, and how that is known.

    Less is known of a mixture of experts than of a `dense` model.
    """
    table = shipped()["interval"]
    kind, spread = "other", 0.0
    if calibration is not None and calibration.measured_spread is not None:
        own_host = calibration.host is not None and calibration.host.engine not in shipped()["host"]
        kind, spread = "measured" if own_host else "other", calibration.measured_spread
    elif calibration is not None and dense and device.id in table["published"]["devices"]:
        kind = "published"
    factors = table[kind]["factors"].items()
    return {
        name: float(np.exp(np.hypot(np.log(factor), np.log1p(spread)))) for name, factor in factors
    }, table[kind]["source"]


@cache
def stack_host(stack: str = "default") -> HostFit:
    """What the host of a serving stack costs; raises RooflineError where there is none so named."""
    table = shipped()["host"]
    if stack not in table:
        raise RooflineError(f"unknown serving stack {stack!r}; known: {', '.join(table)}")
    return HostFit(engine=stack, **table[stack])


def with_host(calibration: Calibration, stack: str = "default") -> Calibration:
    """The calibration with a serving stack's host, unless its own was measured on this machine."""
    if calibration.host is not None or calibration.measured_spread is not None:
        return calibration
    return replace(calibration, host=stack_host(stack))


def read_calibration(table: Mapping[str, Any], path: object) -> Calibration:
    """The calibration that `device_toml` wrote to `path`; raises RooflineError where another wrote it."""
    try:
        return Calibration(
            table["name"],
            replace(shared().constants, **table["constants"]),  # an older file lacks newer ones
            table["source"],
            tuple(table["own"]),
            dict(shared().spread) | {kind: Spread(**spread) for kind, spread in table["spread"].items()},
            tuple(
                ShapeTimes(row["dtype"], row["n"], row["k"], tuple(row["m"]), tuple(row["seconds"]))
                for row in table.get("shapes", ())
            ),
            table.get("measured_spread"),
            HostFit(**table["host"]) if "host" in table else None,
            Conditions(**table["conditions"]) if "conditions" in table else None,
        )
    except (KeyError, TypeError) as error:
        raise RooflineError(f"{path} is not a calibration: {error}; make it again") from error


def read_device_file(data: str | bytes, path: object) -> tuple[Device, Calibration]:
    """Both, from what `device_toml` wrote to `path`; RooflineError where it is damaged."""
    table = parse_toml(data, path)
    try:
        return read_device(table["id"], table), read_calibration(table["calibration"], path)
    except (LookupError, TypeError, ValueError) as error:
        raise RooflineError(f"{path} is damaged: {error}") from None


def device_toml(device: Device, calibration: Calibration) -> str:
    """Both as one file, which `read_device_file` reads; what is not known is left out."""
    names = ("id", "name", "vendor", "arch", "source", "assurance", "note", "n_units", "tdp_w")
    head = {name: value for name in (*names, "usd_per_hour") if (value := getattr(device, name))}
    own = {name: getattr(calibration, name) for name in ("name", "source", "own", "measured_spread")}
    of_device = [
        ("", head | {"peak_flops_per_s": device.peaks}),
        *(("[[levels]]", asdict(level)) for level in device.levels),
        *(("[[links]]", asdict(link)) for link in device.links),
    ]
    parts: list[tuple[str, Any]] = [("constants", calibration.constants)]
    parts += [(f"spread.{kind}", spread) for kind, spread in calibration.spread.items()]
    parts += [("host", calibration.host), ("conditions", calibration.conditions)]
    of_calibration = [
        ("[calibration]", own),
        *((f"[calibration.{name}]", asdict(part)) for name, part in parts if part),
        *(("[[calibration.shapes]]", asdict(shape)) for shape in calibration.shapes),
    ]
    return "\n".join([*_lines(of_device, 6), *_lines(of_calibration, 4)]).lstrip() + "\n"


def _lines(tables: Iterable[tuple[str, Mapping[str, Any]]], digits: int) -> Iterator[str]:
    for title, table in tables:
        yield from ("", title)
        for name, value in table.items():
            if value is not None and value is not False:
                yield f"{name} = {_toml(value, digits)}"


def _toml(value: object, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_toml(each, digits)}' for name, each in value.items())} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(each, digits) for each in value)}]"
    return json.dumps(value)
