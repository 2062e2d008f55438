"""TensorRT-LLM's trtllm-serve (1.2): OpenAI's completions, and not one field more than its schema has."""

import os
import re
import shutil
from array import array
from collections.abc import Mapping, Sequence

from burstline.servers.engine import Engine
from burstline.servers.identity import Admission, Capabilities, Gauges, Identity, Sign
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Call, EngineError, Get, Target
from burstline.servers.protocol.introspection import (
    drafts,
    first_model,
    gauges_in,
    json_at,
    mean_of,
    owned_by,
)
from burstline.servers.protocol.openai import encode_completion
from burstline.servers.settings import Spelling, valued
from burstline.workloads.request import Request

SERVER_VARIABLE = "BURSTLINE_TRTLLM_SERVE"
SERVER = "trtllm-serve"

_GAUGES = {
    "running": ("trtllm_num_requests_running",),
    "waiting": ("trtllm_num_requests_waiting",),
    "kv_used_fraction": ("trtllm_kv_cache_utilization",),
    "prompt_tokens": ("trtllm_prompt_tokens_total",),
    "generation_tokens": ("trtllm_generation_tokens_total",),
}
# Honoured for completions since 1.2; chat ignores it.
_COUNT_EVERY_EVENT = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

_LATENCIES = {
    "ttft": "trtllm_time_to_first_token_seconds",
    "e2e": "trtllm_e2e_request_latency_seconds",
}
_MEANS = {
    "queue": mean_of("trtllm_request_queue_time_seconds"),
    # It counts no drafts, so that only the share of their tokens is known.
    "acceptance": drafts("trtllm_spec_decode_num")["acceptance"],
}
_CAUSE = re.compile(r"(?:[\w.]*(?:Error|Exception)\b: .+|Failed to bind socket to .+|No GPU devices found.*)")


class TrtLlm(Engine):
    """Starts `trtllm-serve`, speaks `/v1/completions` with token ids."""

    name = "trtllm"
    title = "TensorRT-LLM"
    admission = Admission(chunked_prefill=False, ahead=True)  # PyExecutor's overlap loop, its default
    capabilities = Capabilities(
        token_id_prompts=True,
        forced_output_length=True,
        prefix_cache_control=True,
        per_event_tok="usage",
        queue_depth=True,
        graceful_overload=False,
    )
    speaks = "completions"
    probe_path: str | None = "/health"
    metrics_path: str | None = "/prometheus/metrics"
    default_port: int | None = 8000
    image: Image | None = Image(
        "nvcr.io/nvidia/tensorrt-llm/release:1.2.1",
        flags=("--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
    )
    settings: Mapping[str, Spelling] = {
        "max_num_seqs": valued("--max_batch_size"),
        "max_num_batched_tokens": valued("--max_num_tokens"),
        "max_model_len": valued("--max_seq_len"),
        "tensor_parallel_size": valued("--tp_size"),
        "pipeline_parallel_size": valued("--pp_size"),
        "gpu_memory_utilization": valued("--kv_cache_free_gpu_memory_fraction"),
    }
    lora_path: Sequence[str] | None = None
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("tensorrt_llm")),)
    how_to_get = (
        f"pip install 'tensorrt-llm==1.2.1' on a machine with an NVIDIA GPU and have {SERVER} on the PATH or "
        f"named by {SERVER_VARIABLE}, or use --container."
    )

    def installed(self, python: str | None) -> str | None:  # noqa: ARG002
        return None if _server() is None else ""

    def launch(self, options: LaunchOptions) -> Launch:
        server = SERVER if options.image else _server()
        if server is None:
            raise EngineError(f"TensorRT-LLM is not installed: no {SERVER} is found. {self.how_to_get}")
        where = ("--host", options.host, "--port", str(options.port))
        note = "its gauges need return_perf_metrics: true in a file given by -- --config FILE"
        argv = (server, options.model, *where, *options.extra_args)
        return Launch(argv, ready_timeout_s=1800.0, stop_grace_s=60.0, notes=(note,))

    def ready_call(self, target: Target) -> Call:
        return self.encode(Request(0, array("I", [10, 11, 12]), None, 3, 1), target)

    def encode(self, request: Request, target: Target) -> Call:
        return encode_completion(request, target, extra=_COUNT_EVERY_EVENT)

    def identify(self, get: Get, log: str) -> Identity:
        del log
        version, models = json_at(get, "/version"), json_at(get, "/v1/models")
        return Identity(
            engine=self.name,
            version=version.get("version"),
            model=first_model(models).get("id"),
            raw={"version": version, "models": models},
        )

    def gauges(self, metrics: str) -> Gauges:
        return gauges_in(metrics, _GAUGES, _LATENCIES, _MEANS)

    def root_cause(self, log: str) -> str | None:
        causes = _CAUSE.findall(log)
        return causes[0] if causes else None


def _server() -> str | None:
    return os.environ.get(SERVER_VARIABLE) or shutil.which(SERVER)
