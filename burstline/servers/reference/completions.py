"""The OpenAI completions dialect, as vLLM speaks it: what a body asks for, and the bytes that answer it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import numpy as np
import orjson
from tokenizers import Tokenizer

from burstline.errors import tables_beside
from burstline.servers.reference.scheduler import Sequence
from burstline.servers.reference.tokenizer import TextStream
from burstline.workloads.data_sets import Template
from burstline.workloads.prompts import rng
from burstline.workloads.request import Sampling, WorkloadError

NOT_OFFERED: Mapping[str, list[object]] = tables_beside(__file__, "completions.toml")["not_offered"]
"""Fields that would change the answer, with the values (besides null) under which they would not."""

NULLS = {"logprobs": None, "stop_reason": None, "token_ids": None, "prompt_token_ids": None}
KINDS = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


class ApiError(Exception):
    """A request that is refused: what is wrong, the parameter at fault, the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": KINDS[status], "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies within a model's limits: what cannot be done is an ApiError, never clamped or ignored."""

    served_name: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    template: Template | None = None

    def of_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A chat's body as that of a completion: its messages by the model's template, else a line each."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages must be a list of objects with role and content", "messages")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ApiError(f"a message is {message!r:.60}, expected role and content", "messages")
            if not isinstance(message.get("content") or "", str):
                raise ApiError("content other than text is not offered by the reference engine", "messages")
        n_output = body.get("max_completion_tokens") or body.get("max_tokens")
        if self.template is not None:
            try:
                prompt = self.template(messages)
            except WorkloadError as error:
                raise ApiError(str(error), "messages") from None
            more = {"add_special_tokens": False}  # a template writes them itself
        else:
            prompt = "".join(f"{each['role']}: {each.get('content') or ''}\n" for each in messages)
            prompt, more = f"{prompt}assistant:", {}
        return {**body, "prompt": prompt, "max_tokens": n_output, **more}

    def parse(self, raw: bytes) -> dict[str, Any]:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(f"the body is not JSON: {error}", "body") from None
        if not isinstance(body, dict):
            raise ApiError(f"the body is a JSON {type(body).__name__}, expected an object", "body")
        if body.get("model") not in (None, self.served_name):
            message = f"The model `{body['model']}` does not exist. Valid aliases: {self.served_name}."
            raise ApiError(message, "model", 404)
        return body

    def prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        """The prompt as ids: given as text, as ids, or as a batch of one of either."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            special = body.get("add_special_tokens", True)
            prompt = self.tokenizer.encode(prompt, add_special_tokens=special).ids
        if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
            raise ApiError("prompt must be one text or one list of token ids: one prompt a request", "prompt")
        if not prompt:
            raise ApiError("the prompt is empty: at least one token is needed", "prompt")
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= wrong < self.vocab_size:
            raise ApiError(f"Token id {wrong} is out of vocabulary (0 to {self.vocab_size - 1})", "prompt")
        return prompt

    def sequence(self, body: Mapping[str, Any], unseeded: np.random.Generator) -> Sequence:
        """What is to be computed, drawing from `unseeded` where the body brings no seed."""
        for name, neutral in NOT_OFFERED.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise ApiError(f"{name}={body[name]!r} is not offered by the reference engine", name)
        ids, max_tokens = self.prompt_ids(body), _number(body, "max_tokens", 16, 1, 2**31)
        if (n_tok := len(ids) + max_tokens) > self.max_model_len:
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {len(ids)} input tokens, {n_tok} in "
                "total. Please reduce the length of either.",
                "input_tokens",
            )
        temperature, top_p = _number(body, "temperature", 1.0, 0, 1e6), _number(body, "top_p", 1.0, 1e-9, 1)
        seed = _number(body, "seed", None, -(2**63), 2**64)
        return Sequence(
            ids,
            max_tokens,
            ignore_eos=bool(body.get("ignore_eos")),
            sampling=Sampling(temperature, top_p),
            rng=unseeded if seed is None else rng(seed, "request"),
            arrived_ns=time.monotonic_ns(),
        )


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
    """The bytes of one answer: an event with every token where it is streamed, else all with the last."""

    def __init__(
        self, body: Mapping[str, Any], sequence: Sequence, reader: BodyReader, *, is_chat: bool = False
    ) -> None:
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise ApiError(f"stream_options is {options!r}, expected an object", "stream_options")
        self.streams, self._with_ids = bool(body.get("stream")), bool(body.get("return_token_ids"))
        self._usage_at_end = bool(options.get("include_usage"))
        self._usage_always = self._usage_at_end and bool(options.get("continuous_usage_stats"))
        self._is_chat = is_chat
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if self.streams else "chat.completion"
        now, name = int(datetime.now(UTC).timestamp()), "chatcmpl" if is_chat else "cmpl"
        self._head = {"id": f"{name}-{uuid4().hex[:16]}", "object": kind, "created": now}
        self._head["model"] = reader.served_name
        self._sequence, self._prompt_ids, self._n_output = sequence, list(sequence.ids), 0
        self._decoder, self._text, self._ids = TextStream(reader.tokenizer), "", list[int]()

    def write(self, token: int | None, finish_reason: str | None) -> bytes:
        """What is due once `token` (None: none more) is there; a finish reason ends the answer."""
        if token is not None:
            self._n_output += 1
            self._ids.append(token)
            self._text += self._decoder.push(token, last=finish_reason is not None)
        if not (self.streams or finish_reason):
            return b""
        content: dict[str, Any] = {"text": self._text}
        if self._is_chat:
            content = {"delta" if self.streams else "message": {"role": "assistant", "content": self._text}}
        choice: dict[str, Any] = {"index": 0, **content, "finish_reason": finish_reason, **NULLS}
        if self._with_ids:
            first = self._n_output == len(self._ids)
            choice |= {"token_ids": self._ids, "prompt_token_ids": self._prompt_ids if first else None}
        self._text, self._ids = "", []
        n_in, n_out = len(self._prompt_ids), self._n_output
        usage: dict[str, Any] = {"prompt_tokens": n_in, "total_tokens": n_in + n_out}
        n_cached = self._sequence.n_cached
        usage["completion_tokens"] = n_out
        usage["prompt_tokens_details"] = None if n_cached is None else {"cached_tokens": n_cached}
        answer = {**self._head, "choices": [choice]}
        if self._usage_always or not self.streams:
            answer["usage"] = usage
        if not self.streams:
            return orjson.dumps(answer)
        events = [orjson.dumps(answer)]
        if finish_reason and self._usage_at_end:
            events.append(orjson.dumps({**self._head, "choices": [], "usage": usage}))
        if finish_reason:
            events.append(b"[DONE]")
        return b"".join(b"data: %b\n\n" % event for event in events)
