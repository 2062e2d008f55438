"""A TOML table read with clear errors: unknown keys with the nearest known one, wrong types, missing ones."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from burstline.wording import hint, of_others
from burstline.workloads.options import Option, as_text, flag_of, on_or_off, options_of
from burstline.workloads.request import WorkloadError


@dataclass(frozen=True, slots=True)
class TomlTable:
    """A table of a parsed TOML document; `where` says which, for errors.

    Every method raises WorkloadError, naming table, key, what was found and what was expected.
    """

    raw: Mapping[str, Any]
    where: str

    def only(self, *known: str) -> None:
        """Refuse every other key, naming the nearest known one, and the values of other tools."""
        for key, value in self.raw.items():
            if told := of_others(flag_of(key), value):
                raise WorkloadError(f"{self.where}: {told}")
            if key not in known:
                raise WorkloadError(f"{self.where}: unknown key {key!r}; {hint(key, known)}")

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The key's value, of this kind; the default where the key is not there."""
        value = self.raw.get(key, default)
        if key in self.raw and not _is(value, kind):
            found = f"{type(value).__name__} {value!r}"
            raise WorkloadError(f"{self.where}: {key} must be {_NAMES[kind]}, not {found}")
        return value

    def options(self, kind: type[Any], but: Collection[str] = ()) -> dict[str, Any]:
        rows = (row for name, row in options_of(kind).items() if name in self.raw and name not in but)
        return {row.name: self._option(row) for row in rows}

    def _option(self, row: Option) -> Any:
        value = self.raw[row.name]
        if row.many:
            return tuple(self._parsed(row, text) for text in self.get(row.name, list, []))
        if row.bare is not None and isinstance(value, bool):
            return row.bare if value else row.default
        if row.parse in (int, float, bool):
            return self.get(row.name, row.parse, None)
        is_number = isinstance(value, int | float) and (not isinstance(value, bool) or row.parse is on_or_off)
        return self._parsed(row, as_text(value) if is_number else self.get(row.name, str, None))

    def _parsed(self, row: Option, text: str) -> Any:
        try:
            found = row.parse(text)
        except ValueError as error:
            raise WorkloadError(f"{self.where}: {row.name}: {error}") from None
        if row.choices is not None and found not in row.choices:
            raise WorkloadError(
                f"{self.where}: {row.name} {found!r}; expected one of {', '.join(row.choices)}"
            )
        return found

    def need(self, key: str, kind: type) -> Any:
        if key not in self.raw:
            raise WorkloadError(f"{self.where}: {key} is missing; expected {_NAMES[kind]}")
        return self.get(key, kind, None)

    def tables(self, key: str, *, required: bool = False) -> "list[TomlTable]":
        found = self.raw.get(key, [])
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise WorkloadError(f"{self.where}: {key} must be written as [[{key}]], once for each")
        if required and not found:
            raise WorkloadError(f"{self.where}: there is no [[{key}]]; expected at least one")
        return [TomlTable(item, f"{self.where}, [[{key}]] {k}") for k, item in enumerate(found, 1)]


_NAMES: Final[dict[type, str]] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list of strings",
}


def _is(value: object, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
