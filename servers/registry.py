"""Every engine Burstline can start, watch and stop: one line each, its module imported on first use.

Engines of other packages are named by the environment, which the processes of a run inherit:
`BURSTLINE_ENGINES=my_engine,another` imports these modules and takes the `ENGINE` of each.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Final

from servers.engine import Engine
from servers.messages import EngineError

_BUILT_IN: Final[Mapping[str, str]] = {
    "vllm": "vllm:Vllm",
    "tgi": "tgi:Tgi",
    "lightllm": "lightllm:Lightllm",
    "sglang": "sglang:Sglang",
    "trtllm": "trtllm:TrtLlm",
    "llamacpp": "llamacpp:LlamaCpp",
    "transformers": "transformers_serve:TransformersServe",
    "reference": "reference:Reference",
    "openai": "endpoint:completions",
    "openai-chat": "endpoint:chat",
    "truth": "truth:Truth",
}
"""By name, the module in `servers/engines/` and what makes the engine there."""


STYLES: Final[Mapping[str, str]] = {"completions": "openai", "chat": "openai-chat"}
"""OpenAI's dialects, in which other engines can be asked too: `vllm+chat`."""


class Registry(MutableMapping[str, Engine]):
    """Engines by name. Names are known at once; an engine of `built_in` is imported when it is asked for.

    The processes of a run ask for one engine: they must not pay for the others' imports.
    """

    def __init__(self, built_in: Mapping[str, str]) -> None:
        self._engines: dict[str, Engine | str] = dict(built_in)

    def __getitem__(self, name: str) -> Engine:
        base, plus, style = name.partition("+")
        if plus and name not in self._engines and base in self._engines and style in STYLES:
            from servers.spoken import Spoken

            self._engines[name] = Spoken(name, self[base], self[STYLES[style]], style)
        engine = self._engines[name]
        if isinstance(engine, str):
            module, _, maker = engine.partition(":")
            engine = getattr(importlib.import_module(f"servers.engines.{module}"), maker)()
            self._engines[name] = engine
        return engine

    def __setitem__(self, name: str, engine: Engine) -> None:
        self._engines[name] = engine

    def __delitem__(self, name: str) -> None:
        del self._engines[name]

    def __contains__(self, name: object) -> bool:
        base, plus, style = str(name).partition("+")
        return name in self._engines or (bool(plus) and base in self._engines and style in STYLES)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._engines if "+" not in name])

    def __len__(self) -> int:
        return len(list(iter(self)))


ENGINES: Final = Registry(_BUILT_IN)

ENGINES_VARIABLE = "BURSTLINE_ENGINES"


def register(modules: str) -> None:
    """Add the `ENGINE` of each of these modules (names, separated by commas), or replace one of that name."""
    for module in filter(None, modules.split(",")):
        try:
            engine = importlib.import_module(module).ENGINE
        except (ImportError, AttributeError) as error:
            why = f"{module} is no module with an ENGINE ({error})"
            raise EngineError(f"{ENGINES_VARIABLE}={modules}: {why}") from error
        ENGINES[engine.name] = engine


register(os.environ.get(ENGINES_VARIABLE, ""))
