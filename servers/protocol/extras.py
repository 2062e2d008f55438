"""What a user adds to each request: fields of its body, headers, the name of an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from servers.messages import Call, Target


def dressed(call: Call, target: Target, index: int, lora_path: Sequence[str] | None) -> Call:
    """The call with the target's extra fields laid over its own, and the adapter of this request.

    Adapters take turns by the request's index; `lora_path` is where in the body the engine reads the name.
    Objects are merged, anything else is replaced.
    """
    if target.extra_body is None and not target.loras:
        return call
    body = orjson.loads(call.body)
    if target.extra_body is not None:
        body = merged(body, orjson.loads(target.extra_body))
    if target.loras and lora_path:
        node = body
        for key in lora_path[:-1]:
            node = node.setdefault(key, {})
        node[lora_path[-1]] = target.loras[index % len(target.loras)]
    return replace(call, body=orjson.dumps(body))


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` laid over `body`, objects inside objects too."""
    out = dict(body)
    for key, value in extra.items():
        own = out.get(key)
        out[key] = merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return out
