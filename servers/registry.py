"""Every engine Burstline can start, watch and stop: one line each."""

from servers.endpoint import Endpoint
from servers.engine import Engine
from servers.reference.adapter import Reference
from servers.truth.adapter import Truth
from servers.vllm import Vllm

ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "reference": Reference(),
    "openai": Endpoint(),
    "truth": Truth(),
}
