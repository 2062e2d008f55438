"""A suite: engines x models x workloads x repeats out of a TOML file, checked before anything is started."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from burstline.bench.load_options import MAX_REPEATS, checked
from burstline.loadgen.metrics.slo import parse_goal
from burstline.models.model_folder import add_missing_formats, make_model
from burstline.models.random_weights import DTYPES, FORMATS
from burstline.server_options import ServerOptions
from burstline.servers.redact import without_secrets
from burstline.servers.registry import ENGINES
from burstline.servers.settings import SETTINGS, Settings
from burstline.suites.expansion import expanded
from burstline.suites.platform import Platform, platform_of
from burstline.suites.toml_table import TomlTable
from burstline.workloads.options import options_of, words_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import Goals, LoadSpec, check_goals

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine as the suite starts or reaches it. `api_key_env` names a variable, never holds a key.

    `settings_of_all` are those of the suite: the engine's own, in `server`, then those of a model on a
    platform, and a model's count before them.
    """

    name: str
    server: ServerOptions
    settings_of_all: Settings
    api_key_env: str | None

    def at(self, model: Model, platform: Platform | None) -> ServerOptions:
        """The server of a run with this model there; one that runs already has its own settings."""
        own = self.server.settings
        if self.server.url is None:
            there = platform.models.get(model.name, Settings()) if platform else Settings()
            own = own.over(there.over(model.settings.over(self.settings_of_all)))
        return replace(self.server, model=model.path, settings=own)


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder or name; `like` says after which model the folder is made where it is missing.

    `formats` are those of the weights it is made with, `dtype` is theirs.
    """

    name: str = ""
    path: str | None = None
    like: str | None = None
    formats: tuple[str, ...] = ()
    dtype: str | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class Workload:
    """A load and what it must reach; those of one sweep share `of`, their name in the file."""

    name: str
    spec: LoadSpec
    goals: Goals
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
        server, load = self.engine.at(self.model, self.platform), self.workload
        spec = replace(load.spec, tokenizer=self.model.tokenizer, vocab_size=self.model.vocab_size)
        parts: tuple[object, ...] = (server, server.settings, spec, load.goals)
        flags = itertools.chain.from_iterable(map(words_of, parts))
        args = ("--", *server.engine_args) if server.engine_args else ()
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
        models=tuple(_model(table) for table in top.tables("model")) or (Model(),),
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
    for platform in suite.platforms:
        for name in platform.models:
            if name not in [model.name for model in suite.models]:
                raise WorkloadError(f"{source}: [[platform]] {platform.name!r}: no [[model]] is {name!r}")
    return suite


def _slug(name: str, table: TomlTable) -> str:
    if not name or not all(c.isalnum() or c in "._-" for c in name):
        raise WorkloadError(f"{table.where}: name {name!r}: expected letters, digits, dot, dash, underscore")
    return name


def _settings(top: TomlTable) -> Settings:
    """The settings of all engines that the suite starts."""
    raw = top.raw.get("settings", {})
    if not isinstance(raw, dict):
        raise WorkloadError(f"{top.where}: settings must be written as [settings]")
    table = TomlTable(raw, f"{top.where}, [settings]")
    table.only(*SETTINGS)
    return Settings(**table.options(Settings))


def _engine(table: TomlTable, of_all: Settings) -> Contender:
    if "api_key" in table.raw:
        raise WorkloadError(
            f"{table.where}: a key does not belong in a file: put it in an environment variable and name "
            'that, e.g. api_key_env = "OPENAI_API_KEY"'
        )
    keys = [name for name in options_of(ServerOptions) if name != "model"]
    table.only("name", "args", "api_key_env", *keys, *SETTINGS)
    engine = table.get("engine", str, None)
    name = _slug(table.get("name", str, engine) or table.need("engine", str), table)
    if engine is not None and engine not in ENGINES:
        near = difflib.get_close_matches(engine, ENGINES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(ENGINES)}"
        raise WorkloadError(f"{table.where}: unknown engine {engine!r}; {hint}")
    args = tuple(table.get("args", list, []))
    if without_secrets(list(args)) != list(args):
        raise WorkloadError(f"{table.where}: args hold a secret; name a variable with api_key_env instead")
    own = Settings(**table.options(Settings))
    server = ServerOptions(**table.options(ServerOptions, but=("model",)), settings=own, engine_args=args)
    return Contender(name, server, of_all, table.get("api_key_env", str, None))


def _model(table: TomlTable) -> Model:
    settings = [key for key in SETTINGS if key != "dtype"]  # here it is the weights' own
    table.only("name", "path", "like", "weights", "format", "dtype", *OF_THE_MODEL, *settings)
    default = "safetensors" if table.get("weights", bool, False) else "none"
    wanted = _one_of(table, "format", (*FORMATS, "both")) or default
    return Model(
        name=_slug(table.need("name", str), table),
        path=table.need("path", str),
        like=table.get("like", str, None),
        formats=tuple(kind for kind in FORMATS if wanted in (kind, "both")),
        dtype=_one_of(table, "dtype", DTYPES),
        settings=Settings(**table.options(Settings, but=("dtype",))),
        **{key: value for key, value in table.options(LoadSpec).items() if key in OF_THE_MODEL},
    )


def _one_of(table: TomlTable, key: str, choices: Sequence[str]) -> str | None:
    value: str | None = table.get(key, str, None)
    if value is not None and value not in choices:
        raise WorkloadError(f"{table.where}: {key} {value!r}; expected one of: {', '.join(choices)}")
    return value


OF_THE_MODEL: Final = ("tokenizer", "vocab_size")
"""Options of a load that follow from the model."""


def _workload(table: TomlTable, of: str) -> Workload:
    # A salt used twice would let a prefix cache serve the repeat.
    keys = [name for name in options_of(LoadSpec) if name not in (*OF_THE_MODEL, "salt")]
    table.only("name", *keys, *options_of(Goals))
    spec, goals = LoadSpec(**table.options(LoadSpec)), Goals(**table.options(Goals))
    try:
        checked(spec)
        check_goals(goals)
        for target in goals.slo:
            parse_goal(target)
    except WorkloadError as error:
        raise WorkloadError(f"{table.where}: {error}") from None
    return Workload(_slug(table.need("name", str), table), spec, goals, of)


def make_where_missing(model: Model) -> None:
    """A model folder that the suite asks to be made is made, once, with the weights that it lacks."""
    if model.like is None or model.path is None:
        return

    if (Path(model.path) / "config.json").exists():
        add_missing_formats(Path(model.path), model.formats)
        return
    print(f"Making {model.path}, shaped like {model.like}", file=sys.stderr)
    make_model(Path(model.path), model.like, formats=model.formats, dtype=model.dtype)
