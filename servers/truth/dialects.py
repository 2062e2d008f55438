"""The dialects: how each reads a request and says a token, an error and a whole reply.

Native ones as read in the sources: TGI 3.3, LightLLM 1.2 (recorded replies too), SGLang 0.5; OpenAI's as
vLLM 0.32 says them (recorded replies, and its source).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from servers.truth.script import Script
from workloads.request import WorkloadError

Json = dict[str, Any]
Prompt = Sequence[int] | str


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants. `details` is the dialect's own extra: vLLM's token ids, TGI's final details.

    `n_cached_tok` is what the server's prefix cache holds of the prompt; None where it has no such cache.
    """

    dialect: str
    model: str
    stream: bool
    n_prompt_tok: int
    n_output_tok: int
    details: bool = False
    n_cached_tok: int | None = None


@dataclass(frozen=True, slots=True)
class Portion:
    """The tokens of one event: how many came before it, how many it carries, whether they are the last."""

    before: int
    n: int
    last: bool

    @property
    def after(self) -> int:
        return self.before + self.n

    @property
    def ids(self) -> list[int]:
        return list(range(self.before, self.after))


def n_tok_of(prompt: Prompt) -> int:
    """How many tokens this server counts in a prompt: its ids, or the words of a text."""
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def asked(
    dialect: str, body: Json, model: str, prompt: Any, n_output: Any, details: Any
) -> tuple[Ask, Prompt]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise WorkloadError(f"the prompt is {prompt!r:.80}; expected a text or a list of token ids")
    if not isinstance(n_output, int) or n_output < 1:
        raise WorkloadError(f"the output length is {n_output!r}; expected a positive number")
    stream = bool(body.get("stream", False))
    return Ask(dialect, model, stream, n_tok_of(prompt), n_output, bool(details)), prompt


def finish_reason(script: Script, portion: Portion) -> str | None:
    return script.finish if portion.last else None


def read_tgi(body: Json, model: str) -> tuple[Ask, Prompt]:
    parameters = body.get("parameters") or {}
    n_output = parameters.get("max_new_tokens", 100)
    return asked("tgi", body, model, body.get("inputs"), n_output, parameters.get("details"))


def read_lightllm(body: Json, model: str) -> tuple[Ask, Prompt]:
    if "parameters" not in body:
        raise WorkloadError("'parameters'")
    return asked(
        "lightllm", body, model, body.get("inputs"), body["parameters"].get("max_new_tokens", 16), False
    )


def read_sglang(body: Json, model: str) -> tuple[Ask, Prompt]:
    prompt = body.get("text") if body.get("input_ids") is None else body["input_ids"]
    n_output = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
    return asked("sglang", body, model, prompt, n_output, False)


def tgi_token(ask: Ask, script: Script, portion: Portion) -> Json:
    token = {"id": portion.before, "text": script.text * portion.n, "logprob": -0.5, "special": False}
    details = tgi_details(ask, script, portion.after) if portion.last and ask.details else None
    whole = script.text * portion.after if portion.last else None
    return {"index": portion.after, "token": token, "generated_text": whole, "details": details}


def tgi_details(ask: Ask, script: Script, n_tok: int) -> Json:
    details = {"finish_reason": script.finish, "generated_tokens": n_tok, "seed": None}
    return details | {"input_length": ask.n_prompt_tok}


def tgi_plain(ask: Ask, script: Script, n_tok: int) -> Json:
    reply: Json = {"generated_text": script.text * n_tok}
    if ask.details:
        reply["details"] = tgi_details(ask, script, n_tok) | {"prefill": [], "tokens": []}
    return reply


def tgi_error(message: str, status: int) -> Json:
    kinds = {429: "overloaded", 503: "overloaded", 422: "validation"}
    return {"error": message, "error_type": kinds.get(status, "generation")}


def lightllm_token(ask: Ask, script: Script, portion: Portion) -> Json:
    token = {
        "id": portion.before,
        "text": script.text * portion.n,
        "logprob": -1.5,
        "special": False,
        "count_output_tokens": portion.after,
        "prompt_tokens": ask.n_prompt_tok,
    }
    n_text = {"input_text_tokens": ask.n_prompt_tok, "input_audio_tokens": 0, "input_image_tokens": 0}
    return {
        "token": token,
        "generated_text": None,
        "finished": portion.last,
        "finish_reason": finish_reason(script, portion),
        "details": None,
        "input_usage": n_text,
    }


