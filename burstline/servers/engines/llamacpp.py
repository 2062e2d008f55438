"""llama.cpp's llama-server: its own `/completion`, read in the source of 0c1e570 and seen on a CPU."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burstline.dtypes import DTYPES, FLOAT_NAMES, FLOATS
from burstline.errors import tables_beside
from burstline.servers.gauges import means_in
from burstline.servers.host.installation import ProgramEngine
from burstline.servers.host.kernel import threads_for_server
from burstline.servers.identity import Identity, Sign
from burstline.servers.introspection import (
    MIB,
    first_model,
    json_at,
    logged,
    logged_bytes,
    number,
    option_of,
    owned_by,
    value_of,
)
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Call, EngineError, Event, Get, Kind, ServerTimes, Target
from burstline.servers.openai import post
from burstline.servers.replies import Tally
from burstline.servers.settings import Spelling, spellings
from burstline.workloads.request import Request

SERVER_VARIABLE = "BURSTLINE_LLAMA_SERVER"
SERVER = "llama-server"

MAX_SLOTS = 256
"""LLAMA_MAX_SEQ in src/llama-cparams.h: it does not start with more."""
_PAD_TOK = 256
"""A slot's context is a multiple of this."""
_TEMPLATE_TOK = 64
"""Room in a slot beyond the longest planned request: a chat template adds tokens to each turn."""
_MAX_HTTP_THREADS = 4096
_CONTEXT_FLAGS = ("-c", "--ctx-size", "--kv-unified-per-slot")
_STOPS = {"limit": "length", "eos": "eos", "word": "word"}

_TABLES = tables_beside(__file__, "llamacpp.toml")
_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")


def _kv(kind: object) -> tuple[str, ...] | None:
    word = DTYPES[str(kind)].stored.lower() if kind in FLOATS else str(kind)
    return ("-ctk", word, "-ctv", word) if word in _KV_TYPES else None


class LlamaCpp(ProgramEngine):
    """Starts `llama-server` on a GGUF file, speaks `/completion` with token ids."""

    name = "llamacpp"
    title = "llama.cpp"
    variable = SERVER_VARIABLE
    program = SERVER
    default_port: int | None = 8080
    image: Image | None = Image("ghcr.io/ggml-org/llama.cpp:server-cuda")
    needs_weights = True
    weight_files: Sequence[str] = ("gguf",)
    stages: Sequence[tuple[str, str]] = ((r"loading model", "loading weights"),)
    settings: Mapping[str, Spelling] = {
        **spellings(_TABLES["settings"]),
        "kv_cache_dtype": Spelling(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), _kv),
    }
    lora_path: Sequence[str] | None = None
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("llamacpp")),)
    load_flags: frozenset[str] = frozenset({"-np", "-c", "--threads-http"})
    gauge_names = _TABLES["gauge_names"]
    means = means_in(_TABLES["means"])
    cause = re.compile(_TABLES["cause"], re.MULTILINE)
    how_to_get = _TABLES["how_to_get"].format(variable=SERVER_VARIABLE, program=SERVER)

    def launch(self, options: LaunchOptions) -> Launch:
        server = self.installation(options)
        extra = options.extra_args
        room, notes = _room(options)
        no_cache = not option_of(extra, "--cache-prompt")
        argv = (
            *((server,) if server else ()),
            *(*_weights(options.model), "--alias", options.served_name),
            *("--host", options.host, "--port", str(options.port), "--metrics"),
            # It would shrink what was not set until it fits: another machine, another experiment.
            *(() if option_of(extra, "-fit", "--fit") else ("-fit", "off")),
            *(("--no-cache-prompt",) if no_cache and "--no-cache-prompt" not in extra else ()),
            *(("-cram", "0") if no_cache else ()),
            *room,
            *extra,
        )
        if no_cache:
            notes = ("prompt caching is off (--no-cache-prompt -cram 0)", *notes)
        cache_type = value_of(argv, "-ctk", "--cache-type-k") or "f16"
        return Launch(
            argv,
            ready_timeout_s=900.0,
            stop_grace_s=15.0,
            n_cores=threads_for_server() if _leaves_a_core(options) else None,
            notes=notes,
            # What the command line settles and the server never says.
            fixed=Identity(
                engine=self.name,
                kv_cache_dtype=FLOAT_NAMES.get(cache_type, cache_type),
                max_num_batched_tokens=number(value_of(argv, "-b", "--batch-size")) or 2048,
                prefix_cache="--no-cache-prompt" not in argv,
                tensor_parallel_size=1,
            ),
        )

    def encode(self, request: Request, target: Target) -> Call:
        sampling = request.sampling
        fields: dict[str, object] = {
            "prompt": request.prompt_text if request.prompt_ids is None else list(request.prompt_ids),
            "n_predict": request.n_output_tok,
            "ignore_eos": request.ignore_eos,
            "temperature": sampling.temperature,
            "return_tokens": True,
            "stream": True,
        }
        if sampling.temperature > 0:
            fields |= {"top_p": sampling.top_p, "seed": sampling.seed}
        return post(target, "/completion", fields)

    def take(self, tally: Tally, answer: Any, end: int) -> Event:
        """One event; its tokens are the growth of the total.

        Not its ids: a token that leaves a character incomplete gets no event, and the next event has only its
        own id. The last event has no text while it streams, but counts what was held back until then.
        """
        n_tok = tally.grow(answer["tokens_predicted"], answer["tokens_evaluated"])
        if not answer["stop"]:
            return Event(end, Kind.ANSWER, n_tok)
        timings = answer.get("timings") or {}
        tally.n_cached_tok = timings.get("cache_n")
        tally.finish_reason = _STOPS.get(answer.get("stop_type", ""))
        tally.terminated = True
        if "prompt_ms" in timings:
            tally.times = ServerTimes(prefill_s=timings["prompt_ms"] / 1e3)
        return Event(end, Kind.ANSWER if n_tok else Kind.FINISH, n_tok)

    def generated(self, answers: Sequence[Any]) -> Sequence[int] | str:
        return "".join(answer["content"] for answer in answers)  # some tokens come without an id

    def identify(self, get: Get, log: str) -> Identity:
        """What it serves with. Slots share one cache where it is "unified", else each has its part of it.

        Only the log of a start says which: of a server found running the cache's size is not known.
        """
        props, models = json_at(get, "/props"), json_at(get, "/v1/models")
        model = first_model(models)
        meta = model.get("meta") or {}
        n_slots = props.get("total_slots")
        n_ctx = (props.get("default_generation_settings") or {}).get("n_ctx")
        file_type = props.get("model_ftype")
        dtype = FLOAT_NAMES.get((file_type or "").lower())
        pools = {"true": 1, "false": n_slots}.get(logged(log, r"kv_unified = '(\w+)'") or "")
        return Identity(
            engine=self.name,
            version=props.get("build_info"),
            model=props.get("model_path") or model.get("id"),
            max_model_len=n_ctx,
            dtype=dtype,
            quantization="none" if dtype else file_type,
            kv_tok=pools * n_ctx if pools and n_ctx else None,
            kv_bytes=logged_bytes(log, r"KV buffer size = +([\d.]+) MiB", MIB),
            weight_bytes=meta.get("size") or logged_bytes(log, r"model buffer size = +([\d.]+) MiB", MIB),
            max_num_seqs=n_slots,
            vocab_size=meta.get("n_vocab"),
            raw={"props": props, "models": models},
        )


