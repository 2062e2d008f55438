"""TensorRT-LLM's trtllm-serve (1.2): OpenAI's completions, and not one field more than its schema has."""

import re
from collections.abc import Mapping, Sequence

from burstline.servers.gauges import Mean, drafts, mean_of
from burstline.servers.host.installation import ProgramEngine
from burstline.servers.identity import Admission, Identity, Sign
from burstline.servers.introspection import first_model, json_at, owned_by
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Get
from burstline.servers.openai import COUNT_EVERY_EVENT
from burstline.servers.settings import Spelling, valued

SERVER_VARIABLE = "BURSTLINE_TRTLLM_SERVE"
SERVER = "trtllm-serve"


class TrtLlm(ProgramEngine):
    """Starts `trtllm-serve`, speaks `/v1/completions` with token ids."""

    name = "trtllm"
    title = "TensorRT-LLM"
    variable = SERVER_VARIABLE
    program = SERVER
    admission = Admission(chunked_prefill=False, ahead=True)  # PyExecutor's overlap loop, its default
    speaks = "completions"
    extra_fields = COUNT_EVERY_EVENT  # honoured for completions since 1.2; chat ignores it
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
    gauge_names: Mapping[str, Sequence[str]] = {
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
        "kv_used_fraction": ("trtllm_kv_cache_utilization",),
        "prompt_tokens": ("trtllm_prompt_tokens_total",),
        "generation_tokens": ("trtllm_generation_tokens_total",),
    }
    latencies: Mapping[str, str] = {
        "ttft": "trtllm_time_to_first_token_seconds",
        "e2e": "trtllm_e2e_request_latency_seconds",
    }
    means: Mapping[str, Mean] = {
        "queue": mean_of("trtllm_request_queue_time_seconds"),
        # It counts no drafts: only the share of their tokens is known.
        "acceptance": drafts("trtllm_spec_decode_num")["acceptance"],
    }
    cause = re.compile(
        r"(?:(?<![\w.])[\w.]*(?:Error|Exception)\b: .+|Failed to bind socket to .+|No GPU devices found.*)"
    )
    how_to_get = (
        f"pip install 'tensorrt-llm==1.2.1' on a machine with an NVIDIA GPU and have {SERVER} on the PATH or "
        f"named by {SERVER_VARIABLE}, or use --container."
    )

    def launch(self, options: LaunchOptions) -> Launch:
        server = self.installation(options) or SERVER
        where = ("--host", options.host, "--port", str(options.port))
        note = "its gauges need return_perf_metrics: true in a file given by -- --config FILE"
        argv = (server, options.model, *where, *options.extra_args)
        return Launch(argv, ready_timeout_s=1800.0, stop_grace_s=60.0, notes=(note,))

    def identify(self, get: Get, log: str) -> Identity:
        del log
        version, models = json_at(get, "/version"), json_at(get, "/v1/models")
        return Identity(
            engine=self.name,
            version=version.get("version"),
            model=first_model(models).get("id"),
            raw={"version": version, "models": models},
        )
