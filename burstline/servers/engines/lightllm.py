"""LightLLM's native API (1.2): facts read in its source, streams recorded from its own HTTP front end."""

import os
import re
from collections.abc import Sequence
from typing import Any

from burstline.errors import tables_beside
from burstline.servers.gauges import means_in
from burstline.servers.host.installation import PackagedEngine
from burstline.servers.identity import Capabilities, Identity, Sign
from burstline.servers.introspection import (
    MIB,
    first_model,
    json_at,
    logged,
    number,
    opposite,
    option_of,
    owned_by,
    value_of,
)
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Call, Event, Get, Kind, Target
from burstline.servers.openai import post
from burstline.servers.replies import Tally
from burstline.servers.settings import spellings
from burstline.workloads.request import Request

PYTHON_VARIABLE = "BURSTLINE_LIGHTLLM_PYTHON"
MOST_SLOTS = 1024
"""Each slot costs 4 bytes a token of context and of vocabulary on the GPU: 10,000 would take 10 GB."""
DEFAULT_SLOTS = 256
"""LightLLM's own `--running_max_req_size`."""

_ONLY_POINTS_AT_THE_CAUSE = re.compile(r"init func \w+ : (?!init ok)(.+)")
_GAVE_UP = re.compile(r"init func \w+ : (?!init ok)\S|auto_shm_cleanup\.py:\d+\] cleanup: ")
_KV_DTYPES = {"int8kv": "int8", "int4kv": "int4", "fp8kv_sph": "fp8", "fp8kv_spt": "fp8"}
_TABLES = tables_beside(__file__, "lightllm.toml")


