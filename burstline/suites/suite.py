"""A suite: engines x models x workloads x repeats out of a TOML file, checked before anything is started."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import itertools
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from burstline.bench.load_options import MAX_REPEATS, checked
from burstline.engine_flags import add_engine, add_settings
from burstline.load_flags import add_arrivals, add_load, add_sources, add_targets, spec_of
from burstline.models.random_weights import DTYPES, FORMATS
from burstline.suites.expansion import expanded
from burstline.suites.platform import Platform, platform_of
from burstline.suites.toml_table import TomlTable
from loadgen.metrics.slo import parse_goal
from servers.redact import without_secrets
from servers.registry import ENGINES
from workloads.options import as_text
from workloads.request import WorkloadError

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine as the suite starts or reaches it. `api_key_env` names a variable, never holds a key.

    `settings` are flags by setting, `own` the names of those that a model's settings do not replace.
    """

    name: str
    asked: tuple[str, ...]
    settings: Mapping[str, tuple[str, ...]]
    own: frozenset[str]
    args: tuple[str, ...]
    api_key_env: str | None

    def flags(self, of_model: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Its flags: a model's settings replace those of the suite, not the engine's own."""
        settings = {**self.settings} | {key: words for key, words in of_model.items() if key not in self.own}
        return (*self.asked, *itertools.chain.from_iterable(settings.values()))


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder or name; `like` says after which model the folder is made where it is missing.

    `formats` are those of the weights it is made with, `dtype` is theirs. `settings` are flags by setting.
    """

    name: str
    path: str | None
    like: str | None
    formats: tuple[str, ...]
    dtype: str | None
    flags: tuple[str, ...]
    settings: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A load: the flags of `burstline run`; those of one sweep share `of`, their name in the file."""

    name: str
    flags: tuple[str, ...]
    of: str


@dataclass(frozen=True, slots=True)
class Suite:
    """A checked suite; `sha256` is of what it says, comments apart."""

    name: str
    description: str
    repeats: int
    engines: tuple[Contender, ...]
    models: tuple[Model, ...]
    workloads: tuple[Workload, ...]
    sha256: str
    platforms: tuple[Platform, ...] = ()

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.sha256[:8]}"


@dataclass(frozen=True, slots=True)
class Slot:
    """One run of a suite: `id` is its folder, `place` its place in time from 1."""

    place: int
    engine: Contender
    model: Model
    workload: Workload
    repeat: int
    platform: Platform | None = None

    @property
    def id(self) -> str:
        platform = self.platform.name if self.platform else ""
        words = (f"{self.place:03d}", self.engine.name, self.model.name, self.workload.name, platform)
        return "-".join(word for word in words if word)

    @property
    def cell(self) -> str:
        """What is held equal where engines are compared."""
        platform = self.platform.name if self.platform else ""
        return ", ".join(word for word in (self.model.name, self.workload.name, platform) if word)

    def argv(self, out: Path) -> tuple[str, ...]:
        """What `burstline` is called with for this run."""
        model = () if self.model.path is None else ("--model", self.model.path)
        flags = (*self.engine.flags(self.model.settings), *model, *self.model.flags, *self.workload.flags)
        args = ("--", *self.engine.args) if self.engine.args else ()
        return ("run", *flags, "--out", str(out), *args)


def schedule(suite: Suite) -> tuple[Slot, ...]:
    """Every run in the order of time: all of the first repeat, then all of it backwards, and so on.

    A B C C B A: what drifts with time (heat, a neighbour) falls on all engines alike.
    """
    platforms: tuple[Platform | None, ...] = suite.platforms or (None,)
    forwards = list(itertools.product(platforms, suite.models, suite.workloads, suite.engines))
    order = [
        (*one, repeat)
        for repeat in range(1, suite.repeats + 1)
        for one in (forwards if repeat % 2 else reversed(forwards))
    ]
    return tuple(Slot(k, e, m, w, repeat, p) for k, (p, m, w, e, repeat) in enumerate(order, 1))


def load_suite(path: Path) -> Suite:
    """The suite in a file; WorkloadError, naming file, table and key, where it cannot be run."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise WorkloadError(
            f"{path} cannot be read: {why}; expected a suite, such as suites/sweep.toml"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{path} is not TOML: {error}") from None
    return parse_suite(raw, str(path))


def parse_suite(raw: Mapping[str, Any], source: str) -> Suite:
    """The suite that a parsed TOML document describes."""
    top = TomlTable(raw, source)
    top.only("name", "description", "repeats", "engine", "model", "workload", "platform", "settings")
    settings = _settings(top)
    suite = Suite(
        name=_slug(top.need("name", str), top),
        description=top.get("description", str, ""),
        repeats=top.get("repeats", int, 1),
        engines=tuple(_engine(table, settings) for table in top.tables("engine", required=True)),
        models=tuple(_model(table) for table in top.tables("model"))
        or (Model("", None, None, (), None, (), {}),),
        workloads=tuple(
            _workload(one, of=table.need("name", str))
            for table in top.tables("workload", required=True)
            for one in expanded(table)
        ),
        sha256=hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest(),
        platforms=tuple(map(platform_of, top.tables("platform"))),
    )
    if not 1 <= suite.repeats <= MAX_REPEATS:
        raise WorkloadError(f"{source}: repeats = {suite.repeats}: expected 1 to {MAX_REPEATS}")
    for kind, names in (
        ("engine", [e.name for e in suite.engines]),
        ("model", [m.name for m in suite.models]),
        ("workload", [w.name for w in suite.workloads]),
        ("platform", [p.name for p in suite.platforms]),
    ):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise WorkloadError(f"{source}: two [[{kind}]] are called {twice!r}; give each a name of its own")
    return suite


def _slug(name: str, table: TomlTable) -> str:
    if not name or not all(c.isalnum() or c in "._-" for c in name):
        raise WorkloadError(f"{table.where}: name {name!r}: expected letters, digits, dot, dash, underscore")
    return name


def _settings(top: TomlTable) -> TomlTable:
    """The settings of all engines that the suite starts, in the command's own spelling."""
    raw = top.raw.get("settings", {})
    if not isinstance(raw, dict):
        raise WorkloadError(f"{top.where}: settings must be written as [settings]")
    settings = TomlTable(raw, f"{top.where}, [settings]")
    settings.only(*_flags_of(add_settings))
    return settings


def _setting_flags(table: TomlTable, *but: str) -> dict[str, tuple[str, ...]]:
    """The settings of a table as flags, by setting."""
    known = {key: action for key, action in _flags_of(add_settings).items() if key not in but}
    return {key: _as_flags(table, {key: action}) for key, action in known.items() if key in table.raw}


def _engine(given: TomlTable, settings: TomlTable) -> Contender:
    """An engine with its own keys over the settings of all; a server that runs already has its own."""
    raw = {("engine_python" if key == "vllm_python" else key): value for key, value in given.raw.items()}
    table = TomlTable(raw, given.where)
    flags = _flags_of(add_engine)
    del flags["model"]
    if "api_key" in table.raw:
        raise WorkloadError(
            f"{table.where}: a key does not belong in a file: put it in an environment variable and name "
            'that, e.g. api_key_env = "OPENAI_API_KEY"'
        )
    table.only("name", "args", "api_key_env", *flags)
    engine = table.get("engine", str, None)
    name = _slug(table.get("name", str, engine) or table.need("engine", str), table)
    if engine is not None and engine not in ENGINES:
        near = difflib.get_close_matches(engine, ENGINES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(ENGINES)}"
        raise WorkloadError(f"{table.where}: unknown engine {engine!r}; {hint}")
    args = tuple(table.get("args", list, []))
    if without_secrets(list(args)) != list(args):
        raise WorkloadError(f"{table.where}: args hold a secret; name a variable with api_key_env instead")
    known = _flags_of(add_settings)
    asked = _as_flags(table, {key: action for key, action in flags.items() if key not in known})
    own, of_all = _setting_flags(table), {} if "url" in raw else _setting_flags(settings)
    fixed = frozenset(known if "url" in raw else own)
    return Contender(name, asked, of_all | own, fixed, args, table.get("api_key_env", str, None))


def _model(table: TomlTable) -> Model:
    load = _flags_of(add_load)
    flags = {key: load[key] for key in ("tokenizer", "vocab_size")}
    settings = [key for key in _flags_of(add_settings) if key != "dtype"]  # here it is the weights' own
    table.only("name", "path", "like", "weights", "format", "dtype", *flags, *settings)
    default = "safetensors" if table.get("weights", bool, False) else "none"
    wanted = _one_of(table, "format", (*FORMATS, "both")) or default
    return Model(
        name=_slug(table.need("name", str), table),
        path=table.need("path", str),
        like=table.get("like", str, None),
        formats=tuple(kind for kind in FORMATS if wanted in (kind, "both")),
        dtype=_one_of(table, "dtype", DTYPES),
        flags=_as_flags(table, flags),
        settings=_setting_flags(table, "dtype"),
    )


def _one_of(table: TomlTable, key: str, choices: Sequence[str]) -> str | None:
    value: str | None = table.get(key, str, None)
    if value is not None and value not in choices:
        raise WorkloadError(f"{table.where}: {key} {value!r}; expected one of: {', '.join(choices)}")
    return value


def _workload(table: TomlTable, of: str) -> Workload:
    adds = (add_load, add_sources, add_arrivals, add_targets)
    flags = {key: action for add in adds for key, action in _flags_of(add).items()}
    # The tokenizer is the model's affair, and a salt used twice would let a prefix cache serve the repeat.
    for key in ("tokenizer", "vocab_size", "salt"):
        del flags[key]
    table.only("name", *flags)
    workload = Workload(_slug(table.need("name", str), table), _as_flags(table, flags), of)
    parser = argparse.ArgumentParser(exit_on_error=False)
    for add in adds:
        add(parser.add_argument_group())
    try:
        asked = parser.parse_args(workload.flags)
        checked(spec_of(asked))
        for target in asked.slo:
            parse_goal(target)
    except (argparse.ArgumentError, WorkloadError) as error:
        raise WorkloadError(f"{table.where}: {error}") from None
    return workload


def _flags_of(add: Any) -> dict[str, argparse.Action]:
    """What a group of the command's flags takes, by key: a flag's name with underscores."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser.add_argument_group())
    return {action.dest: action for action in parser._actions}


def _as_flags(table: TomlTable, known: Mapping[str, argparse.Action]) -> tuple[str, ...]:
    """The table's keys as the command's flags, in the order in which the command lists them."""
    flags: list[str] = []
    for key, action in known.items():
        if key not in table.raw:
            continue
        flag = action.option_strings[-1]
        may_stand_alone = action.nargs == 0 or (action.nargs == "?" and isinstance(table.raw[key], bool))
        if may_stand_alone:
            flags += [flag] if table.get(key, bool, False) else []
            continue
        if action.metavar == "on|off" and isinstance(table.raw[key], bool):
            flags += [flag, as_text(table.raw[key])]
            continue
        if isinstance(action.default, list):  # may be given several times
            flags += [word for value in table.get(key, list, []) for word in (flag, value)]
            continue
        kind = action.type if action.type in (int, float) else str
        value = table.raw[key]
        if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)  # prompt_tokens = 512 is as good as "512", cancel_share = 0.2 as "20%"
        else:
            value = table.get(key, kind, None)
        flags += [flag, str(value)]
    return tuple(flags)


def make_where_missing(model: Model) -> None:
    """A model folder that the suite asks to be made is made, once, with the weights that it lacks."""
    if model.like is None or model.path is None:
        return
    from burstline.models.model_folder import add_missing_formats, make_model

    if (Path(model.path) / "config.json").exists():
        add_missing_formats(Path(model.path), model.formats)
        return
    print(f"Making {model.path}, shaped like {model.like}", file=sys.stderr)
    make_model(Path(model.path), model.like, formats=model.formats, dtype=model.dtype)
