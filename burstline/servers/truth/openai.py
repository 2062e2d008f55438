"""OpenAI's completions and chats, streamed as vLLM 0.32 streams them (recorded replies, and its source)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burstline.servers.truth.script import Script
from burstline.workloads.request import WorkloadError

Json = dict[str, Any]
Prompt = Sequence[int] | str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants; with `details`, the ids of the tokens too, with `usage`, their count at last.

    A `chat` has messages.
    """

    model: str
    n_prompt_tok: int
    n_output_tok: int
    details: bool = False
    stream: bool = True
    chat: bool = False
    usage: bool = True


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


def n_tok_of(prompt: Any, n_output: Any) -> int:
    """How many tokens a prompt has: as many as ids, or as its text has words. Raises WorkloadError."""
    if not isinstance(prompt, str | list):
        raise WorkloadError(f"the prompt is {prompt!r:.80}; expected a text or a list of token ids")
    if not isinstance(n_output, int) or n_output < 1:
        raise WorkloadError(f"the output length is {n_output!r}; expected a positive number")
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def read(path: str, body: Json, model: str) -> tuple[Wanted, Prompt]:
    """What the body of a completion or a chat asks for, its values checked, and its prompt.

    KeyError where nothing is served at the path.
    """
    chat = {"/v1/completions": False, "/v1/chat/completions": True}[path]
    prompt: Any = text_of(body) if chat else body.get("prompt")
    n_output = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    ids, stream = bool(body.get("return_token_ids")), bool(body.get("stream", False))
    usage = bool((body.get("stream_options") or {}).get("include_usage", False))
    return Wanted(model, n_tok_of(prompt, n_output), n_output, ids, stream, chat, usage), prompt


def text_of(body: Json) -> str:
    """The text of a chat's messages, a line each."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise WorkloadError("no messages; expected a list of role and content")
    contents = [message.get("content") for message in messages]
    parts = [each if isinstance(each, list) else [{"text": each}] for each in contents]
    return "\n".join(str(part.get("text")) for of_one in parts for part in of_one)


def usage_of(wanted: Wanted, n_tok: int) -> Json:
    return {
        "prompt_tokens": wanted.n_prompt_tok,
        "total_tokens": wanted.n_prompt_tok + n_tok,
        "completion_tokens": n_tok,
        "prompt_tokens_details": None,
    }


def error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "scripted_error", "param": None, "code": status}}


def completion(wanted: Wanted, *choices: Json) -> Json:
    names = {"id": "cmpl-truth", "object": "text_completion", "created": 0, "model": wanted.model}
    return {**names, "choices": list(choices)}


def chat(wanted: Wanted, *choices: Json, kind: str = "chat.completion.chunk") -> Json:
    names = {"id": "chatcmpl-truth", "object": kind, "created": 0, "model": wanted.model}
    return {**names, "choices": list(choices)}


def chat_role(wanted: Wanted) -> Json:
    delta = {"role": "assistant", "content": ""}
    return chat(wanted, {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})


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


def completion_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    choice = {"index": 0, "text": script.text * n_tok, "logprobs": None, "finish_reason": "length"}
    return {**completion(wanted, choice), "usage": usage_of(wanted, n_tok)}


def chat_plain(wanted: Wanted, script: Script, n_tok: int) -> Json:
    message = {"role": "assistant", "content": script.text * n_tok}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    whole = chat(wanted, choice, kind="chat.completion")
    return {**whole, "usage": usage_of(wanted, n_tok)}


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


def usage_event(wanted: Wanted, n_tok: int) -> Json:
    return {**(chat if wanted.chat else completion)(wanted), "usage": usage_of(wanted, n_tok)}
