"""Frozen dataclasses to JSON and back. A value of the wrong type is an error that names its place.

A type's own `to_json` or `from_json` is used where it has one. A field with a default may be missing; a key
that the type does not have is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
OPTIONAL: Final[Mapping[str, bool]] = {"optional": True}
"""A field with this metadata is left out of the JSON where it is None."""
Reader = Callable[[Any, str], Any]
"""Takes a JSON value and where it stands; gives the typed value."""


class MismatchError(ValueError):
    """A document that does not fit its type: where, what was expected, what is there."""


def to_json(value: Any) -> Any:
    """The value as JSON types."""
    own = getattr(value, "to_json", None)
    return own() if own is not None else plain(value)


def plain(value: Any) -> Any:
    """The same by its fields, whatever `to_json` the value has."""
    if is_dataclass(value):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: to_json(v) for f, v in pairs if v is not None or not f.metadata.get("optional")}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_json(item) for item in value]
    return value


def from_json(of: type[T], row: object, where: str = "") -> T:
    """The value of type `of` that the JSON document `row` holds; MismatchError where it is none."""
    return cast(T, _reader(cast(Any, of))(row, where))


def from_fields(of: type[T], row: object, where: str = "") -> T:
    """The dataclass by its fields, whatever `from_json` it has."""
    if not isinstance(row, Mapping):
        raise _mismatch(where, "an object", row)
    known = _fields(cast(type, of))
    if unknown := [key for key in row if key not in known]:
        raise MismatchError(f"{_at(where, str(unknown[0]))} is not known to this version")
    found = {}
    for name, (is_needed, read) in known.items():
        if name in row:
            found[name] = read(row[name], _at(where, name))
        elif is_needed:
            raise MismatchError(f"{_at(where, name)} is missing")
    return of(**found)


@cache
def _fields(of: type) -> dict[str, tuple[bool, Reader]]:
    """Of each field: whether it must be there, and how it is read."""
    hints = get_type_hints(of)
    return {
        field.name: (
            field.default is MISSING and field.default_factory is MISSING,
            _reader(hints[field.name]),
        )
        for field in fields(of)
        if field.init
    }


@cache
def _reader(of: Any) -> Reader:
    """How a value of this type is read: found out once, because a summary has thousands of values."""
    origin, inner = get_origin(of), get_args(of)
    if of is Any or of is object:
        return lambda row, _: row
    if origin in (Union, UnionType):
        return partial(_any_of, NoneType in inner, [_reader(kind) for kind in inner if kind is not NoneType])
    if origin is Literal:
        return partial(_one_of, inner)
    if origin is tuple:
        return partial(_list, _reader(inner[0]))
    if origin is not None and issubclass(origin, Mapping):
        return partial(_mapping, _reader(inner[1]))
    if is_dataclass(of):
        return partial(_object, of)
    return partial(_scalar, of)


def _one_of(known: tuple[Any, ...], row: Any, where: str) -> Any:
    if row in known:
        return row
    raise _mismatch(where, " or ".join(map(repr, known)), row)


def _list(read: Reader, row: Any, where: str) -> Any:
    if not isinstance(row, list):
        raise _mismatch(where, "a list", row)
    return tuple(read(item, f"{where}[{k}]") for k, item in enumerate(row))


def _mapping(read: Reader, row: Any, where: str) -> Any:
    if not isinstance(row, Mapping):
        raise _mismatch(where, "an object", row)
    return {key: read(item, _at(where, str(key))) for key, item in row.items()}


def _object(of: Any, row: Any, where: str) -> Any:
    own = getattr(of, "from_json", None)
    if own is None:
        return from_fields(of, row, where)
    try:
        return own(row)
    except MismatchError as error:
        raise MismatchError(_at(where, str(error))) from None
    except (KeyError, TypeError, ValueError) as error:
        raise MismatchError(f"{where}: {error}") from None


def _any_of(may_be_none: bool, kinds: Sequence[Reader], row: Any, where: str) -> Any:
    if row is None and may_be_none:
        return None
    errors = []
    for read in kinds:
        try:
            return read(row, where)
        except MismatchError as error:
            errors.append(error)
    raise errors[0]


def _scalar(of: Any, row: Any, where: str) -> Any:
    if type(row) is of:
        return row
    if issubclass(of, Enum):
        return of(_one_of(tuple(member.value for member in of), row, where))
    if isinstance(row, bool) or not isinstance(row, (int, float) if of is float else of):
        raise _mismatch(where, _NAMES.get(of, of.__name__), row)
    return float(row) if of is float else row


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}


def _mismatch(where: str, expected: str, row: object) -> MismatchError:
    shown = repr(row) if isinstance(row, str | int | float | bool) else _KINDS.get(type(row), str(type(row)))
    return MismatchError(f"{where or 'the document'}: expected {expected}, not {shown:.60}")


_KINDS: dict[type, str] = {dict: "an object", list: "a list", NoneType: "null"}


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
