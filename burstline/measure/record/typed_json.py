"""Frozen dataclasses to JSON and back. A value of the wrong type is an error that names its place.

A type's own `to_json` or `from_json` is used where it has one. A field with a default may be missing; a key
that the type does not have is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
OPTIONAL: Final[Mapping[str, bool]] = {"optional": True}
"""A field with this metadata is left out of the JSON where it is None."""


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
    return cast(T, _read(of, row, where))


def from_fields(of: type[T], row: object, where: str = "") -> T:
    """The dataclass by its fields, whatever `from_json` it has."""
    if not isinstance(row, Mapping):
        raise _mismatch(where, "an object", row)
    known = _fields(cast(type, of))
    if unknown := [key for key in row if key not in known]:
        raise MismatchError(f"{_at(where, str(unknown[0]))} is not known to this version")
    found = {}
    for name, (is_needed, kind) in known.items():
        if name in row:
            found[name] = _read(kind, row[name], _at(where, name))
        elif is_needed:
            raise MismatchError(f"{_at(where, name)} is missing")
    return of(**found)


@cache
def _fields(of: type) -> dict[str, tuple[bool, Any]]:
    """Of each field: whether it must be there, and its type."""
    hints = get_type_hints(of)
    return {
        field.name: (field.default is MISSING and field.default_factory is MISSING, hints[field.name])
        for field in fields(of)
        if field.init
    }


@cache
def _parts(of: Any) -> tuple[Any, tuple[Any, ...]]:
    """The kind of a type and what it is of: found out once, because a summary has thousands of values."""
    return get_origin(of) or of, get_args(of)


def _read(of: Any, row: Any, where: str) -> Any:
    kind, inner = _parts(of)
    if kind is Any or kind is object:
        return row
    if kind is Union or kind is UnionType:
        return _any_of(inner, row, where)
    if kind is Literal:
        return _one_of(inner, row, where)
    if kind is tuple:
        if not isinstance(row, list):
            raise _mismatch(where, "a list", row)
        return tuple(_read(inner[0], item, f"{where}[{k}]") for k, item in enumerate(row))
    if issubclass(kind, Mapping):
        if not isinstance(row, Mapping):
            raise _mismatch(where, "an object", row)
        return {key: _read(inner[1], item, _at(where, str(key))) for key, item in row.items()}
    return _object(kind, row, where) if is_dataclass(kind) else _scalar(kind, row, where)


def _one_of(known: tuple[Any, ...], row: Any, where: str) -> Any:
    if row in known:
        return row
    raise _mismatch(where, " or ".join(map(repr, known)), row)


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


def _any_of(kinds: tuple[Any, ...], row: Any, where: str) -> Any:
    if row is None and NoneType in kinds:
        return None
    errors = []
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _read(kind, row, where)
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
