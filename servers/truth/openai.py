"""OpenAI's completions and chat, spoken as vLLM 0.32 speaks them (recorded replies, and its source)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burstline.servers.truth.script import Script
from burstline.workloads.request import WorkloadError

Json = dict[str, Any]
Prompt = Sequence[int] | str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants. `details` is the dialect's own extra, here the ids of the tokens."""

    dialect: str
    model: str
    stream: bool
    n_prompt_tok: int
    n_output_tok: int
    details: bool = False


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


@dataclass(frozen=True, slots=True)
class Dialect:
    """How requests to one path are read and answered: a token's event, a whole reply, an error.

    `usage` makes the event that counts, None where the dialect has none. `done`: a stream ends with `[DONE]`.
    """

    read: Callable[[Json, str], tuple[Wanted, Prompt]]
    token: Callable[[Wanted, Any, Portion], Json]
    plain: Callable[[Wanted, Any, int], Json]
    error: Callable[[str, int], Json]
    usage: Callable[[Wanted, int], Json] | None = None
    done: bool = False


def generation(
    dialect: str, body: Json, model: str, prompt: Any, n_output: Any, details: Any
) -> tuple[Wanted, Prompt]:
    """What a request wants, its values checked, and its prompt.

    A prompt has as many tokens as it has ids, or as its text has words.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise WorkloadError(f"the prompt is {prompt!r:.80}; expected a text or a list of token ids")
    if not isinstance(n_output, int) or n_output < 1:
        raise WorkloadError(f"the output length is {n_output!r}; expected a positive number")
    n_prompt_tok = len(prompt.split() if isinstance(prompt, str) else prompt)
    stream = bool(body.get("stream", False))
    return Wanted(dialect, model, stream, n_prompt_tok, n_output, bool(details)), prompt


def usage_of(wanted: Wanted, n_tok: int) -> Json:
    return {
        "prompt_tokens": wanted.n_prompt_tok,
        "total_tokens": wanted.n_prompt_tok + n_tok,
        "completion_tokens": n_tok,
        "prompt_tokens_details": None,
    }


def error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "scripted_error", "param": None, "code": status}}


def read_completion(body: Json, model: str) -> tuple[Wanted, Prompt]:
    n_output, details = body.get("max_tokens", 16), body.get("return_token_ids")
    return generation("completions", body, model, body.get("prompt"), n_output, details)


def completion(wanted: Wanted, *choices: Json) -> Json:
    names = {"id": "cmpl-truth", "object": "text_completion", "created": 0, "model": wanted.model}
    return {**names, "choices": list(choices)}


def completion_token(wanted: Wanted, script: Script, portion: Portion) -> Json:
    choice = {
        "index": 0,
        "text": script.text * portion.n,
        "logprobs": None,
        "finish_reason": "length" if portion.last else None,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": portion.ids if wanted.details else None,
    }
    return completion(wanted, choice)


def completion_usage(wanted: Wanted, n_tok: int) -> Json:
    return {**completion(wanted), "usage": usage_of(wanted, n_tok)}


def completion_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    choice = {"index": 0, "text": script.text * n_tok, "logprobs": None, "finish_reason": "length"}
    return {**completion(wanted, choice), "usage": usage_of(wanted, n_tok)}


def read_chat(body: Json, model: str) -> tuple[Wanted, Prompt]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise WorkloadError("no messages; expected a list of role and content")
    text = "\n".join(str(message.get("content")) for message in messages)
    n_output = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    return generation("chat", body, model, text, n_output, body.get("return_token_ids"))


def chat(wanted: Wanted, *choices: Json, kind: str = "chat.completion.chunk") -> Json:
    names = {"id": "chatcmpl-truth", "object": kind, "created": 0, "model": wanted.model}
    return {**names, "choices": list(choices)}


def chat_token(wanted: Wanted, script: Script, portion: Portion) -> Json:
    choice: Json = {
        "index": 0,
        "delta": {"content": script.text * portion.n},
        "logprobs": None,
        "finish_reason": "length" if portion.last else None,
    }
    if wanted.details:
        choice["token_ids"] = portion.ids
    return chat(wanted, choice)


def chat_usage(wanted: Wanted, n_tok: int) -> Json:
    return {**chat(wanted), "usage": usage_of(wanted, n_tok)}


def chat_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    message = {"role": "assistant", "content": script.text * n_tok}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return {**chat(wanted, choice, kind="chat.completion"), "usage": usage_of(wanted, n_tok)}


DIALECTS: dict[str, Dialect] = {
    "completions": Dialect(
        read_completion, completion_token, completion_plain, error, completion_usage, done=True
    ),
    "chat": Dialect(read_chat, chat_token, chat_plain, error, chat_usage, done=True),
}
PATHS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
