"""The OpenAI completions dialect, as vLLM speaks it: what a body asks for, and the bytes that answer it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from workloads.request import Sampling

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (), "prompt_logprobs": (), "suffix": ("",),
    "stop": ("", []), "stop_token_ids": ([],), "logit_bias": ({},), "top_k": (0, -1), "min_p": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
}  # fmt: skip
"""Fields that would change the answer, with the values (besides null) under which they would not."""


class ApiError(Exception):
    """A request that is refused: HTTP status, vLLM's error type, the parameter at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
        self.status = status
        self.body = orjson.dumps(
            {"error": {"message": message, "type": kinds[status], "param": param, "code": status}}
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must respect."""

    served_name: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion request, checked."""

    prompt_ids: list[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    sampling: Sampling
    seed: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def parse(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}", "body") from None
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON {type(body).__name__}, expected an object", "body")
    return body


def check_model(body: Mapping[str, Any], limits: Limits) -> None:
    if body.get("model") not in (None, limits.served_name):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {limits.served_name}."
        raise ApiError(message, "model", 404)


def read(body: Mapping[str, Any], limits: Limits, tokenizer: Tokenizer) -> Ask:
    """What `body` asks for, or ApiError with the reply vLLM gives; nothing is clamped or ignored silently."""
    check_model(body, limits)
    for name, neutral in NOT_OFFERED.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(f"{name}={body[name]!r} is not offered by the reference engine", name)
    ids = prompt_ids(body, limits, tokenizer)
    max_tokens = _number(body, "max_tokens", 16, 1, 2**31)
    if len(ids) + max_tokens > limits.max_model_len:
        raise ApiError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{max_tokens} output tokens and your prompt contains {len(ids)} input tokens, "
            f"{len(ids) + max_tokens} in total. Please reduce the length of either.",
            "input_tokens",
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(f"stream_options is {options!r}, expected an object", "stream_options")
    sampling = Sampling(
        temperature=_number(body, "temperature", 1.0, 0, 1e6),
        top_p=_number(body, "top_p", 1.0, 1e-9, 1),
    )
    return Ask(
        prompt_ids=ids,
        max_tokens=max_tokens,
        min_tokens=_number(body, "min_tokens", 0, 0, max_tokens),
        ignore_eos=bool(body.get("ignore_eos")),
        sampling=sampling,
        seed=_number(body, "seed", None, -(2**63), 2**64),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
    )


def prompt_ids(body: Mapping[str, Any], limits: Limits, tokenizer: Tokenizer) -> list[int]:
    """The prompt as ids: given as text, as ids, or as a batch of one of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens", True)).ids
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise ApiError(
            "prompt must be one text or one list of token ids (batches: one prompt a request)", "prompt"
        )
    if not prompt:
        raise ApiError("the prompt is empty: at least one token is needed", "prompt")
    if not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
        wrong = next(i for i in prompt if not 0 <= i < limits.vocab_size)
        raise ApiError(f"Token id {wrong} is out of vocabulary (0 to {limits.vocab_size - 1})", "prompt")
    return prompt


def _number(body: Mapping[str, Any], name: str, default: Any, low: float, high: float) -> Any:
    """`body[name]` as the kind of number `default` is (None: an integer); integers are valid floats."""
    value = body.get(name)
    if value is None:
        return default
    kinds = (int, float) if isinstance(default, float) else (int,)
    if type(value) not in kinds or not low <= value <= high:
        raise ApiError(f"{name} is {value!r}, expected {kinds[-1].__name__} from {low} to {high}", name)
    return value


class Writer:
    """The bytes of one answer; what never changes is encoded once, an event is a few joins."""

    def __init__(self, ask: Ask, request_id: str, created: int, served_name: str) -> None:
        self._ask, self.n_output = ask, 0
        self._head = {"id": request_id, "object": "text_completion", "created": created, "model": served_name}
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":'

    def usage(self) -> dict[str, int]:
        n_prompt = len(self._ask.prompt_ids)
        return {
            "prompt_tokens": n_prompt,
            "total_tokens": n_prompt + self.n_output,
            "completion_tokens": self.n_output,
        }

    def event(self, text: str, token: int | None, finish_reason: str | None) -> bytes:
        """One server-sent event with the text and, where asked for, ids and usage so far."""
        first = self.n_output == 0
        self.n_output += token is not None
        ids = b'"prompt_token_ids":null,"token_ids":null'
        if self._ask.return_token_ids:
            prompt = orjson.dumps(self._ask.prompt_ids if first else None)
            ids = b'"prompt_token_ids":%b,"token_ids":[%b]' % (
                prompt,
                b"" if token is None else b"%d" % token,
            )
        reason = b'"%b"' % finish_reason.encode() if finish_reason else b"null"
        shape = b'%b[{"index":0,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,%b}]%b}\n\n'
        return shape % (self._before, orjson.dumps(text), reason, ids, self._running_usage())

    def _running_usage(self) -> bytes:
        return b',"usage":' + orjson.dumps(self.usage()) if self._ask.continuous_usage else b""

    def end(self) -> bytes:
        """The usage event, where asked for, and the terminator."""
        usage = self._before + b'[],"usage":' + orjson.dumps(self.usage()) + b"}\n\n"
        return (usage if self._ask.include_usage else b"") + b"data: [DONE]\n\n"

    def whole(self, text: str, ids: list[int], finish_reason: str) -> bytes:
        """The body of an answer that was not streamed."""
        self.n_output = len(ids)
        with_ids = self._ask.return_token_ids
        choice = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "token_ids": ids if with_ids else None,
            "prompt_token_ids": self._ask.prompt_ids if with_ids else None,
        }
        return orjson.dumps({**self._head, "choices": [choice], "usage": self.usage()})
