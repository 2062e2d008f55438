"""Every engine Burstline can start, watch and stop: one line each.

Engines of other packages are named by the environment, which the processes of a run inherit:
`BURSTLINE_ENGINES=my_engine,another` imports these modules and takes the `ENGINE` of each.
"""

import importlib
import os

from servers.engine import Engine, EngineError
from servers.engines.endpoint import Endpoint
from servers.engines.lightllm import Lightllm
from servers.engines.llamacpp import LlamaCpp
from servers.engines.reference import Reference
from servers.engines.sglang import Sglang
from servers.engines.tgi import Tgi
from servers.engines.transformers_serve import TransformersServe
from servers.engines.trtllm import TrtLlm
from servers.engines.truth import Truth
from servers.engines.vllm import Vllm

ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "tgi": Tgi(),
    "lightllm": Lightllm(),
    "sglang": Sglang(),
    "trtllm": TrtLlm(),
    "llamacpp": LlamaCpp(),
    "transformers": TransformersServe(),
    "reference": Reference(),
    "openai": Endpoint("completions"),
    "openai-chat": Endpoint("chat"),
    "truth": Truth(),
}

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
