"""Which dialect a path speaks, and what each dialect is made of."""

from collections.abc import Callable
from dataclasses import dataclass

from servers.truth import native_words as native
from servers.truth import openai_words as openai
from servers.truth.ask import Ask, Json, Portion, Prompt
from servers.truth.script import Script


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
        read=openai.read_completion,
        token=openai.completion_token,
        plain=openai.completion_plain,
        error=openai.openai_error,
        usage=openai.completion_usage,
        role=openai.completion_role,
        done=True,
    ),
    "chat": Dialect(
        read=openai.read_chat,
        token=openai.chat_token,
        plain=openai.chat_plain,
        error=openai.openai_error,
        usage=openai.chat_usage,
        role=openai.chat_role,
        done=True,
    ),
    "tgi": Dialect(
        read=native.read_tgi, token=native.tgi_token, plain=native.tgi_plain, error=native.tgi_error
    ),
    "lightllm": Dialect(
        read=native.read_lightllm,
        token=native.lightllm_token,
        plain=native.lightllm_plain,
        error=native.lightllm_error,
        space=False,
        counts_prompt=True,
    ),
    "sglang": Dialect(
        read=native.read_sglang,
        token=native.sglang_token,
        plain=native.sglang_plain,
        error=native.sglang_error,
        done=True,
        counts_prompt=True,
    ),
}

ROUTES: dict[str, dict[str, str]] = {
    "openai": {},
    "tgi": {"/generate": "tgi", "/generate_stream": "tgi", "/": "tgi"},
    "lightllm": {"/generate": "lightllm", "/generate_stream": "lightllm"},
    "sglang": {"/generate": "sglang"},
}
"""The native paths of each engine; `/v1/completions` and `/v1/chat/completions` are always served."""


def read_request(path: str, body: Json, model: str, native: str) -> tuple[Ask, Prompt]:
    """What a request to `path` wants, and its prompt; KeyError where no dialect has the path."""
    routes = {"/v1/completions": "completions", "/v1/chat/completions": "chat"} | ROUTES[native]
    name = routes[path]
    if path == "/generate_stream":
        body = body | {"stream": True}
    return DIALECTS[name].read(body, model)
