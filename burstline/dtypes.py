"""Data types: one table for the files of models, the settings of engines and the roofline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Dtype:
    """`short` is the roofline's name; `n_bytes` are an element's, scales apart; `words` are other tools'.

    `stored` is the name in files of weights, "" where none is made or served in this type as it is.
    """

    short: str
    n_bytes: float
    stored: str = ""
    words: tuple[str, ...] = ()


DTYPES: Final[Mapping[str, Dtype]] = {
    "float32": Dtype("fp32", 4, "F32", ("float", "f32", "all f32")),
    "tf32": Dtype("tf32", 4),
    "bfloat16": Dtype("bf16", 2, "BF16"),
    "float16": Dtype("fp16", 2, "F16", ("half", "f16")),
    "fp8": Dtype("fp8", 1, "", ("fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "fp8_inc")),
    "int8": Dtype("int8", 1, "", ("q8_0",)),
    "fp4": Dtype("fp4", 0.5),
    "int4": Dtype("int4", 0.5),
}
"""By PyTorch's name where it has one."""
FLOATS: Final = {name: dtype.short for name, dtype in DTYPES.items() if dtype.stored}
_WORDS = [(word, name) for name, row in DTYPES.items() for word in (name, row.short, *row.words)]
SHORT: Final = {word: DTYPES[name].short for word, name in _WORDS}
"""The roofline's name by any word."""
FLOAT_NAMES: Final = {word: name for word, name in _WORDS if name in FLOATS}
"""PyTorch's name by any word, of the plain floats alone."""
