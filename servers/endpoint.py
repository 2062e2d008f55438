"""Any OpenAI-compatible endpoint that somebody else runs: only what OpenAI's own schema has is sent."""

from array import array
from dataclasses import replace
from typing import Any

import orjson

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
from servers.openai import decode_completion, encode_completion
from workloads.request import Request


class Endpoint:
    """Attach only. Prompts go as text where there is one, and output lengths cannot be forced."""

    name = "openai"
    title = "OpenAI-compatible endpoint"
    capabilities = Capabilities(
        token_id_prompts=False,
        forced_output_length=False,
        prefix_cache_control=False,
        per_event_tok="no",
        queue_depth=False,
        graceful_overload=False,
    )
    probe_path = "/v1/models"
    metrics_path: str | None = None

    def launch(self, options: LaunchOptions) -> Launch:
        raise EngineError(
            f"an OpenAI-compatible endpoint cannot be started for {options.model}: attach to it by its URL, "
            "or name the engine that serves it"
        )

    def ready_call(self, target: Target) -> Call:
        return self.encode(Request(0, array("I"), "Hello", 1, 1), target)

    def identify(self, get: Get, log: str) -> Identity:  # noqa: ARG002
        reply = get("/v1/models")
        models: dict[str, Any] = orjson.loads(reply.body) if reply.status == 200 else {}
        model: dict[str, Any] = next(iter(models.get("data") or ()), {})
        return Identity(
            engine=self.name,
            model=model.get("id"),
            max_model_len=model.get("max_model_len"),
            raw={"models": models},
        )

    def encode(self, request: Request, target: Target) -> Call:
        ids = request.prompt_ids if request.prompt_text is None else None
        return encode_completion(replace(request, prompt_ids=ids, ignore_eos=False), target)

    def decode(self, reply: HttpReply) -> Reply:
        return decode_completion(reply)

    def gauges(self, metrics: str) -> Gauges:  # noqa: ARG002
        return Gauges()

    def root_cause(self, log: str) -> str | None:  # noqa: ARG002
        return None
