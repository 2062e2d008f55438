"""Replies of engines that are not at hand, put together from their source code and documentation.

Where real bytes were recorded, `tests/golden` has them. Versions: TGI 3.3 (axum), SGLang 0.5.23,
llama.cpp of 2026, TensorRT-LLM 1.2.
"""

import json
from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

EVENT_STREAM = "text/event-stream"
JSON = "application/json"


def http(status: int, body: bytes, content_type: str = JSON) -> bytes:
    """A reply whose length is told."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(chunks: Iterable[bytes]) -> bytes:
    """A whole stream, one chunk per piece."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {EVENT_STREAM}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def stream(*events: Json | str) -> bytes:
    """A whole stream of `data: ` events, one chunk each; a str is sent as it is."""
    return chunked(
        event.encode() if isinstance(event, str) else b"data: " + dumped(event) + b"\n\n" for event in events
    )


def plain(status: int, answer: Json) -> bytes:
    return http(status, dumped(answer))


def cut(raw: bytes, n_chunks: int) -> bytes:
    """What had come of a chunked reply when the server died after so many chunks."""
    at = raw.index(b"\r\n\r\n") + 4
    for _ in range(n_chunks):
        size_end = raw.index(b"\r\n", at)
        at = size_end + 2 + int(raw[at:size_end], 16) + 2
    return raw[:at]


def dumped(answer: Json) -> bytes:
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()


DONE = "data: [DONE]\n\n"


def tgi_event(index: int, finish: str | None = None, n_prompt: int = 17) -> Json:
    token = {"id": 29871 + index, "text": " a", "logprob": -0.5, "special": False}
    details = {
        "finish_reason": finish,
        "generated_tokens": index,
        "seed": None,
        "input_length": n_prompt,
    }
    return {
        "index": index,
        "token": token,
        "generated_text": " a" * index if finish else None,
        "details": details if finish else None,
    }


def tgi_stream(n_tok: int, finish: str = "length") -> bytes:
    """With the comment that keeps a silent connection alive."""
    events: list[Json | str] = [tgi_event(i) for i in range(1, n_tok)]
    return stream(*events, ":\n\n", tgi_event(n_tok, finish))


def tgi_error(message: str, kind: str) -> Json:
    return {"error": message, "error_type": kind}


def sglang_event(n_tok: int, n_new: int, finish: Json | None = None, *, incremental: bool = False) -> Json:
    meta = {
        "id": "4f9c",
        "finish_reason": finish,
        "prompt_tokens": 17,
        "weight_version": "default",
        "completion_tokens": n_tok,
        "cached_tokens": 1,
        "num_retractions": 0,
    }
    ids = list(range(n_tok - n_new, n_tok)) if incremental else list(range(n_tok))
    return {"text": " a" * len(ids), "output_ids": ids, "meta_info": meta}


def sglang_stream(*n_toks: int, incremental: bool = False, finish: str = "length") -> bytes:
    """Events after which so many tokens are there, in rising order."""
    reason = (
        {"type": "length", "length": n_toks[-1]} if finish == "length" else {"type": finish, "matched": 2}
    )
    events = [
        sglang_event(n, n - before, reason if n == n_toks[-1] else None, incremental=incremental)
        for before, n in zip((0, *n_toks), n_toks, strict=False)
    ]
    return stream(*events, DONE)


def llama_event(token: int) -> Json:
    return {
        "index": 0,
        "content": " a",
        "tokens": [token],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": token,
        "tokens_evaluated": 17,
    }


def llama_last(n_tok: int, stop_type: str = "limit", *, truncated: bool = False) -> Json:
    return {
        "index": 0,
        "content": "",
        "tokens": [],
        "id_slot": 0,
        "stop": True,
        "model": "m",
        "tokens_predicted": n_tok,
        "tokens_evaluated": 17,
        "has_new_line": False,
        "truncated": truncated,
        "stop_type": stop_type,
        "stopping_word": "",
        "tokens_cached": 17 + n_tok,
        "timings": {
            "cache_n": 0,
            "prompt_n": 17,
            "prompt_ms": 3.1,
            "predicted_n": n_tok,
            "predicted_ms": 9.2,
        },
    }


def llama_stream(n_tok: int, stop_type: str = "limit") -> bytes:
    return stream(*(llama_event(i) for i in range(1, n_tok + 1)), llama_last(n_tok, stop_type))


def completion_event(text: str, finish: str | None = None) -> Json:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def usage_event(n_tok: int, n_prompt: int = 17) -> Json:
    usage = {"prompt_tokens": n_prompt, "completion_tokens": n_tok, "total_tokens": n_prompt + n_tok}
    return completion_event("") | {"choices": [], "usage": usage}


def chat_event(delta: Json, finish: str | None = None) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }


def flat_error(status: int, message: str) -> bytes:
    return plain(status, {"object": "error", "message": message, "type": "BadRequestError", "code": status})
