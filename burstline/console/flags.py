"""Options as flags of the command: argparse's arguments are made from the rows of `workloads/options.py`."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from burstline.errors import tables_beside
from burstline.workloads.options import Option, as_text, flag_of, options_of
from burstline.workloads.request import WorkloadError

T = TypeVar("T")


class Once(argparse.Action):
    """A flag that may be given once: the second of two would win without a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, self.default) != self.default:
            parser.error(f"{option_string} is given twice; give it once")
        setattr(namespace, self.dest, values)


NAMED: Final = {"engine": "engines", "device": "devices", "model_config": "models"}
"""Options whose values a shell completes, by what they name."""


def completed(action: argparse.Action, names: str) -> None:
    """Let a shell complete its value by the names that `burstline/completion.py` lists."""
    action.complete = dict.fromkeys(("bash", "zsh"), f"_burstline_{names}")  # type: ignore[attr-defined]


def add_options(group: argparse._ActionsContainer, kind: type, *names: str, about: str = "") -> None:
    """The flags of a dataclass of options, all or some of them; `about` stands before their help."""
    for row in options_of(kind).values():
        if not names or row.name in names:
            action = group.add_argument(row.flag, **_argument(row), help=about + row.help)
            if row.name in NAMED:
                completed(action, NAMED[row.name])


_FLAGS: Final = tables_beside(__file__, "flags.toml")
USAGES: Final[Mapping[str, str]] = _FLAGS["usage"]
_TYPES: Final = {"int": int, "float": float, "path": Path}


def add_flags(group: argparse._ActionsContainer, table: str) -> None:
    """The flags of a table of `flags.toml`."""
    for flags, row in _FLAGS[table].items():
        how = {name: value for name, value in row.items() if name != "completes"}
        if "type" in row:
            how["type"] = _TYPES[row["type"]]
        action = group.add_argument(*flags.split(), **how)
        if "completes" in row:
            completed(action, row["completes"])


def flags_in(table: str) -> dict[str, Mapping[str, Any]]:
    """The rows of a table of `flags.toml` by the names of their values."""
    return {flag.removeprefix("--").replace("-", "_"): row for flag, row in _FLAGS[table].items()}


def _argument(row: Option) -> dict[str, Any]:
    how: dict[str, Any]
    if row.is_switch:
        return {"action": "store_true"}
    if row.many:
        how = {"action": "append", "default": [], "metavar": row.metavar, "type": parser_of(row.parse)}
        return how | ({"choices": row.choices} if row.choices else {})
    how = {"default": row.default, "metavar": row.metavar, "type": parser_of(row.parse, swept=row.swept)}
    if row.once:
        how["action"] = Once
    if row.choices is not None:
        how["choices"] = row.choices
    if row.bare is not None:
        how |= {"nargs": "?", "const": row.bare}
    return how


def parser_of(parse: Callable[[str], Any], *, swept: bool = False) -> Callable[[str], Any]:
    """The parser with its own words for what is wrong; of `swept` values, with commas, it makes a tuple."""

    def parsed(text: str) -> Any:
        try:
            return tuple(map(parse, text.split(","))) if swept and "," in text else parse(text)
        except WorkloadError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            if parse is not int:
                raise
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number such as 1000") from None

    return parse if parse in (float, str) else parsed


def new_folder(out: Path | None) -> None:
    """WorkloadError where there is something in the folder that is to be written."""
    if out is not None and out.exists() and any(out.iterdir()):
        raise WorkloadError(f"--out {out} is not empty; name another folder, or remove it first")


def read_options(kind: type[T], args: argparse.Namespace, **more: Any) -> T:
    """The dataclass as the flags say it; `more` are its other fields."""
    values = {name: getattr(args, name) for name in options_of(kind) if hasattr(args, name)}
    for name, value in values.items():
        if isinstance(value, tuple) and options_of(kind)[name].swept:
            raise WorkloadError(f"{flag_of(name)} {as_text(value)}: expected one value; only `run` sweeps")
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}, **more)