class Lightllm(PackagedEngine):
    """Starts `lightllm.server.api_server`, speaks `/generate_stream` with token ids."""

    name = "lightllm"
    title = "LightLLM"
    variable = PYTHON_VARIABLE
    distributions = ("lightllm",)
    capabilities = Capabilities(
        per_event_tok="one-per-event",
        queue_depth=False,  # what waits for a slot waits in the HTTP process, uncounted
    )
    default_port: int | None = 8000
    image: Image | None = Image("ghcr.io/modeltc/lightllm:v1.2.0")
    signs: Sequence[Sign] = (
        Sign("/v1/models", owned_by("lightllm")),
        Sign("/metrics", rb"^(?:# TYPE )?lightllm_"),  # before 1.1 it listed no models
    )
    needs_weights = True
    settings = spellings(_TABLES["settings"])
    lora_path: Sequence[str] | None = None
    slots_flag = "--running_max_req_size"
    # A finished request makes 13 calls into a queue: of 200 requests the last were counted 0.6 s late.
    counters_settle_s = 1.0
    load_flags = frozenset({"--running_max_req_size", "--graph_max_batch_size"})
    gauge_names = _TABLES["gauge_names"]
    latencies = _TABLES["latencies"]
    means = means_in(_TABLES["means"])
    cause = re.compile(r"(?:(?<![\w.])[\w.]*(?:Error|Exception)\b: .*|check max len infer fail.*)")
    how_to_get = _TABLES["how_to_get"].format(variable=PYTHON_VARIABLE)

    def launch(self, options: LaunchOptions) -> Launch:
        found = self.installation(options)
        slots, notes = _slots(options)
        argv = (
            *(found.python if found else "python", "-m", "lightllm.server.api_server"),
            *("--model_dir", options.model, "--model_name", options.served_name),
            *("--host", options.host, "--port", str(options.port)),
            *(() if option_of(options.extra_args, "--tp") else ("--tp", "1")),
            *slots,
            *options.extra_args,
        )
        return Launch(
            argv,
            {} if "LIGHTLLM_LOG_LEVEL" in os.environ else {"LIGHTLLM_LOG_LEVEL": "info"},
            ready_timeout_s=1200.0,
            # A stop takes 12 s with a stream in flight, and up to 75 s where one will not end.
            stop_grace_s=75.0,
            notes=notes,
            scripts=found.scripts if found else None,
            version=found.versions.get("lightllm") if found else None,
            leftovers=("/dev/shm/{id}_*", "/tmp/_{id}_*"),  # noqa: S108
            leftover_id=r"ipc://[^\s:]*/_([0-9a-f]{4,16}_\d+)_",
        )

    def encode(self, request: Request, target: Target) -> Call:
        sampling = request.sampling
        parameters: dict[str, object] = {
            "max_new_tokens": request.n_output_tok,
            "ignore_eos": request.ignore_eos,
            # The model's generation_config would decide else.
            "do_sample": sampling.temperature > 0,
            "repetition_penalty": 1.0,
        }
        if sampling.temperature > 0:
            chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
            parameters |= chosen | {"top_k": -1}
        prompt = request.prompt_text if request.prompt_ids is None else list(request.prompt_ids)
        return post(target, "/generate_stream", {"inputs": prompt, "parameters": parameters})

    def take(self, tally: Tally, answer: Any, end: int) -> Event:
        """One event, one token."""
        token = answer["token"]
        n_tok = tally.grow(token["count_output_tokens"], token["prompt_tokens"])
        if answer["finished"]:
            tally.finish_reason = answer["finish_reason"]
            tally.terminated = True
        return Event(end, Kind.ANSWER, n_tok)

    def generated(self, answers: Sequence[Any]) -> Sequence[int] | str:
        return [answer["token"]["id"] for answer in answers]

    def identify(self, get: Get, log: str) -> Identity:
        models, info = json_at(get, "/v1/models"), json_at(get, "/get_server_info")
        model = first_model(models)
        kv_tok = number(logged(log, r"set shm_max_total_token_num value to (\d+)"))
        kv_tok = kv_tok or number(logged(log, r"(?<!\d)(\d+) is the profiled max_total_token_num"))
        kv_tok = kv_tok or info.get("max_total_token_num")
        token_mib = logged(log, r"(?<![\d.])([\d.]+) MB is the size of one token kv cache")
        ranks, kv, off = info.get("tp"), info.get("llm_kv_type"), info.get("disable_cudagraph")
        return Identity(
            engine=self.name,
            **{name: info.get(own) for name, own in _TABLES["identity"].items()},
            model=info.get("model_dir")
            or model.get("id")
            or json_at(get, "/get_model_name").get("model_name"),
            max_model_len=model.get("max_model_len"),
            # "None", the flag's own default, is a text: the cache is kept in the data type.
            kv_cache_dtype=info.get("data_type") if kv in (None, "None", "none") else _KV_DTYPES.get(kv, kv),
            chunked_prefill=opposite(info.get("disable_chunked_prefill")),
            # Beyond these batches it decodes eagerly.
            cuda_graphs=off if off is None else "off" if off else f"up to {info.get('graph_max_batch_size')}",
            attention=next(iter(info.get("llm_decode_att_backend") or ()), None),
            kv_tok=kv_tok,
            # Each rank logs the bytes of its own share of a token.
            kv_bytes=round(kv_tok * float(token_mib) * MIB * (ranks or 1)) if kv_tok and token_mib else None,
            prefix_cache=opposite(info.get("disable_dynamic_prompt_cache")),
            tensor_parallel_size=ranks,
            raw={"models": models, "server_info": info},
        )

    def doomed(self, log: str) -> str | None:
        """A start that failed leaves the launcher waiting for a child for ever, without its own end.

        A part that failed is logged as `init func NAME : Traceback`; a launcher that failed itself unlinks
        its shared memory on its way out.
        """
        return self.root_cause(log) or "the launcher gave up" if _GAVE_UP.search(log) else None

    def root_cause(self, log: str) -> str | None:
        """The first exception, else the message of a sub-process to the launcher before both ended."""
        message = _ONLY_POINTS_AT_THE_CAUSE.search(log)
        return super().root_cause(log) or (message[1] if message else None)


def _slots(options: LaunchOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """As many slots as requests at once, unless the user sets them, and CUDA graphs for all of them.

    What exceeds the slots is polled for with growing pauses, unseen.
    """
    asked = number(value_of(options.extra_args, "--running_max_req_size"))
    wanted = min(options.n_concurrent or 0, MOST_SLOTS) if asked is None else asked
    if wanted <= DEFAULT_SLOTS:
        return (), ()
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if asked is None:
        flags = ("--running_max_req_size", str(wanted))
        notes = (_TABLES["notes"]["slots"].format(wanted=wanted, default=DEFAULT_SLOTS),)
    if not option_of(options.extra_args, "--graph_max_batch_size", "--disable_cudagraph"):
        flags += ("--graph_max_batch_size", str(wanted))
        notes += (_TABLES["notes"]["graphs"].format(wanted=wanted, default=DEFAULT_SLOTS),)
    return flags, notes
