"""Every engine Burstline can start, watch and stop: one line each."""

from servers.engine import Engine
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
