"""TensorRT-LLM's trtllm-serve (1.2): OpenAI's completions, and not one field more than its schema has."""

import re
from collections.abc import Sequence

from burstline.errors import tables_beside
from burstline.servers.gauges import means_in
from burstline.servers.host.installation import ProgramEngine
from burstline.servers.identity import Admission, Identity, Sign
from burstline.servers.introspection import first_model, json_at, owned_by
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Get
from burstline.servers.openai import COUNT_EVERY_EVENT
from burstline.servers.settings import spellings

SERVER_VARIABLE = "BURSTLINE_TRTLLM_SERVE"
SERVER = "trtllm-serve"
_TABLES = tables_beside(__file__, "trtllm.toml")


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
    settings = spellings(_TABLES["settings"])
    lora_path: Sequence[str] | None = None
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("tensorrt_llm")),)
    gauge_names = _TABLES["gauge_names"]
    latencies = _TABLES["latencies"]
    means = means_in(_TABLES["means"])
    cause = re.compile(_TABLES["cause"])
    how_to_get = _TABLES["how_to_get"].format(variable=SERVER_VARIABLE, program=SERVER)

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
