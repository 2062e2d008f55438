"""The known-truth server as an engine like any other."""

import re
import sys
from collections.abc import Mapping, Sequence

import orjson

from burstline.errors import tables_beside
from burstline.servers.engine import Engine
from burstline.servers.identity import Capabilities, Identity, Sign
from burstline.servers.introspection import first_model, json_at, owned_by
from burstline.servers.launch import Launch, LaunchOptions
from burstline.servers.messages import Call, Get, Target
from burstline.servers.openai import encode_completion
from burstline.workloads.request import Request

_TABLES = tables_beside(__file__, "truth.toml")
# One token at once, whatever the server's own script would do; it uses up none of a list of scripts.
_READY_SCRIPT = '{"headers_s": 0, "ttft_s": 0, "n_tok": null}'


class Truth(Engine):
    """Starts the truth server, speaks vLLM's completions; each call names its index in the plan."""

    name = "truth"
    title = "Known-truth server"
    returns_ids = True
    extra_fields: Mapping[str, object] = {"return_token_ids": True}
    capabilities = Capabilities(
        prefix_cache_control=False, per_event_tok="ids", queue_depth=False, graceful_overload=True
    )
    speaks = "completions"
    index_header = "x-burstline-index"
    is_stand_in = True
    signs: Sequence[Sign] = (Sign("/v1/models", owned_by("burstline-truth")),)
    brings_model = True
    gauge_names = _TABLES["gauge_names"]
    latencies = _TABLES["latencies"]
    cause = re.compile(r"^.*(?:Error|error:).*", re.MULTILINE)
    last_cause = True
    how_to_get = "it is part of Burstline"

    def launch(self, options: LaunchOptions) -> Launch:
        where = ("--host", options.host, "--port", str(options.port), "--model", options.served_name)
        argv = (options.python or sys.executable, "-P", "-m", "burstline.servers.truth", *where)
        return Launch((*argv, *options.extra_args), ready_timeout_s=30.0, stop_grace_s=5.0)

    def ready_call(self, target: Target) -> Call:
        call = encode_completion(Request(0, (1, 2, 3), None, 3, 1), target)
        return call.with_header("x-burstline-script", _READY_SCRIPT).with_header("x-burstline-probe", "ready")

    def encode(self, request: Request, target: Target) -> Call:
        return super().encode(request, target).with_header(self.index_header, str(request.index))

    def identify(self, get: Get, log: str) -> Identity:
        del log
        model = first_model(json_at(get, "/v1/models"))
        return Identity(
            engine=self.name,
            version=orjson.loads(get("/version").body)["version"],
            model=model["id"],
            max_model_len=model["max_model_len"],
            vocab_size=32_000,  # it takes any id
            raw={"models": model},
        )
