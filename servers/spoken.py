"""An engine that is asked through another dialect than its own: `vllm+chat`, `tgi+completions`."""

from __future__ import annotations

from servers.engine import Engine
from servers.identity import Capabilities
from servers.messages import Ask, Call, HttpReply, Reply, Target
from workloads.request import Request

ASKED = (
    "encode", "decode", "ready_call", "probe", "capabilities_of", "tokenizes", "capabilities", "hang_up_at",
)  # fmt: skip
"""What belongs to the dialect; all else is the engine's."""


class Spoken(Engine):
    """`engine` for starting, watching and reading its facts; `dialect` for requests and replies."""

    def __init__(self, name: str, engine: Engine, dialect: Engine, style: str) -> None:
        for attribute in dir(engine):
            if not attribute.startswith("__") and attribute not in ASKED:
                setattr(self, attribute, getattr(engine, attribute))
        self.name = name
        self.title = f"{engine.title} ({style})"
        self.signs = ()
        if engine.lora_path is not None and len(engine.lora_path) > 1:  # inside an object of its own body
            self.lora_path = dialect.lora_path
        self.speaks = style
        self.capabilities = dialect.capabilities
        self.tokenizes = dialect.tokenizes
        self._dialect = dialect
        self._made_of = (name, engine, dialect, style)

    def __reduce__(self) -> tuple[type[Spoken], tuple[str, Engine, Engine, str]]:
        # Decoders are other processes, and the settings that were copied hold functions that cannot be sent.
        return Spoken, self._made_of

    def ready(self, target: Target, timeout_s: float) -> Reply | None:  # noqa: ARG002
        return None

    def encode(self, request: Request, target: Target) -> Call:
        call = self._dialect.encode(request, target)
        return call if self.index_header is None else call.with_header(self.index_header, str(request.index))

    def decode(self, reply: HttpReply) -> Reply:
        return self._dialect.decode(reply)

    def ready_call(self, target: Target) -> Call:
        return self._dialect.ready_call(target)

    def probe(self, ask: Ask, target: Target) -> tuple[Target, tuple[str, ...]]:
        return self._dialect.probe(ask, target)

    def capabilities_of(self, target: Target) -> Capabilities:
        return self._dialect.capabilities_of(target)
