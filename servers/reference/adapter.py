"""The embedded engine as an engine like any other."""

import os
import re
import sys

import orjson

from servers.engine import (
    Call,
    Capabilities,
    EngineError,
    Gauges,
    Get,
    HttpReply,
    Identity,
    Image,
    Launch,
    LaunchOptions,
    Reply,
    Target,
)
from servers.openai import decode_completion, encode_completion
from servers.vllm import Vllm
from workloads.request import Request

_COUNT_EVERY_EVENT = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_CAUSE = re.compile(r"^(?:error:|reference: error:|[\w.]*(?:Error|Exception|Killed)\b).*", re.MULTILINE)


class Reference:
    """Starts `python -m servers.reference`, which needs no installation, no folder and no GPU."""

    name = "reference"
    title = "Burstline reference engine"
    capabilities = Capabilities(
        token_id_prompts=True,
        forced_output_length=True,
        prefix_cache_control=True,  # there is none to interfere
        per_event_tok="usage",
        queue_depth=True,
        graceful_overload=False,
    )
    probe_path: str | None = "/health"
    metrics_path: str | None = "/metrics"
    default_port: int | None = None
    image: Image | None = None
    how_to_get = "it is part of Burstline"

    def installed(self, python: str | None) -> str | None:  # noqa: ARG002
        return ""

    def launch(self, options: LaunchOptions) -> Launch:
        step_log = options.run_dir / "steps.jsonl"
        where = ("--host", options.host, "--port", str(options.port), "--step-log", str(step_log))
        name = ("--served-model-name", options.served_name) if options.served_name else ()
        model = ("--model", options.model) if options.model not in ("", self.name) else ()
        argv = (options.python or sys.executable, "-m", "servers.reference", *where, *name, *model)
        return Launch(
            (*argv, *options.extra_args),
            ready_timeout_s=120.0,
            stop_grace_s=5.0,
            cpu_affinity=_cores(options.extra_args),
            step_log=step_log,
        )

    def ready_call(self, target: Target) -> Call:
        return self.encode(Request(0, (1, 2, 3), None, 3, 1), target)

    def encode(self, request: Request, target: Target) -> Call:
        return encode_completion(request, target, extra=_COUNT_EVERY_EVENT)

    def decode(self, reply: HttpReply) -> Reply:
        return decode_completion(reply)

    def identify(self, get: Get, log: str) -> Identity:
        del log
        reply = get("/server_info")
        if reply.status != 200:
            raise EngineError(f"/server_info answered {reply.status}: this is not the reference engine")
        info = orjson.loads(reply.body)
        return Identity(
            engine=self.name,
            version=info["version"],
            model=info["model"],
            max_model_len=info["max_model_len"],
            dtype=info["dtype"],
            kv_dtype=info["dtype"],
            kv_tok=info["kv_cache_size_tokens"],
            kv_block_tok=info["block_size"],
            kv_bytes=info["kv_cache_memory_bytes"],
            weight_bytes=info["weight_bytes"],
            max_num_seqs=info["max_num_seqs"],
            max_batched_tok=info["max_num_batched_tokens"],
            vocab_size=info["config"]["vocab_size"],
            prefix_caching=False,
            tensor_parallel=1,
            # What to ask for is the name it is served under, which is not the folder it came from.
            raw=info | {"models": orjson.loads(get("/v1/models").body)},
        )

    def gauges(self, metrics: str) -> Gauges:
        return Vllm().gauges(metrics)  # the same names for the same things

    def root_cause(self, log: str) -> str | None:
        causes = _CAUSE.findall(log)
        return causes[-1] if causes else None


def _cores(extra_args: tuple[str, ...]) -> tuple[int, ...] | None:
    """The last core, as the server itself would take; None where the user chose or there is but one."""
    if any(argument.startswith("--threads") for argument in extra_args) or sys.platform != "linux":
        return None
    cores = sorted(os.sched_getaffinity(0))
    return (cores[-1],) if len(cores) > 1 else None
