"""A suite: engines x models x workloads x repeats out of a TOML file, checked before anything is started."""

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from burstline.bench.limit import check_limit
from burstline.bench.run_settings import words_of_run
from burstline.console.server_options import ServerOptions
from burstline.dtypes import FLOATS
from burstline.errors import read_toml
from burstline.measure.metrics.slo import parse_slo
from burstline.models.model_folder import add_missing_formats, make_model
from burstline.models.weights import FORMATS
from burstline.servers.redact import Secret
from burstline.servers.registry import ENGINES
from burstline.servers.settings import SETTINGS, Settings
from burstline.suites.toml_table import TomlTable
from burstline.wording import hint
from burstline.workloads.load import MAX_REPEATS, Load, load_of
from burstline.workloads.options import options_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import Goals, LimitOptions, LoadSpec, check_goals

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True, eq=False)
class Platform:
    """Where runs go: Ray resources, or an accelerator type, and the environment of the command there.

    `device` is the roofline's name of its GPUs. `models` are settings of models there, before the models'
    own: what takes one GPU here takes two where a GPU has half of the memory.
    """

    name: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    accelerator: str | None = None
    gpus: float = 0.0
    env: Mapping[str, Secret] = field(default_factory=dict)
    device: str | None = None
    models: Mapping[str, Settings] = field(default_factory=dict)

    def ray_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": self.gpus, "resources": dict(self.resources)}
        if self.accelerator:
            options["accelerator_type"] = self.accelerator
        return options

    def __str__(self) -> str:
        needs = [f"{name} {amount:g}" for name, amount in self.resources.items()]
        needs += [self.accelerator] if self.accelerator else []
        needs += [f"{self.gpus:g} GPU"] if self.gpus else []
        return ", ".join(needs) or "any node"


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

    def at(self, model: "Model", platform: Platform | None) -> ServerOptions:
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
    """A load and what it must reach; those of one sweep share `of`, their name in the file.

    `spec` has no salt, `load` is what follows from it. With `limit` the highest such load is searched, from
    its rate or concurrency on.
    """

    name: str
    spec: LoadSpec
    load: Load = field(compare=False)
    goals: Goals
    of: str
    limit: LimitOptions | None = None


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
        return "-".join(filter(None, (f"{self.place:03d}", self.engine.name, *self._shared)))

    @property
    def cell(self) -> str:
        """The settings that must be equal to compare engines."""
        return ", ".join(filter(None, self._shared))

    @property
    def _shared(self) -> tuple[str, ...]:
        return self.model.name, self.workload.name, self.platform.name if self.platform else ""

    def argv(self, out: Path) -> tuple[str, ...]:
        server, load = self.engine.at(self.model, self.platform), self.workload
        spec = replace(load.spec, tokenizer=self.model.tokenizer, vocab_size=self.model.vocab_size)
        if load.limit is not None:
            return words_of_run(server, out, spec, load.goals, load.limit, verb="limit")
        return words_of_run(server, out, spec, load.goals)


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


SHIPPED: Final = Path(__file__).parent / "shipped"
"""Suites that come with Burstline (in a clone a link to suites/)."""


def suite_file(path: Path) -> Path:
    """The file that is there, else the shipped suite of that name: `laptop`."""
    shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
    return shipped if not path.is_file() and path.parent.name in ("", "suites") and shipped.exists() else path


def load_suite(path: Path) -> Suite:
    """The suite in a file; WorkloadError, naming file, table and key; RooflineError where it is no TOML."""
    if path.suffix in (".yaml", ".yml"):
        raise WorkloadError(
            f"{path}: expected a suite's TOML file; inference-perf's YAML is here --url, --rate and "
            "--duration-s for its stages, and --prompt-tokens and --output-tokens for its data"
        )
    try:
        raw = read_toml(path)
    except OSError as error:
        shipped = sorted(each.stem for each in SHIPPED.glob("*.toml"))
        why = f"{error.strerror}; expected a suite's TOML file; {hint(path.stem, shipped)}"
        raise WorkloadError(f"{path} cannot be read: {why}") from None
    return parse_suite(raw, str(path))


