"""SGLang's native API: facts read in the source of 0.5.23 and seen at a server on a CPU."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from burstline.errors import tables_beside
from burstline.servers.engine import Profiler
from burstline.servers.gauges import Gauges, means_in, samples_at
from burstline.servers.host.installation import Installation, PackagedEngine
from burstline.servers.host.kernel import allowed_cores, threads_for_server
from burstline.servers.identity import Admission, Identity, Sign
from burstline.servers.introspection import GIB, first_model, json_at, logged, opposite, option_of, owned_by
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Call, Event, Get, Kind, ServerTimes, Target
from burstline.servers.openai import post
from burstline.servers.replies import Tally
from burstline.servers.settings import spellings
from burstline.workloads.request import Request

PYTHON_VARIABLE = "BURSTLINE_SGLANG_PYTHON"

_CPU_FLAGS = (
    (("--device",), "cpu"),
    (("--attention-backend",), "torch_native"),
    (("--disable-overlap-schedule",), None),
)
_NO_CUDA = Path("lib") / "no-cuda"
"""Where scripts/install-sglang-cpu.sh puts its libcuda.so.1, below the environment."""
_CPU_KV_BYTES = 2 * GIB

_TABLES = tables_beside(__file__, "sglang.toml")


class Sglang(PackagedEngine):
    """Starts `sglang.launch_server`, speaks `/generate` with token ids."""

    name = "sglang"
    title = "SGLang"
    variable = PYTHON_VARIABLE
    distributions = ("sglang",)
    admission = Admission(mixed_steps=False, ahead=True)
    # /health says 503 until the server's own warm-up is over, whose 8 tokens its counters would count.
    default_port: int | None = 30000
    image: Image | None = Image("lmsysorg/sglang:v0.5.23", shm="32g")
    stages = _TABLES["stages"]
    lora_path: Sequence[str] | None = ("lora_path",)
    settings = spellings(_TABLES["settings"])
    profiler: Profiler | None = Profiler(
        lambda folder, most_steps: _TABLES["profiler"] | {"output_dir": str(folder), "num_steps": most_steps},
        "in a version that has /start_profile",
    )
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("sglang")),)
    gauge_names = _TABLES["gauge_names"]
    latencies = _TABLES["latencies"]
    means = means_in(_TABLES["means"])
    cause = re.compile(_TABLES["cause"], re.MULTILINE)
    how_to_get = _TABLES["how_to_get"].format(variable=PYTHON_VARIABLE)

    def launch(self, options: LaunchOptions) -> Launch:
        found = self.installation(options)
        extra = options.extra_args
        dummy = not option_of(extra, "--load-format") and self.lacks_weights(Path(options.model))
        cpu = found is not None and (found.scripts.parent / _NO_CUDA).is_dir()
        argv = (
            *_server_command(found),
            *("--model-path", options.model, "--served-model-name", options.served_name),
            *("--host", options.host, "--port", str(options.port)),
            # Metrics are off by default. Events hold all of the text so far by default: its parsing grows
            # with the square of the length, on both sides.
            *("--enable-metrics", "--incremental-streaming-output"),
            *_unless(extra, ("--tp-size", "--tensor-parallel-size"), "1"),
            *_unless(extra, ("--random-seed",), "0"),
            *(_cpu_flags(extra, options.model) if cpu else ()),
            *(("--load-format", "dummy") if dummy else ()),
            *extra,
        )
        environment = {
            # By default each question about its health generates a token and takes a second.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            **(_cpu_environment(found) if found is not None and cpu else {}),
        }
        note = f"{options.model} holds no weights: SGLang generates random ones (--load-format dummy)"
        # A stop drains what runs, looking every 5 s, then grants the schedulers 15 s.
        return Launch(
            argv,
            environment,
            ready_timeout_s=1200.0,
            stop_grace_s=60.0,
            n_cores=threads_for_server() if "SGLANG_CPU_OMP_THREADS_BIND" in environment else None,
            scripts=found.scripts if found else None,
            notes=(note,) if dummy else (),
        )

    def encode(self, request: Request, target: Target) -> Call:
        """Unknown sampling parameters are refused: only those that count are sent."""
        sampling = request.sampling
        parameters: dict[str, object] = {
            "max_new_tokens": request.n_output_tok,
            "ignore_eos": request.ignore_eos,
            "temperature": sampling.temperature,
        }
        if sampling.temperature > 0:
            parameters |= {"top_p": sampling.top_p, "sampling_seed": sampling.seed}
        ids = request.prompt_ids
        prompt = {"text": request.prompt_text} if ids is None else {"input_ids": list(ids)}
        return post(target, "/generate", prompt | {"sampling_params": parameters, "stream": True})

    def take(self, tally: Tally, answer: Any, end: int) -> Event:
        """Counts are totals; `output_ids` are all so far or, with the incremental flag, the new ones."""
        meta = answer["meta_info"]
        total = meta["completion_tokens"]
        n_tok = tally.grow(total, meta["prompt_tokens"])
        tally.n_cached_tok = meta.get("cached_tokens")
        ids = answer.get("output_ids")
        if ids is not None:
            tally.n_output_ids = len(ids) if len(ids) == total else (tally.n_output_ids or 0) + len(ids)
        finish = meta.get("finish_reason")
        if finish:
            tally.finish_reason = finish["type"]
            tally.terminated = True
            if finish["type"] == "abort":
                tally.error = finish.get("message")
            # The server's clock for the whole request (observability/req_time_stats.py).
            began, prefilled = meta.get("forward_entry_time"), meta.get("prefill_finished_time")
            tally.times = ServerTimes(
                queue_s=meta.get("queue_time"),
                prefill_s=max(0.0, prefilled - began) if began and prefilled else None,
                first_token_s=meta.get("first_token_latency"),
            )
        return Event(end, Kind.ANSWER if n_tok else Kind.FINISH, n_tok)

    def generated(self, answers: Sequence[Any]) -> Sequence[int] | str:
        ids: list[int] = []
        for answer in answers:  # all ids so far, or the new ones
            new = answer["output_ids"]
            ids[answer["meta_info"]["completion_tokens"] - len(new) :] = new
        return ids

    def identify(self, get: Get, log: str) -> Identity:
        """What it serves with. It says "auto" where it chose a data type; then its log says which.

        Its step limit is the size of a chunk of prefill; only without chunks is it that of a whole prefill.
        """
        info, model = json_at(get, "/server_info"), json_at(get, "/model_info")
        served = first_model(json_at(get, "/v1/models"))
        measured = {s.name: s.value for s in samples_at(get, _MEMORY)}
        states = info.get("internal_states") or [{}]
        kv_tok = info.get("max_total_num_tokens") or measured.get("sglang:max_total_num_tokens")
        kv_dtype = logged(log, r"KV Cache is allocated\. dtype: torch\.(\w+)")
        asked_dtype, asked_kv_dtype = (
            None if info.get(name) == "auto" else info.get(name) for name in ("dtype", "kv_cache_dtype")
        )
        memory = states[0].get("memory_usage") or {}
        chunk = info.get("chunked_prefill_size") or 0
        return Identity(
            engine=self.name,
            **{name: info.get(own) for name, own in _TABLES["identity"].items()},
            model=model.get("model_path") or info.get("model_path"),
            max_model_len=served.get("max_model_len") or info.get("context_length"),
            # The cache is of the model's type unless another was asked for.
            dtype=asked_dtype or (kv_dtype if not asked_kv_dtype else None),
            kv_cache_dtype=asked_kv_dtype or kv_dtype or asked_dtype,
            kv_tok=int(kv_tok) if kv_tok else None,
            kv_bytes=_from_gib(measured.get("sglang:kv_cache_memory_usage_gb") or memory.get("kvcache")),
            weight_bytes=_from_gib(measured.get("sglang:weight_memory_usage_gb") or memory.get("weight")),
            max_num_seqs=states[0].get("effective_max_running_requests_per_dp")
            or info.get("max_running_requests"),
            max_num_batched_tokens=chunk if chunk > 0 else info.get("max_prefill_tokens"),
            chunked_prefill=chunk > 0 if info else None,
            cuda_graphs=_graphs((info.get("cuda_graph_config") or {}).get("decode") or {}),
            expert_parallel=info["ep_size"] > 1 if info.get("ep_size") else None,
            prefix_cache=opposite(info.get("disable_radix_cache")),
            raw={"server_info": info, "model_info": model},
        )

    def admission_of(self, identity: Identity | None) -> Admission:
        """Scheduler.get_next_batch_to_run and event_loop_overlap, by the flags that /server_info tells."""
        info: Any = (identity.raw if identity else {}).get("server_info") or {}
        return replace(
            self.admission,
            mixed_steps=bool(info.get("enable_mixed_chunk")),
            ahead=not info.get("disable_overlap_schedule"),
        )

    def gauges(self, metrics: str) -> Gauges:
        # With priority scheduling a gauge is exported once as the total, and once more for each priority.
        totals = [line for line in metrics.splitlines() if not re.search(r'priority="[^"]', line)]
        return super().gauges("\n".join(totals))


def _graphs(decode: Mapping[str, Any]) -> str | None:
    backend, largest = decode.get("backend"), decode.get("max_bs")
    if backend is None or backend == "disabled":
        return backend and "off"
    return f"up to {largest}" if largest else "on"


_MEMORY = ("sglang:max_total_num_tokens", "sglang:kv_cache_memory_usage_gb", "sglang:weight_memory_usage_gb")


def _from_gib(gib: float | None) -> int | None:
    """SGLang's "gb" are GiB: differences of free memory, 0 or a little less where nothing was measured."""
    return round(gib * GIB) if gib and gib > 0 else None


