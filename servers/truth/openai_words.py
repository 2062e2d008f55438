"""OpenAI's completions and chat as vLLM 0.32 says them (recorded replies, and its source)."""

from servers.truth.ask import Ask, Json, Portion, Prompt, asked, finish_reason
from servers.truth.script import Script
from workloads.request import WorkloadError


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


def openai_error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "scripted_error", "param": None, "code": status}}
