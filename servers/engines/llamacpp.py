"""llama.cpp's llama-server: its own `/completion`, as its README and source tell."""

import os
import re
import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servers.engine import (
    Call,
    Capabilities,
    Engine,
    EngineError,
    Event,
    Gauges,
    Get,
    HttpReply,
    Identity,
    Image,
    Kind,
    Launch,
    LaunchOptions,
    Reply,
    Sign,
    Target,
)
from servers.protocol.introspection import (
    MIB,
    first_model,
    gauges_in,
    json_at,
    logged_bytes,
    option_of,
    owned_by,
)
from servers.protocol.openai import post
from servers.protocol.replies import Tally, decode_reply
from workloads.request import Request

SERVER_VARIABLE = "BURSTLINE_LLAMA_SERVER"
SERVER = "llama-server"

_GAUGES = {
    "running": ("llamacpp:requests_processing",),
    "waiting": ("llamacpp:requests_deferred",),
    "prompt_tokens": ("llamacpp:prompt_tokens_total",),
    "generation_tokens": ("llamacpp:tokens_predicted_total",),
}
_STOPS = {"limit": "length", "eos": "eos", "word": "word"}
_CAUSE = re.compile(
    r"^.*?((?:error while handling argument|error: |failed to |couldn't bind|unable to|ggml.*memory).*)$",
    re.MULTILINE,
)


class LlamaCpp(Engine):
    """Starts `llama-server` on a GGUF file, speaks `/completion` with token ids."""

    name = "llamacpp"
    title = "llama.cpp"
    capabilities = Capabilities(
        token_id_prompts=True,
        forced_output_length=True,
        prefix_cache_control=True,
        per_event_tok="ids",
        queue_depth=True,
        graceful_overload=False,
    )
    probe_path: str | None = "/health"
    metrics_path: str | None = "/metrics"
    default_port: int | None = 8080
    image: Image | None = Image("ghcr.io/ggml-org/llama.cpp:server-cuda")
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("llamacpp")),)
    how_to_get = (
        "Take a build from https://github.com/ggml-org/llama.cpp/releases and have "
        f"{SERVER} on the PATH or named by {SERVER_VARIABLE}, or use --container."
    )

    def installed(self, python: str | None) -> str | None:  # noqa: ARG002
        return None if _server() is None else ""

    def launch(self, options: LaunchOptions) -> Launch:
        server = None if options.image else _server()
        if server is None and not options.image:
            raise EngineError(f"llama.cpp is not installed: no {SERVER} is found. {self.how_to_get}")
        extra = options.extra_args
        argv = (
            *((server,) if server else ()),
            *(*_weights(options.model), "--alias", options.served_name),
            *("--host", options.host, "--port", str(options.port), "--metrics"),
            # It would shrink what was not set until it fits: another machine, another experiment.
            *(() if option_of(extra, "-fit", "--fit") else ("-fit", "off")),
            *(() if option_of(extra, "--cache-prompt") else ("--no-cache-prompt", "-cram", "0")),
            *extra,
        )
        note = "prompt caching is off (--no-cache-prompt -cram 0); -c is shared by all of the -np slots"
        return Launch(argv, ready_timeout_s=900.0, stop_grace_s=15.0, notes=(note,))

    def ready_call(self, target: Target) -> Call:
        return self.encode(Request(0, array("I", [10, 11, 12]), None, 3, 1), target)

    def encode(self, request: Request, target: Target) -> Call:
        sampling = request.sampling
        fields: dict[str, object] = {
            "prompt": request.prompt_text if request.prompt_ids is None else list(request.prompt_ids),
            "n_predict": request.n_output_tok,
            "ignore_eos": request.ignore_eos,
            "temperature": sampling.temperature,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        if sampling.temperature > 0:
            fields |= {"top_p": sampling.top_p, "seed": sampling.seed}
        return post(target, "/completion", fields)

    def decode(self, reply: HttpReply) -> Reply:
        return decode_reply(reply, _take)

    def identify(self, get: Get, log: str) -> Identity:
        props, models = json_at(get, "/props"), json_at(get, "/v1/models")
        defaults = props.get("default_generation_settings") or {}
        model = first_model(models)
        n_slots, n_ctx = props.get("total_slots"), defaults.get("n_ctx")
        return Identity(
            engine=self.name,
            version=props.get("build_info"),
            model=props.get("model_path") or model.get("id"),
            max_model_len=n_ctx,
            kv_tok=n_slots * n_ctx if n_slots and n_ctx else None,
            kv_bytes=logged_bytes(log, r"KV buffer size = +([\d.]+) MiB", MIB),
            weight_bytes=logged_bytes(log, r"model buffer size = +([\d.]+) MiB", MIB),
            max_num_seqs=n_slots,
            vocab_size=(model.get("meta") or {}).get("n_vocab"),
            raw={"props": props, "models": models},
        )

    def gauges(self, metrics: str) -> Gauges:
        return gauges_in(metrics, _GAUGES)

    def root_cause(self, log: str) -> str | None:
        """The first complaint: those that follow are its callers saying that it failed."""
        found = _CAUSE.search(log)
        return found[1].strip() if found else None


def _take(tally: Tally, answer: Mapping[str, Any], end: int) -> Event:
    """One event; the last one has the totals, and no text of its own while it streams."""
    ids = answer.get("tokens") or ()
    n_before = tally.n_output_ids
    if not answer["stop"]:
        tally.n_output_ids = (n_before or 0) + len(ids) if ids else n_before
        return Event(end, Kind.ANSWER, len(ids) or None)
    tally.n_prompt, tally.n_output_usage = answer["tokens_evaluated"], answer["tokens_predicted"]
    tally.n_cached = (answer.get("timings") or {}).get("cache_n")
    tally.finish_reason = _STOPS.get(answer.get("stop_type", ""))
    tally.terminated = True
    if answer.get("truncated"):
        tally.error = "the prompt was truncated to fit the context"
    if tally.events:
        return Event(end, Kind.FINISH, 0)
    return Event(end, Kind.ANSWER, len(ids) or tally.n_output_usage)


def _weights(model: str) -> tuple[str, str]:
    """`-m` with a GGUF file, the only one of a folder too; `-hf` with a name on the Hub."""
    path = Path(model)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise EngineError(
                f"{model} holds {len(files)} GGUF files; llama.cpp wants one: name it, or make it with "
                "llama.cpp's convert_hf_to_gguf.py"
            )
        return "-m", str(files[0])
    return ("-m", model) if model.endswith(".gguf") else ("-hf", model)


def _server() -> str | None:
    return os.environ.get(SERVER_VARIABLE) or shutil.which(SERVER)