def _room(options: LaunchOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Slots, context and connections for the load, and what the user must know of them.

    By default 4 slots share the model's whole context; with `-np` each has an equal part of `-c`, and all
    connections share slots + 4 threads, in no metric while they wait for one.
    """
    extra, wanted = options.extra_args, options.n_concurrent
    flags: list[str] = []
    notes: list[str] = []
    slots = number(value_of(extra, "-np", "--parallel", "--n-parallel"))
    if slots is None and wanted is not None:
        slots = min(wanted, MAX_SLOTS)
        flags += ["-np", str(slots)]
        notes.append(f"-np {slots}: at most {slots} requests at a time")
    if slots is not None and wanted is not None and slots < wanted:
        notes = [f"-np {slots}: of more than {slots} requests at a time the others wait for a slot"]
    if slots and options.n_request_tok and not option_of(extra, *_CONTEXT_FLAGS):
        context = -(-(options.n_request_tok + _TEMPLATE_TOK) // _PAD_TOK) * _PAD_TOK
        flags += ["-c", str(slots * context)]
        notes.append(f"-c {slots * context}: {context} tokens for each slot")
    threads = threads_for_server()
    if threads is not None and _leaves_a_core(options):
        flags += ["-t", str(threads)]
    if wanted is not None and not option_of(extra, "--threads-http"):
        flags += ["--threads-http", str(min(wanted, _MAX_HTTP_THREADS) + 4)]
    return tuple(flags), tuple(notes)


def _leaves_a_core(options: LaunchOptions) -> bool:
    """Whether we choose its threads: it computes on the CPU, for a load of ours."""
    chosen = option_of(options.extra_args, "-t", "--threads", "-ngl", "--n-gpu-layers")
    return options.n_concurrent is not None and not chosen


def _weights(model: str) -> tuple[str, str]:
    """`-m` with a GGUF file, the only one of a folder too; `-hf` with a name on the Hub."""
    path = Path(model)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise EngineError(
                f"{model} holds {len(files)} GGUF files, expected one. Name it, convert the folder with "
                "llama.cpp's convert_hf_to_gguf.py, or burstline make-model DIR --like tiny --format gguf"
            )
        return "-m", str(files[0])
    return ("-m", model) if model.endswith(".gguf") else ("-hf", model)
