"""The dialects of the tests' server: OpenAI's with every kind of usage, and the engines' native ones.

Native ones as read in the sources: TGI 3.3, LightLLM 1.2 (recorded replies too), SGLang 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import burstline.servers.truth.replies as product
from burstline.servers.truth.replies import Json, Portion, Prompt
from burstline.workloads.request import WorkloadError
from tests.truth.script import Script

SWAPPED = 31_999


@dataclass(frozen=True, slots=True)
class Wanted(product.Wanted):
    """`details` is the dialect's own extra: ids of OpenAI's tokens, TGI's details."""

    dialect: str = "completions"


@dataclass(frozen=True, slots=True)
class CachedWanted(Wanted):
    """`n_cached_tok` is what the server's prefix cache holds of the prompt."""

    n_cached_tok: int | None = None


def n_cached_tok_of(wanted: Wanted | None) -> int | None:
    return getattr(wanted, "n_cached_tok", None)


@dataclass(frozen=True, slots=True)
class ScriptedDialect:
    """How requests to one path are read and answered: a token's event, a whole reply, an error.

    `usage` makes the event that counts, None where the dialect has none. `done`: a stream ends with `[DONE]`.
    `role` makes the event that opens a stream, None where there is none.

    `space`: `data:` is followed by one. `counts_prompt`: every event names the prompt's length.
    """

    read: Callable[[Json, str], tuple[Wanted, Prompt]]
    token: Callable[[Wanted, Any, Portion], Json]
    plain: Callable[[Wanted, Any, int], Json]
    error: Callable[[str, int], Json]
    usage: Callable[[Wanted, int], Json] | None = None
    done: bool = False
    role: Callable[[Wanted], Json] | None = None
    space: bool = True
    counts_prompt: bool = False


