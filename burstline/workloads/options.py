"""Options of a run, each declared once, as a field of a dataclass.

The same row makes the flag (`burstline/console/flags.py`), the key of a suite's table
(`burstline/suites/toml_table.py`), the words of a command line and the entry of a manifest.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Final, Literal, cast

from burstline.workloads.request import WorkloadError

_KEY: Final = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `parse` makes a value of a word, ValueError where it cannot; `write` makes the word again.

    `bare` is the value where the flag stands without one. `choices` are all words that it takes; `many`: it
    may be given several times, and its value is a tuple; `once`: a second one is refused, for it would win
    without a word; `swept`: a command line may have several values, with commas, for a run of each.
    """

    help: str
    parse: Callable[[str], Any] = str
    write: Callable[[Any], str] = lambda value: as_text(value)
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    many: bool = False
    once: bool = False
    swept: bool = False
    bare: Any = None
    name: str = ""
    default: Any = None

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def is_switch(self) -> bool:
        return self.parse is bool

    def words(self, value: Any) -> tuple[str, ...]:
        if self.is_switch:
            return (self.flag,)
        if self.many:
            return tuple(word for each in value for word in (self.flag, self.write(each)))
        if self.bare is not None and value == self.bare:
            return (self.flag,)
        return self.flag, self.write(value)


def option(help: str, default: Any = None, **rest: Any) -> Any:  # noqa: A002
    """A dataclass's field that is an option."""
    return field(default=default, metadata={_KEY: Option(help, **rest)})


def options_of(kind: type[Any]) -> Mapping[str, Option]:
    return _options_of(cast(Any, kind))


@cache
def _options_of(kind: type[Any]) -> Mapping[str, Option]:
    return {
        each.name: replace(each.metadata[_KEY], name=each.name, default=each.default)
        for each in fields(kind)
        if _KEY in each.metadata
    }


def given(value: object) -> Iterator[tuple[Option, Any]]:
    """Every option of a dataclass that has another value than its default."""
    for each in options_of(type(value)).values():
        own = getattr(value, each.name)
        if own != each.default:
            yield each, own


def words_of(value: object, but: Collection[str] = ()) -> tuple[str, ...]:
    return tuple(word for each, own in given(value) if each.name not in but for word in each.words(own))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    if isinstance(value, float):
        return str(int(value)) if value == value // 1 else str(value)
    return str(getattr(value, "text", value))


def on_or_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise WorkloadError(f"expected on or off, not {text!r}")
    return text == "on"


def _quantity(text: str, expected: str, units: Mapping[str, float]) -> float:
    """The number, divided by what its unit says; one without a unit as it is."""
    number = text.rstrip("/%aehimnqrs ") if text[:1].isdigit() or text[:1] in "+-." else text
    try:
        return float(number) / {"": 1.0, **units}[text.removeprefix(number).strip()]
    except (ValueError, KeyError):
        raise WorkloadError(f"expected {expected}, not {text!r}") from None


def share(text: str) -> float:
    return _quantity(text, "a share such as 0.01 or 1%", {"%": 100.0})


def seconds(text: str) -> float:
    units = {"ms": 1000.0, "s": 1.0, "m": 1 / 60, "min": 1 / 60, "h": 1 / 3600}
    return _quantity(text, "seconds such as 30, or 30s, 500ms, 2m, 1h", units)


def per_second(text: str) -> float:
    return _quantity(text, "requests per second such as 10, or 10/s", {"/s": 1.0, "req/s": 1.0})


def number_or_auto(text: str) -> int | Literal["auto"]:
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise WorkloadError(f"expected a number or auto, not {text!r}") from None


def with_parts(text: str) -> tuple[str, dict[str, str]]:
    """`FILE,speed=2,window=0..60` as what stands first and the parts by name; a part may hold commas."""
    first, *words = re.split(r",(?=[A-Za-z_][\w.]*=)", text)
    parts: dict[str, str] = {}
    for key, _, value in (word.partition("=") for word in words):
        if key in parts:
            raise WorkloadError(f"{text!r}: {key} is given twice; give it once")
        parts[key] = value
    return first, parts
