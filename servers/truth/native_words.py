"""The native dialects, as read in the sources: TGI 3.3, LightLLM 1.2 (recorded replies too), SGLang 0.5."""

from servers.truth.ask import Ask, Json, Portion, Prompt, asked, finish_reason
from servers.truth.script import Script
from workloads.request import WorkloadError


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