def generation(
    dialect: str, body: Json, model: str, prompt: Any, n_output: Any, details: Any
) -> tuple[Wanted, Prompt]:
    """What a request wants, its values checked, and its prompt.

    A prompt has as many tokens as it has ids, or as its text has words.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    n_prompt_tok = product.n_tok_of(prompt, n_output)
    stream = bool(body.get("stream", False))
    chat = dialect == "chat"
    return Wanted(model, n_prompt_tok, n_output, bool(details), stream, chat, dialect=dialect), prompt


def read_completion(body: Json, model: str) -> tuple[Wanted, Prompt]:
    n_output, details = body.get("max_tokens", 16), body.get("return_token_ids")
    return generation("completions", body, model, body.get("prompt"), n_output, details)


def read_chat(body: Json, model: str) -> tuple[Wanted, Prompt]:
    n_output = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    return generation("chat", body, model, product.text_of(body), n_output, body.get("return_token_ids"))


def finish_reason(script: Script, portion: Portion) -> str | None:
    return script.finish if portion.last else None


def read_tgi(body: Json, model: str) -> tuple[Wanted, Prompt]:
    parameters = body.get("parameters") or {}
    n_output = parameters.get("max_new_tokens", 100)
    return generation("tgi", body, model, body.get("inputs"), n_output, parameters.get("details"))


def read_lightllm(body: Json, model: str) -> tuple[Wanted, Prompt]:
    if "parameters" not in body:
        raise WorkloadError("'parameters'")
    return generation(
        "lightllm", body, model, body.get("inputs"), body["parameters"].get("max_new_tokens", 16), False
    )


def read_sglang(body: Json, model: str) -> tuple[Wanted, Prompt]:
    prompt = body.get("text") if body.get("input_ids") is None else body["input_ids"]
    n_output = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
    return generation("sglang", body, model, prompt, n_output, False)


def tgi_token(wanted: Wanted, script: Script, portion: Portion) -> Json:
    token = {"id": portion.before, "text": script.text * portion.n, "logprob": -0.5, "special": False}
    details = tgi_details(wanted, script, portion.after) if portion.last and wanted.details else None
    whole = script.text * portion.after if portion.last else None
    return {"index": portion.after, "token": token, "generated_text": whole, "details": details}


def tgi_details(wanted: Wanted, script: Script, n_tok: int) -> Json:
    details = {"finish_reason": script.finish, "generated_tokens": n_tok, "seed": None}
    return details | {"input_length": wanted.n_prompt_tok}


def tgi_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    reply: Json = {"generated_text": script.text * n_tok}
    if wanted.details:
        reply["details"] = tgi_details(wanted, script, n_tok) | {"prefill": [], "tokens": []}
    return reply


def tgi_error(message: str, status: int) -> Json:
    kinds = {429: "overloaded", 503: "overloaded", 422: "validation"}
    return {"error": message, "error_type": kinds.get(status, "generation")}


def lightllm_token(wanted: Wanted, script: Script, portion: Portion) -> Json:
    token = {
        "id": portion.before,
        "text": script.text * portion.n,
        "logprob": -1.5,
        "special": False,
        "count_output_tokens": portion.after,
        "prompt_tokens": wanted.n_prompt_tok,
    }
    n_text = {"input_text_tokens": wanted.n_prompt_tok, "input_audio_tokens": 0, "input_image_tokens": 0}
    return {
        "token": token,
        "generated_text": None,
        "finished": portion.last,
        "finish_reason": finish_reason(script, portion),
        "details": None,
        "input_usage": n_text,
    }


def lightllm_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    return {
        "generated_text": [script.text * n_tok],
        "count_output_tokens": n_tok,
        "finish_reason": script.finish,
        "prompt_tokens": wanted.n_prompt_tok,
    }


def lightllm_error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": status}}


def sglang_token(wanted: Wanted, script: Script, portion: Portion) -> Json:
    reason = finish_reason(script, portion)
    meta: Json = {
        "id": "truth",
        "finish_reason": reason and {"type": reason, "length": portion.after},
        "prompt_tokens": wanted.n_prompt_tok,
        "completion_tokens": portion.after,
        "cached_tokens": n_cached_tok_of(wanted) or 0,
    }
    return {
        "text": script.text * portion.after,
        "output_ids": list(range(portion.after)),
        "meta_info": meta,
    }


def sglang_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    return sglang_token(wanted, script, Portion(0, n_tok, last=True))


def sglang_error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "scripted_error", "code": status, "retryable": False}}


def _usage(wanted: Wanted, n_tok: int) -> Json:
    cached = n_cached_tok_of(wanted)
    details = None if cached is None else {"cached_tokens": cached}
    return product.usage_of(wanted, n_tok) | {"prompt_tokens_details": details}


def _usage_in_event(wanted: Wanted, script: Script, portion: Portion) -> Json:
    if script.usage == "null":
        return {"usage": None}
    if script.usage in ("cumulative", "role") or (script.usage in ("last", "lagging") and portion.last):
        return {"usage": _usage(wanted, portion.after)}
    if script.usage == "lagging":
        return {"usage": _usage(wanted, portion.before)}
    if script.usage in ("zeros", "prompt", "stale"):
        early = {"zeros": 0, "prompt": None, "stale": portion.after // 3 * 3}[script.usage]
        n_tok = portion.after if portion.last else early
        return {"usage": _usage(wanted, n_tok or 0) | {"completion_tokens": n_tok}}
    return {}


def _token(wanted: Wanted, script: Script, portion: Portion) -> Json:
    is_swapped = script.swapped is not None and portion.before <= script.swapped < portion.after
    words = replace(script, text=" other") if is_swapped else script
    payload = product.token(wanted, words, portion)
    choice = payload["choices"][0]
    if is_swapped and choice.get("token_ids"):
        choice["token_ids"] = [SWAPPED if k == script.swapped else k for k in portion.ids]
    choice["finish_reason"] = finish_reason(script, portion)
    if script.usage == "choice" and portion.last:
        choice["usage"] = _usage(wanted, portion.after)
    if "delta" in choice and script.field != "content":
        text = choice["delta"]["content"]
        shapes: dict[str, object] = {
            "reasoning_details": [{"type": "reasoning.text", "text": text}],
            "tool_calls": [{"index": 0, "function": {"arguments": text}}],
        }
        choice["delta"] = {script.field: shapes.get(script.field, text)}
    elif "delta" in choice and portion.before < script.n_reasoning_tok:
        choice["delta"] = {"reasoning_content": choice["delta"]["content"]}
    return payload | _usage_in_event(wanted, script, portion)


def _usage_event(wanted: Wanted, n_tok: int) -> Json:
    return product.answer(wanted) | {"usage": _usage(wanted, n_tok)}


def _plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    payload = product.plain(wanted, script, n_tok)
    choice = payload["choices"][0]
    choice["finish_reason"] = script.finish
    if "message" in choice and (n_reasoning := min(n_tok, script.n_reasoning_tok)):
        choice["message"]["content"] = script.text * (n_tok - n_reasoning)
        choice["message"]["reasoning_content"] = script.text * n_reasoning
    usage = payload.pop("usage")
    if script.usage == "off":
        return payload
    return payload | {"usage": None if script.usage == "null" else usage | _usage(wanted, n_tok)}


def completion_role(wanted: Wanted) -> Json:
    return product.answer(wanted, {"index": 0, "text": "", "logprobs": None, "finish_reason": None})


def read_embedding(body: Json, model: str) -> tuple[Wanted, Prompt]:
    return generation("embeddings", body, model, body.get("input"), 1, False)


def embedding_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    del script, n_tok
    row = {"object": "embedding", "index": 0, "embedding": [1.0, 0.0]}
    return {"object": "list", "model": wanted.model, "data": [row], "usage": _usage(wanted, 0)}


def read_rerank(body: Json, model: str) -> tuple[Wanted, Prompt]:
    texts = [body.get("query"), *(body.get("documents") or [])]
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise WorkloadError("expected a query and documents, all of them texts")
    return generation("rerank", body, model, " ".join(map(str, texts)), 1, False)


def rerank_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    del script, n_tok
    row = {"index": 0, "relevance_score": 1.0}
    return {"id": "rerank-truth", "model": wanted.model, "results": [row], "usage": _usage(wanted, 0)}


DIALECTS: dict[str, ScriptedDialect] = {
    "completions": ScriptedDialect(
        read_completion, _token, _plain, product.error, _usage_event, done=True, role=completion_role
    ),
    "chat": ScriptedDialect(
        read_chat, _token, _plain, product.error, _usage_event, done=True, role=product.chat_role
    ),
    "embeddings": ScriptedDialect(read_embedding, product.token, embedding_plain, product.error),
    "rerank": ScriptedDialect(read_rerank, product.token, rerank_plain, product.error),
    "tgi": ScriptedDialect(read_tgi, tgi_token, tgi_plain, tgi_error),
    "lightllm": ScriptedDialect(
        read_lightllm, lightllm_token, lightllm_plain, lightllm_error, space=False, counts_prompt=True
    ),
    "sglang": ScriptedDialect(
        read_sglang, sglang_token, sglang_plain, sglang_error, done=True, counts_prompt=True
    ),
}

ALWAYS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
"""OpenAI's paths, which are always served."""

ROUTES: dict[str, dict[str, str]] = {
    "openai": {},
    "tgi": {"/generate": "tgi", "/generate_stream": "tgi", "/": "tgi"},
    "lightllm": {"/generate": "lightllm", "/generate_stream": "lightllm"},
    "sglang": {"/generate": "sglang"},
    "vllm": {},
}
"""The native paths of each engine."""


def read_request(path: str, body: Any, model: str, native: str) -> tuple[Wanted, Prompt]:
    """What a request to `path` wants, and its prompt; KeyError where no dialect has the path."""
    name = (ALWAYS | ROUTES[native])[path]
    if path == "/generate_stream":
        body = body | {"stream": True}
    return DIALECTS[name].read(body, model)