def parse_suite(raw: Mapping[str, Any], source: str) -> Suite:
    top = TomlTable(raw, source)
    top.only("name", "description", "repeats", "engine", "model", "workload", "limit", "platform", "settings")
    shared = top.raw.get("settings", {})
    if not isinstance(shared, dict):
        raise WorkloadError(f"{top.where}: settings must be written as [settings]")
    settings = settings_of(TomlTable(shared, f"{top.where}, [settings]"))
    suite = Suite(
        name=_slug(top.need("name", str), top),
        description=top.get("description", str, ""),
        repeats=top.get("repeats", int, 1),
        engines=tuple(_engine(table, settings) for table in top.tables("engine", required=True)),
        models=tuple(_model(table) for table in top.tables("model")) or (Model(),),
        workloads=(
            *(
                _workload(one, of=table.need("name", str))
                for table in top.tables("workload", required="limit" not in top.raw)
                for one in expanded(table)
            ),
            *(_workload(one, of=one.need("name", str), searched=True) for one in top.tables("limit")),
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
            raise WorkloadError(f"{source}: two [[{kind}]] are called {twice!r}; give each a unique name")
    for platform in suite.platforms:
        for name in platform.models:
            if name not in [model.name for model in suite.models]:
                raise WorkloadError(f"{source}: [[platform]] {platform.name!r}: no [[model]] is {name!r}")
    return suite


def _slug(name: str, table: TomlTable) -> str:
    if not name or not all(c.isalnum() or c in "._-" for c in name):
        raise WorkloadError(f"{table.where}: name {name!r}: expected letters, digits, dot, dash, underscore")
    return name


def _engine(table: TomlTable, of_all: Settings) -> Contender:
    if "api_key" in table.raw:
        raise WorkloadError(
            f"{table.where}: suites hold no keys: put the key in an environment variable and name it, "
            'e.g. api_key_env = "OPENAI_API_KEY"'
        )
    keys = [name for name in options_of(ServerOptions) if name != "model"]
    table.only("name", "args", "api_key_env", *keys, *SETTINGS)
    engine = table.get("engine", str, None) if "url" in table.raw else table.need("engine", str)
    name = _slug(table.get("name", str, engine) or table.need("engine", str), table)
    if engine is not None and engine not in ENGINES:
        raise WorkloadError(f"{table.where}: unknown engine {engine!r}; {hint(engine, ENGINES)}")
    args = Secret.words(*table.get("args", list, []))
    if any(word.shown != word.reveal() for word in args):
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
        dtype=_one_of(table, "dtype", tuple(FLOATS)),
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


def _workload(table: TomlTable, of: str, *, searched: bool = False) -> Workload:
    # A salt used twice would let a prefix cache serve the repeat.
    keys = [name for name in options_of(LoadSpec) if name not in (*OF_THE_MODEL, "salt")]
    table.only("name", *keys, *options_of(Goals), *(options_of(LimitOptions) if searched else ()))
    spec, goals = LoadSpec(**table.options(LoadSpec)), Goals(**table.options(Goals))
    limit = LimitOptions(**table.options(LimitOptions)) if searched else None
    try:
        load = load_of(spec if limit is None else check_limit(spec, goals, limit))
        check_goals(goals)
        for target in goals.slo:
            parse_slo(target)
    except WorkloadError as error:
        raise WorkloadError(f"{table.where}: {error}") from None
    return Workload(_slug(table.need("name", str), table), spec, load, goals, of, limit)


def make_where_missing(model: Model) -> None:
    """A model folder that the suite asks to be made is made, once, with the weights that it lacks."""
    if model.like is None or model.path is None:
        return
    if (Path(model.path) / "config.json").exists():
        add_missing_formats(Path(model.path), model.formats)
        return
    print(f"Generating {model.path} with the shape of {model.like}", file=sys.stderr)
    make_model(Path(model.path), model.like, formats=model.formats, dtype=model.dtype)


def platform_of(table: TomlTable) -> Platform:
    table.only("name", "resources", "accelerator", "gpus", "env", "device", "models")
    name = table.need("name", str)
    amounts = _mapping(table, "resources", float)
    bad = next((key for key, amount in amounts.items() if amount <= 0), None)
    if bad is not None:
        raise WorkloadError(f"{table.where}: resources.{bad} must be above 0")
    return Platform(
        name=name,
        resources=amounts,
        accelerator=table.get("accelerator", str, None),
        gpus=float(table.get("gpus", float, 0.0)),
        env={key: Secret.words(f"--{key}", value)[1] for key, value in _mapping(table, "env", str).items()},
        device=table.get("device", str, None),
        models={
            model: settings_of(TomlTable(raw, f"{table.where}, models.{model}"))
            for model, raw in _mapping(table, "models", dict).items()
        },
    )


def settings_of(table: TomlTable) -> Settings:
    """A table that has settings of engines and nothing else."""
    table.only(*SETTINGS)
    return Settings(**table.options(Settings))


def _mapping(table: TomlTable, key: str, kind: type) -> dict[str, Any]:
    raw = table.raw.get(key, {})
    if not isinstance(raw, dict):
        raise WorkloadError(f"{table.where}: {key} must be a table, e.g. {key} = {{ a100 = 1 }}")
    inner = TomlTable(raw, f"{table.where}, {key}")
    return {name: inner.get(name, kind, None) for name in raw}


LOADS: Final = ("concurrency", "rate")
"""The keys that name the workloads of a sweep before all others."""
NEVER_SWEPT: Final = ("slo",)
"""Keys that are lists by nature."""


def expanded(table: TomlTable) -> list[TomlTable]:
    """The workload itself, or one for each place in its lists, which go in step.

    `concurrency = [1, 8]` with `requests = [20, 160]` makes of "steady" the workloads "steady-concurrency1"
    of 20 requests and "steady-concurrency8" of 160. WorkloadError where the lists are not equally long.
    """
    lists = {k: v for k, v in table.raw.items() if isinstance(v, list) and k not in NEVER_SWEPT}
    if not lists:
        return [table]
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1 or 0 in lengths:
        told = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise WorkloadError(f"{table.where}: lists must have the same length; {told} values")
    name = table.need("name", str)
    naming = next((key for key in LOADS if key in lists), next(iter(lists)))
    return [
        TomlTable(
            {
                **table.raw,
                **{key: values[k] for key, values in lists.items()},
                "name": f"{name}-{naming}{re.sub(r'[^A-Za-z0-9._-]+', '-', str(value)).strip('-')}",
            },
            f"{table.where}, {naming} = {value}",
        )
        for k, value in enumerate(lists[naming])
    ]
