"""Every engine Burstline can start, watch and stop: one line each."""

from servers.endpoint import Endpoint
from servers.engine import Engine
from servers.lightllm import Lightllm
from servers.llamacpp import LlamaCpp
from servers.reference.adapter import Reference
from servers.sglang import Sglang
from servers.tgi import Tgi
from servers.transformers_serve import TransformersServe
from servers.trtllm import TrtLlm
from servers.truth.adapter import Truth
from servers.vllm import Vllm

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
