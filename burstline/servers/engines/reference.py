"""The adapter of the embedded engine: its own launch, otherwise vLLM's dialect."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from burstline.compute_threads import KEEPS_MEMORY
from burstline.errors import tables_beside
from burstline.servers.engine import Engine, Profiler
from burstline.servers.engines.vllm import Vllm
from burstline.servers.identity import Identity, Sign
from burstline.servers.introspection import owned_by
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Call, EngineError, Get, Target
from burstline.servers.settings import spellings
from burstline.workloads.request import Request, RequestKind, WorkloadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_STATED = ("dtype", "weight_bytes", "max_num_seqs", "max_num_batched_tokens")
"""Fields of `Identity` that its `/server_info` has by the same names."""


class Reference(Vllm):
    """Starts `python -m burstline.servers.reference`, which needs no installation, no folder and no GPU."""

    name = "reference"
    title = "Burstline reference engine"
    default_port: int | None = None
    names_early = False
    n_empty_blocks = 0
    image: Image | None = None
    brings_model = True
    self_describing = True
    settings = spellings(tables_beside(__file__, "reference.toml")["settings"])
    profiler: Profiler | None = Profiler(lambda folder, _: {"output_dir": str(folder)}, "again")
    lora_path: Sequence[str] | None = None
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("burstline")),)
    start_flags = frozenset({"--port", "--step-log"})
    cause = re.compile(r"^(?:error:|reference: error:|[\w.]*(?:Error|Exception|Killed)\b).*", re.MULTILINE)
    last_cause = True
    root_cause = Engine.root_cause  # not vLLM's
    how_to_get = "it is part of Burstline"

    def installed(self, python: str | None) -> str | None:  # noqa: ARG002
        return ""

    def tokenizer(self, identity: Identity) -> "Tokenizer | None":
        # Drivers import this module, without tokenizers.
        from burstline.servers.reference.tokenizer import built_in

        return None if identity.vocab_size is None else built_in(identity.vocab_size)

    def launch(self, options: LaunchOptions) -> Launch:
        step_log = options.run_dir / "steps.jsonl"
        where = ("--host", options.host, "--port", str(options.port), "--step-log", str(step_log))
        name = ("--served-model-name", options.served_name) if options.served_name else ()
        model = ("--model", options.model) if options.model not in ("", self.name) else ()
        argv = (options.python or sys.executable, "-P", "-m", "burstline.servers.reference")
        argv += (*where, *name, *model, *options.extra_args)
        return Launch(argv, KEEPS_MEMORY, ready_timeout_s=120.0, stop_grace_s=5.0, step_log=step_log)

    def encode(self, request: Request, target: Target) -> Call:
        if request.kind is not RequestKind.GENERATE:
            raise WorkloadError(f"the {self.title} only generates: --request-kind needs another engine")
        return super().encode(request, target)

    def identify(self, get: Get, log: str) -> Identity:
        reply = get("/server_info")
        if reply.status != 200:
            raise EngineError(f"/server_info answered {reply.status}: this is not the reference engine")
        info, reported = orjson.loads(reply.body), super().identify(get, log)
        return replace(
            reported,
            **{name: info[name] for name in _STATED},
            vocab_size=info["config"]["vocab_size"],
            tensor_parallel_size=1,
            raw={**reported.raw, **info},
        )

    def model_config(self, identity: Identity) -> Mapping[str, object] | None:
        config = identity.raw.get("config")
        if not isinstance(config, dict):
            return None
        return {**config, "model_type": "llama", "torch_dtype": identity.dtype}

    def cores_of(self, identity: Identity) -> int | None:
        threads = identity.raw.get("threads")
        return threads if isinstance(threads, int) else 1
