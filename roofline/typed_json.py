"""Frozen dataclasses from the JSON that `dataclasses.asdict` made of them."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read(kind: type[T], node: Mapping[str, Any]) -> T:
    """`node` as a `kind`: lists become tuples and objects dataclasses where the fields say so.

    Raises KeyError where a field without a default is missing, TypeError where a value has another type.
    """
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    known = {name: _value(hint, node[name]) for name, hint in hints.items() if name in node}
    return kind(**known)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The fields' types by name."""
    hints = get_type_hints(kind)
    return {slot.name: hints[slot.name] for slot in fields(kind)}


def _value(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _value(next(each for each in inner if each is not type(None)), value)
    if is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value)
    if origin is tuple or origin is Sequence:
        return tuple(_value(inner[0], each) for each in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _value(inner[1], each) for key, each in value.items()}
    if origin is Literal:
        if value not in inner:
            raise TypeError(f"expected one of {inner}, not {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and not isinstance(value, hint):
        raise TypeError(f"expected {hint.__name__}, not {value!r}")
    return value