def lightllm_plain(ask: Ask, script: Script, n_tok: int) -> Json:
    return {
        "generated_text": [script.text * n_tok],
        "count_output_tokens": n_tok,
        "finish_reason": script.finish,
        "prompt_tokens": ask.n_prompt_tok,
    }


def lightllm_error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": status}}


def sglang_token(ask: Ask, script: Script, portion: Portion) -> Json:
    reason = finish_reason(script, portion)
    meta: Json = {
        "id": "truth",
        "finish_reason": reason and {"type": reason, "length": portion.after},
        "prompt_tokens": ask.n_prompt_tok,
        "completion_tokens": portion.after,
        "cached_tokens": ask.n_cached_tok or 0,
    }
    return {
        "text": script.text * portion.after,
        "output_ids": list(range(portion.after)),
        "meta_info": meta,
    }


def sglang_plain(ask: Ask, script: Script, n_tok: int) -> Json:
    return sglang_token(ask, script, Portion(0, n_tok, last=True))


def sglang_error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "scripted_error", "code": status, "retryable": False}}


def read_completion(body: Json, model: str) -> tuple[Ask, Prompt]:
    n_output = body.get("max_tokens", 16)
    return asked("completions", body, model, body.get("prompt"), n_output, body.get("return_token_ids"))


def read_chat(body: Json, model: str) -> tuple[Ask, Prompt]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise WorkloadError("no messages; expected a list of role and content")
    text = "\n".join(str(message.get("content")) for message in messages)
    n_output = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    return asked("chat", body, model, text, n_output, body.get("return_token_ids"))


def _usage(ask: Ask, n_tok: int) -> Json:
    cached = None if ask.n_cached_tok is None else {"cached_tokens": ask.n_cached_tok}
    return {
        "prompt_tokens": ask.n_prompt_tok,
        "total_tokens": ask.n_prompt_tok + n_tok,
        "completion_tokens": n_tok,
        "prompt_tokens_details": cached,
    }


def _usage_in_event(ask: Ask, script: Script, portion: Portion) -> Json:
    if script.usage == "null":
        return {"usage": None}
    if script.usage == "cumulative" or (script.usage in ("last", "lagging") and portion.last):
        return {"usage": _usage(ask, portion.after)}
    if script.usage == "lagging":
        return {"usage": _usage(ask, portion.before)}
    return {}


def _completion(ask: Ask, choices: list[Json]) -> Json:
    return {
        "id": "cmpl-truth",
        "object": "text_completion",
        "created": 0,
        "model": ask.model,
        "choices": choices,
    }


def completion_token(ask: Ask, script: Script, portion: Portion) -> Json:
    choice = {
        "index": 0,
        "text": script.text * portion.n,
        "logprobs": None,
        "finish_reason": finish_reason(script, portion),
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": portion.ids if ask.details else None,
    }
    return _completion(ask, [choice]) | _usage_in_event(ask, script, portion)


def completion_role(ask: Ask) -> Json:
    return _completion(ask, [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}])


def completion_usage(ask: Ask, script: Script, n_tok: int) -> Json:
    del script
    return _completion(ask, []) | {"usage": _usage(ask, n_tok)}


def completion_plain(ask: Ask, script: Script, n_tok: int) -> Json:
    choice = {"index": 0, "text": script.text * n_tok, "logprobs": None, "finish_reason": script.finish}
    return _completion(ask, [choice]) | _plain_usage(ask, script, n_tok)


def _plain_usage(ask: Ask, script: Script, n_tok: int) -> Json:
    if script.usage == "off":
        return {}
    return {"usage": None if script.usage == "null" else _usage(ask, n_tok)}


def _chat(ask: Ask, choices: list[Json], kind: str = "chat.completion.chunk") -> Json:
    return {"id": "chatcmpl-truth", "object": kind, "created": 0, "model": ask.model, "choices": choices}


def chat_token(ask: Ask, script: Script, portion: Portion) -> Json:
    field = "reasoning_content" if portion.before < script.n_reasoning_tok else "content"
    choice: Json = {
        "index": 0,
        "delta": {field: script.text * portion.n},
        "logprobs": None,
        "finish_reason": finish_reason(script, portion),
    }
    if ask.details:
        choice["token_ids"] = portion.ids
    return _chat(ask, [choice]) | _usage_in_event(ask, script, portion)


