"""vLLM (V1 engine, 0.30 and later): facts read in and observed on 0.32."""

import os
import re
import sys
from array import array
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from servers.engine import (
    Call,
    Capabilities,
    EngineError,
    Gauges,
    Get,
    HttpReply,
    Identity,
    Launch,
    LaunchOptions,
    Reply,
    Target,
)
from servers.host.installation import Installation, find_installation
from servers.openai import decode_completion, encode_completion
from workloads.request import Request

PYTHON_VARIABLE = "BURSTLINE_VLLM_PYTHON"
GIB = 2**30

_NOT_INSTALLED = (
    "vLLM is not installed for {python}. On a GPU machine: pip install 'burstline[vllm]'. "
    "On a CPU: scripts/install-vllm-cpu.sh DIR, then set " + PYTHON_VARIABLE + "=DIR/bin/python "
    "(or name any other environment's interpreter there)."
)

# Without it, a usage block would come once, at the end, and an event's tokens could not be counted: on a
# loaded machine vLLM packs several into one. Token ids would count as well, but return the prompt too, in
# the very event that TTFT waits for.
_COUNT_EVERY_EVENT = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

_GAUGES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_used_fraction": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
}

_LOG_PREFIX = re.compile(r"^\([\w -]+ pid=\d+\) (?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_CAUSE = re.compile(r"^(?:[\w.]*(?:Error|Exception)|\S+: error): \S")
_ONLY_POINTS_AT_THE_CAUSE = ("root cause", "initialization failed")


class Vllm:
    """Starts `vllm serve`, speaks `/v1/completions` with token ids."""

    name = "vllm"
    title = "vLLM"
    capabilities = Capabilities(
        token_id_prompts=True,
        forced_output_length=True,
        prefix_cache_control=True,
        per_event_tok="usage",
        queue_depth=True,
        graceful_overload=False,
    )
    probe_path = "/health"
    metrics_path: str | None = "/metrics"

    def launch(self, options: LaunchOptions) -> Launch:
        python = options.python or os.environ.get(PYTHON_VARIABLE) or sys.executable
        found = find_installation(python, "vllm", "vllm", "vllm-cpu")
        if found is None:
            raise EngineError(_NOT_INSTALLED.format(python=python))
        chosen = any(argument.startswith("--load-format") for argument in options.extra_args)
        dummy = not chosen and _lacks_weights(Path(options.model))
        argv = (
            *_server_command(found, options.model),
            *(
                "--served-model-name",
                options.served_name,
                "--host",
                options.host,
                "--port",
                str(options.port),
            ),
            # The model's own generation_config must not change what a request asks for.
            *("--generation-config", "vllm", "--enable-prompt-tokens-details"),
            *(("--load-format", "dummy") if dummy else ()),
            *options.extra_args,
        )
        note = f"{options.model} holds no weights: vLLM invents them (--load-format dummy)"
        return Launch(argv, _environment(found, options.model), notes=(note,) if dummy else ())

    def ready_call(self, target: Target) -> Call:
        return self.encode(Request(0, array("I", [10, 11, 12]), None, 3, 1), target)

    def encode(self, request: Request, target: Target) -> Call:
        return encode_completion(request, target, extra=_COUNT_EVERY_EVENT)

    def decode(self, reply: HttpReply) -> Reply:
        return decode_completion(reply)

    def identify(self, get: Get, log: str) -> Identity:
        version, models = _json(get, "/version"), _json(get, "/v1/models")
        model: dict[str, Any] = next(iter(models.get("data", ())), {})
        metrics = get("/metrics")
        cache = _cache_config(metrics.body.decode() if metrics.status == 200 else "")
        kv_tok = _number(cache.get("kv_cache_size_tokens"))
        block_tok, blocks = _number(cache.get("block_size")), _number(cache.get("num_gpu_blocks"))
        if kv_tok is None and block_tok and blocks:
            kv_tok = block_tok * blocks
        dtype = _logged(log, r"dtype=torch\.(\w+)")
        kv_dtype = cache.get("cache_dtype")
        return Identity(
            engine=self.name,
            version=version.get("version"),
            model=model.get("root") or model.get("id"),
            max_model_len=model.get("max_model_len"),
            dtype=dtype,
            kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
            kv_tok=kv_tok,
            kv_block_tok=block_tok,
            kv_bytes=_number(cache.get("kv_cache_memory_bytes"))
            or _logged_gib(log, r"Available KV cache memory: ([\d.]+) GiB"),
            weight_bytes=_logged_gib(log, r"Model loading took ([\d.]+) GiB"),
            max_num_seqs=_number(_logged(log, r"max_num_seqs['\"]?[=:] ?(\d+)")),
            max_batched_tok=_number(_logged(log, r"max_num_batched_tokens['\"]?[=:] ?(\d+)")),
            prefix_caching={"True": True, "False": False}.get(cache.get("enable_prefix_caching", "")),
            tensor_parallel=_number(_logged(log, r"tensor_parallel_size=(\d+)")),
            raw={"version": version, "models": models, "cache_config": cache},
        )

    def gauges(self, metrics: str) -> Gauges:
        """Sums over data-parallel engines; the mean of them for `kv_used_fraction`."""
        wanted = tuple(name + "{" for names in _GAUGES.values() for name in names)
        seen: dict[str, list[float]] = {}
        for sample in _samples(metrics, wanted):
            seen.setdefault(sample.name, []).append(sample.value)
        totals: dict[str, float] = {}
        for gauge, names in _GAUGES.items():
            values = next((seen[name] for name in names if name in seen), None)
            if values:
                totals[gauge] = sum(values) / (len(values) if gauge == "kv_used_fraction" else 1)
        return Gauges(**totals)

    def root_cause(self, log: str) -> str | None:
        """The first exception: those that follow are other processes of the engine saying that it failed."""
        lines = [_LOG_PREFIX.sub("", line) for line in log.splitlines()]
        for line, following in zip_longest(lines, lines[1:], fillvalue=""):
            if _CAUSE.match(line) and not any(words in line for words in _ONLY_POINTS_AT_THE_CAUSE):
                return f"{line}: {following.strip()}" if "validation error" in line else line
        return None


def _server_command(found: Installation, model: str) -> tuple[str, ...]:
    """`vllm serve`, or the module behind it where the command would die for lack of its own metadata.

    The command asks for the version of a distribution named "vllm", which CPU builds may not be.
    """
    command = found.scripts / "vllm"
    if "vllm" in found.versions and command.exists():
        return found.python, str(command), "serve", model
    return found.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model


def _environment(found: Installation, model: str) -> dict[str, str]:
    """What the server's environment needs besides ours; what the user has set stays."""
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if "vllm-cpu" in found.versions or "cpu" in found.versions.get("vllm", ""):
        # A CPU build would else take its KV cache out of nearly all of the machine's memory.
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "2"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _lacks_weights(model: Path) -> bool:
    if not (model / "config.json").is_file():
        return False
    return not any(any(model.glob(f"*.{kind}")) for kind in ("safetensors", "bin", "pt", "pth", "gguf"))


def _json(get: Get, path: str) -> dict[str, Any]:
    """The JSON object at a path; empty where the server has none there."""
    reply = get(path)
    if reply.status != 200:
        return {}
    try:
        answer = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _cache_config(metrics: str) -> Mapping[str, str]:
    return next((sample.labels for sample in _samples(metrics, ("vllm:cache_config_info{",))), {})


def _samples(metrics: str, starts: tuple[str, ...]) -> list[Any]:
    """The samples whose lines start so. Parsing all of vLLM's 460 costs 5 ms, this costs a hundredth."""
    lines = "\n".join(line for line in metrics.splitlines() if line.startswith(starts))
    return [sample for family in text_string_to_metric_families(lines + "\n") for sample in family.samples]


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _logged(log: str, pattern: str) -> str | None:
    found = re.search(pattern, log)
    return found[1] if found else None


def _logged_gib(log: str, pattern: str) -> int | None:
    """Bytes out of a line that every worker logs for its own share, summed; None where none does."""
    shares = re.findall(pattern, log)
    return round(sum(map(float, shares)) * GIB) if shares else None