def _server_command(found: Installation | None) -> tuple[str, ...]:
    """`sglang serve`; the module behind it, deprecated since 0.5, where the command is not installed."""
    if found is None:
        return "sglang", "serve"
    command = found.scripts / "sglang"
    if command.exists():
        return found.python, str(command), "serve"
    return found.python, "-m", "sglang.launch_server"


def _unless(extra: Sequence[str], flags: tuple[str, ...], value: str | None) -> tuple[str, ...]:
    """The first of the flags with its value, nothing where the user gave one of them."""
    return () if option_of(extra, *flags) else (flags[0],) if value is None else (flags[0], value)


def _cpu_flags(extra: Sequence[str], model: str) -> tuple[str, ...]:
    """What serves on a CPU without Intel's AMX, with a KV cache that leaves the machine its memory.

    `--mem-fraction-static` is the share of all memory for weights and cache together.
    """
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    share = (weights + _CPU_KV_BYTES) / psutil.virtual_memory().total
    flags = (*_CPU_FLAGS, (("--mem-fraction-static",), f"{min(share, 0.9):.3f}"))
    return tuple(word for names, value in flags for word in _unless(extra, names, value))


def _cpu_environment(found: Installation) -> dict[str, str]:
    before = os.environ.get("LD_LIBRARY_PATH")
    library = str(found.scripts.parent / _NO_CUDA)
    threads = threads_for_server()
    cores = {}
    if threads is not None and not {"OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND"} & os.environ.keys():
        # One core is left to the client. Its log names the cores from the second.
        own = allowed_cores()[:threads]
        cores = {"OMP_NUM_THREADS": str(threads), "SGLANG_CPU_OMP_THREADS_BIND": ",".join(map(str, own))}
    return {
        **cores,
        "SGLANG_USE_CPU_ENGINE": "1",
        "LD_LIBRARY_PATH": f"{library}{os.pathsep}{before}" if before else library,
    }
