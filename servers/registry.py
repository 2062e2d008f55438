"""Every engine Burstline can start, watch and stop: one line each."""

from servers.endpoint import Endpoint
from servers.engine import Engine
from servers.vllm import Vllm
from servers.truth.adapter import Truth

ENGINES: dict[str, Engine] = {
    "truth": Truth(),
}