def chat_role(ask: Ask) -> Json:
    delta = {"role": "assistant", "content": ""}
    return _chat(ask, [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])


def chat_usage(ask: Ask, script: Script, n_tok: int) -> Json:
    del script
    return _chat(ask, []) | {"usage": _usage(ask, n_tok)}


def chat_plain(ask: Ask, script: Script, n_tok: int) -> Json:
    n_reasoning = min(n_tok, script.n_reasoning_tok)
    message = {
        "role": "assistant",
        "content": script.text * (n_tok - n_reasoning),
        "reasoning_content": script.text * n_reasoning or None,
    }
    choice = {"index": 0, "message": message, "finish_reason": script.finish}
    return _chat(ask, [choice], "chat.completion") | _plain_usage(ask, script, n_tok)


def read_embedding(body: Json, model: str) -> tuple[Ask, Prompt]:
    return asked("embeddings", body, model, body.get("input"), 1, False)


def embedding_plain(ask: Ask, script: Script, n_tok: int) -> Json:
    del script, n_tok
    row = {"object": "embedding", "index": 0, "embedding": [1.0, 0.0]}
    return {"object": "list", "model": ask.model, "data": [row], "usage": _usage(ask, 0)}


def read_rerank(body: Json, model: str) -> tuple[Ask, Prompt]:
    texts = [body.get("query"), *(body.get("documents") or [])]
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise WorkloadError("expected a query and documents, all of them texts")
    return asked("rerank", body, model, " ".join(map(str, texts)), 1, False)


def rerank_plain(ask: Ask, script: Script, n_tok: int) -> Json:
    del script, n_tok
    row = {"index": 0, "relevance_score": 1.0}
    return {"id": "rerank-truth", "model": ask.model, "results": [row], "usage": _usage(ask, 0)}


def openai_error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "scripted_error", "param": None, "code": status}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect: how it reads a request and says a token, an error, and a whole reply.

    `usage` makes the event that counts, `role` the one that opens; None where the dialect has none. `done`
    says that a stream ends with `[DONE]`, `space` that `data:` is followed by one, `counts_prompt` that every
    event names the prompt's length.
    """

    read: Callable[[Json, str], tuple[Ask, Prompt]]
    token: Callable[[Ask, Script, Portion], Json]
    plain: Callable[[Ask, Script, int], Json]
    error: Callable[[str, int], Json]
    usage: Callable[[Ask, Script, int], Json] | None = None
    role: Callable[[Ask], Json] | None = None
    done: bool = False
    space: bool = True
    counts_prompt: bool = False


DIALECTS: dict[str, Dialect] = {
    "completions": Dialect(
        read=read_completion,
        token=completion_token,
        plain=completion_plain,
        error=openai_error,
        usage=completion_usage,
        role=completion_role,
        done=True,
    ),
    "chat": Dialect(
        read=read_chat,
        token=chat_token,
        plain=chat_plain,
        error=openai_error,
        usage=chat_usage,
        role=chat_role,
        done=True,
    ),
    "embeddings": Dialect(
        read=read_embedding, token=completion_token, plain=embedding_plain, error=openai_error
    ),
    "rerank": Dialect(read=read_rerank, token=completion_token, plain=rerank_plain, error=openai_error),
    "tgi": Dialect(read=read_tgi, token=tgi_token, plain=tgi_plain, error=tgi_error),
    "lightllm": Dialect(
        read=read_lightllm,
        token=lightllm_token,
        plain=lightllm_plain,
        error=lightllm_error,
        space=False,
        counts_prompt=True,
    ),
    "sglang": Dialect(
        read=read_sglang,
        token=sglang_token,
        plain=sglang_plain,
        error=sglang_error,
        done=True,
        counts_prompt=True,
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
}
"""The native paths of each engine."""


def read_request(path: str, body: Json, model: str, native: str) -> tuple[Ask, Prompt]:
    """What a request to `path` wants, and its prompt; KeyError where no dialect has the path."""
    name = (ALWAYS | ROUTES[native])[path]
    if path == "/generate_stream":
        body = body | {"stream": True}
    return DIALECTS[name].read(body, model)
