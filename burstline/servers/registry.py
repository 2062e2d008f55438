"""The registry of engines, one line each of `registry.toml`; its module is imported on first use.

`engine_at` says which of them answers at a URL, by the pages that it serves.

Engines of other packages are found by their entry points in the group `burstline.engines`, each of which
names what makes the engine: `foo = "foo_engine:Foo"`. For a module that is not installed there is the
environment, which a run inherits: `BURSTLINE_ENGINES=my_engine,another` takes the `ENGINE` of each.
"""

import importlib
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from burstline.errors import tables_beside
from burstline.servers.engine import Engine
from burstline.servers.identity import Sign
from burstline.servers.messages import Call, EngineError, Get, Target
from burstline.workloads.request import Request, WorkloadError

BUILT_IN: Final[Mapping[str, str]] = tables_beside(__file__, "registry.toml")
"""By name, the module in `servers/engines/` and what makes the engine there."""
STYLES: Final[Mapping[str, str]] = {"completions": "openai", "chat": "openai-chat"}
"""OpenAI's dialects, in which other engines can be asked too: `vllm+chat`."""
_OF_THE_DIALECT = (
    "decode", "take", "generated", "ready_call", "probe", "capabilities_of", "tokenizes", "capabilities",
    "hang_up_at",
)  # fmt: skip
"""What belongs to the dialect; all else is the engine's."""


class _Spoken(Engine):
    """An engine that is asked through another dialect than its own: `vllm+chat`, `tgi+completions`.

    `engine` is for starting, watching and reading its facts, `dialect` for requests and replies.
    """

    def __init__(self, name: str, engine: Engine, dialect: Engine, style: str) -> None:
        for attribute in dir(engine):
            if not attribute.startswith("__") and attribute != "encode":
                source = dialect if attribute in _OF_THE_DIALECT else engine
                setattr(self, attribute, getattr(source, attribute))
        self.name = name
        self.title = f"{engine.title} ({style})"
        self.signs = ()
        if engine.lora_path is not None and len(engine.lora_path) > 1:  # inside an object of its own body
            self.lora_path = dialect.lora_path
        self.speaks = style
        self._dialect = dialect
        self._made_of = (name, engine, dialect, style)

    def __reduce__(self) -> "tuple[type[_Spoken], tuple[str, Engine, Engine, str]]":
        # Decoders are other processes, and the settings that were copied hold functions that cannot be sent.
        return _Spoken, self._made_of

    def encode(self, request: Request, target: Target) -> Call:
        call = self._dialect.encode(request, target)
        return call if self.index_header is None else call.with_header(self.index_header, str(request.index))


GROUP: Final = "burstline.engines"


@cache
def _installed() -> Mapping[str, EntryPoint]:
    """The engines of other packages, by name: read only for a name that is not built in, or for a list."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _made(point: EntryPoint) -> Engine:
    """The engine of another package; EngineError where it is none, or has another name."""
    try:
        engine = point.load()()
    except Exception as error:  # whatever that package does when it is imported
        raise EngineError(f"{GROUP}: {point.name} = {point.value} cannot be loaded: {error!r}") from error
    if not isinstance(engine, Engine) or engine.name != point.name:
        raise EngineError(
            f"{GROUP}: {point.name} = {point.value} does not create an Engine named {point.name}"
        )
    return engine


class _Registry(MutableMapping[str, Engine]):
    """Engines by name. Names are known at once; an engine of `built_in` is imported when it is asked for.

    The processes of a run ask for one engine: they must not pay for the others' imports.
    """

    def __init__(self, built_in: Mapping[str, str]) -> None:
        self._engines: dict[str, Engine | str] = dict(built_in)

    def __getitem__(self, name: str) -> Engine:
        base, plus, style = name.partition("+")
        if name not in self._engines and name in self:
            made = (
                _Spoken(name, self[base], self[STYLES[style]], style) if plus else _made(_installed()[name])
            )
            self._engines[name] = made
        engine = self._engines[name]
        if isinstance(engine, str):
            module, _, maker = engine.partition(":")
            engine = getattr(importlib.import_module(f"burstline.servers.engines.{module}"), maker)()
            self._engines[name] = engine
        return engine

    def __setitem__(self, name: str, engine: Engine) -> None:
        self._engines[name] = engine

    def __delitem__(self, name: str) -> None:
        del self._engines[name]

    def __contains__(self, name: object) -> bool:
        base, plus, style = str(name).partition("+")
        if plus and name not in self._engines:
            return style in STYLES and base in self
        return name in self._engines or name in _installed()

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in dict.fromkeys((*self._engines, *_installed())) if "+" not in name])

    def __len__(self) -> int:
        return len(list(iter(self)))


ENGINES: Final = _Registry(BUILT_IN)

UNKNOWN = "openai"
"""The registry's name for a server that does not say what it is."""
MODELS = "/v1/models"


def engine_at(get: Get, expected: str | None = None) -> str | None:
    """The registry's name of what is there; UNKNOWN for a server that does not say, None for no server.

    Only GET requests are sent. A server that refuses them (no key, a load balancer) counts as one that
    does not say. Where it shows a sign of the `expected` engine, no other is looked for (nor imported).
    """
    pages: dict[str, bytes] = {}
    try:
        pages[MODELS] = get(MODELS).body
    except EngineError:
        return None
    if expected is not None and expected in ENGINES:
        with suppress(EngineError):
            if any(_shows(sign, get, pages) for sign in ENGINES[expected].signs):
                return expected
    signs = [(sign, name) for name, engine in ENGINES.items() for sign in engine.signs]
    # The page that is here already, first.
    for sign, name in sorted(signs, key=lambda row: row[0].path != MODELS):
        try:
            if _shows(sign, get, pages):
                return name
        except EngineError:
            return UNKNOWN
    return UNKNOWN


def _shows(sign: Sign, get: Get, pages: dict[str, bytes]) -> bool:
    if sign.path not in pages:
        pages[sign.path] = get(sign.path).body
    return re.search(sign.pattern, pages[sign.path], re.MULTILINE) is not None


ENGINES_VARIABLE = "BURSTLINE_ENGINES"


def register(modules: str) -> None:
    """Add the `ENGINE` of each of these modules (names, separated by commas), or replace one of that name."""
    for module in filter(None, modules.split(",")):
        try:
            engine = importlib.import_module(module).ENGINE
        except (ImportError, AttributeError) as error:
            why = f"{module} is no module with an ENGINE ({error}); correct the name, or unset the variable"
            raise WorkloadError(f"{ENGINES_VARIABLE}={modules}: {why}") from error
        ENGINES[engine.name] = engine


register(os.environ.get(ENGINES_VARIABLE, ""))
