"""Which engine answers at a URL, by its own words."""

import re

from servers.engine import EngineError, Get

_OWNERS = {
    "burstline": "reference",
    "vllm": "vllm",
    "lightllm": "lightllm",
    "sglang": "sglang",
    "tensorrt_llm": "trtllm",
    "llamacpp": "llamacpp",
}
"""What engines write for `owned_by` in `/v1/models`; TGI repeats the model's name there."""
_OWNER = re.compile(rb'"owned_by": ?"(\w+)"')


def engine_at(get: Get) -> str | None:
    """The registry's name of what is there; "openai" for a server that says nothing of itself, None for none.

    A server that is there and refuses (no key, a load balancer) counts as one that says nothing.
    """
    try:
        models = get("/v1/models").body
    except EngineError:
        return None
    owner = _OWNER.search(models)
    if owner and owner[1].decode() in _OWNERS:
        return _OWNERS[owner[1].decode()]
    signs = (
        ("/metrics", b"vllm:", "vllm"),
        ("/info", b'"router":"text-generation-router"', "tgi"),
        ("/openapi.json", b'"/load_model"', "transformers"),
    )
    for path, sign, engine in signs:
        try:
            if sign in get(path).body:
                return engine
        except EngineError:
            return "openai"
    return "openai"
