"""Any OpenAI-compatible endpoint: probed for what it accepts, nothing is assumed.

Sent are the fields of OpenAI's own schema. What lies beyond it (token ids for a prompt, `ignore_eos`, usage
in a stream) is tried once, when the server is there, and left out of every request where it is refused.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import orjson

from burstline.servers.engine import Engine
from burstline.servers.identity import Capabilities, Identity
from burstline.servers.introspection import first_model, json_at
from burstline.servers.launch import Launch, LaunchOptions
from burstline.servers.messages import WITH_TOKENS, Ask, Call, EngineError, Event, Get, Reply, Target
from burstline.servers.openai import COMPLETION_LIMIT, fields_of, post
from burstline.servers.replies import Tally
from burstline.workloads.request import Request

IDS, IGNORE_EOS, USAGE, USAGE_EACH = "token ids", "ignore_eos", "usage", "usage in every event"
"""Extensions of OpenAI's schema that a server may support: the words in `Target.takes`."""
N_RETRIES, RETRY_S = 5, 0.5
N_FORCED_TOK = 8
"""With this many tokens, `ignore_eos` is assumed to work."""


class Endpoint(Engine):
    """Attach only. Prompts go as token ids where the server takes them, as text where it does not."""

    capabilities = Capabilities(
        token_id_prompts=False,
        forced_output_length=False,
        prefix_cache_control=False,
        per_event_tok="no",
        queue_depth=False,
    )
    attach_only = True
    tokenizes = True  # many an OpenAI-compatible endpoint is a vLLM or an SGLang
    probe_path: str | None = None  # some have not even a list of models
    metrics_path: str | None = None
    how_to_get = "attach to one: --url URL, the key in BURSTLINE_API_KEY"

    def __init__(self, style: Literal["completions", "chat"]) -> None:
        self.name = "openai" if style == "completions" else "openai-chat"
        self.title = f"OpenAI-compatible endpoint ({style})"
        self.speaks = self._style = style

    def launch(self, options: LaunchOptions) -> Launch:
        raise EngineError(
            f"an OpenAI-compatible endpoint cannot be started for {options.model}: attach to it by its URL, "
            "or name the engine that serves it"
        )

    def identify(self, get: Get, log: str) -> Identity:
        del log
        models = json_at(get, "/v1/models")
        model = first_model(models)
        return Identity(
            engine=self.name,
            model=model.get("id"),
            max_model_len=model.get("max_model_len"),
            raw={"models": models},
        )

    def probe(self, ask: Ask, target: Target) -> tuple[Target, tuple[str, ...]]:
        """Tries each extra in turn (some servers have one slot), with usage, which says if it was done."""
        longest = 0

        def works(takes: tuple[str, ...], request: Request, does_it: Callable[[Reply], bool]) -> bool | None:
            """Whether the server does it; None where it failed each time, which says nothing."""
            nonlocal longest
            call = self.encode(request, replace(target, takes=(*target.takes, *takes)))
            for attempt in range(N_RETRIES + 1):  # a server that is busy or fails has refused nothing
                time.sleep(RETRY_S * min(attempt, 1))
                raw = ask(call)
                if raw.status < 500 and raw.status != HTTPStatus.TOO_MANY_REQUESTS:
                    break
            reply = self.decode(raw)
            came = sum(event.kind in WITH_TOKENS for event in reply.events)  # each has a token or more
            longest = max(longest, came, reply.n_output_usage or 0)
            return None if raw.status >= 500 else raw.ok and reply.error is None and does_it(reply)

        text = Request(0, None, "Hello", 1, N_FORCED_TOK, ignore_eos=True)
        ids = Request(0, array("I", [10, 11, 12]), None, 3, 1, ignore_eos=False)
        found = {USAGE: works((USAGE,), text, lambda reply: reply.n_output_usage is not None)}
        usage = (USAGE,) if found[USAGE] else ()
        trials: dict[str, tuple[Request, Callable[[Reply], bool]]] = {
            USAGE_EACH: (text, lambda reply: any(event.n_tok for event in reply.events)),
            IGNORE_EOS: (text, lambda reply: reply.n_output_usage == N_FORCED_TOK),
            IDS: (ids, lambda reply: reply.n_prompt_tok in (None, 3)),
        }
        if self._style == "chat":
            del trials[IDS]
        found |= {extra: works((*usage, extra), *trial) for extra, trial in trials.items()}
        target = replace(target, takes=(*target.takes, *usage, *(extra for extra in trials if found[extra])))
        limit = COMPLETION_LIMIT if COMPLETION_LIMIT in target.takes else "max_tokens"
        lacks = [extra for extra in (IDS, IGNORE_EOS, USAGE) if extra not in target.takes]
        failed = [extra for extra in lacks if found.get(extra, False) is None]
        refused = [extra for extra in lacks if extra not in failed]
        notes = [f"{target.url} does not take: {', '.join(refused)}"] if refused else []
        if failed:
            notes.append(f"{target.url} failed each time it was asked for: {', '.join(failed)}, left out")
        if longest > N_FORCED_TOK:
            said = f"it sent {longest} tokens where at most {N_FORCED_TOK} were asked for"
            notes.append(f"{target.url} ignores {limit}: {said}, so lengths are its own")
        elif limit == COMPLETION_LIMIT:
            notes.append(f"{target.url} refuses max_tokens: requests say {limit}")
        return target, tuple(notes)

    def capabilities_of(self, target: Target) -> Capabilities:
        return replace(
            self.capabilities,
            token_id_prompts=IDS in target.takes,
            forced_output_length=IGNORE_EOS in target.takes,
            per_event_tok="usage" if USAGE_EACH in target.takes else "no",
        )

    def take(self, tally: Tally, answer: Any, end: int) -> Event:
        tally.own_length = True  # that it took `ignore_eos` or `max_tokens` once does not say what it does
        return super().take(tally, answer, end)

    def encode(self, request: Request, target: Target) -> Call:
        fields = fields_of(request, target)
        if COMPLETION_LIMIT in target.takes:
            fields[COMPLETION_LIMIT] = fields.pop("max_tokens")
        if request.ignore_eos and IGNORE_EOS in target.takes:
            fields["ignore_eos"] = True
        if USAGE in target.takes:
            each = {"continuous_usage_stats": True} if USAGE_EACH in target.takes else {}
            fields["stream_options"] = {"include_usage": True} | each
        if request.messages is not None:
            messages: object = orjson.Fragment(request.messages)
        elif self._style == "chat":
            messages = [{"role": "user", "content": _prompt(request, target)}]
        else:
            return post(target, "/v1/completions", fields | {"prompt": _prompt(request, target)})
        return post(target, "/v1/chat/completions", fields | {"messages": messages})


completions, chat = partial(Endpoint, "completions"), partial(Endpoint, "chat")


def _prompt(request: Request, target: Target) -> str | list[int]:
    if request.prompt_text is not None:
        return request.prompt_text
    if IDS in target.takes and request.prompt_ids is not None:
        return list(request.prompt_ids)
    raise EngineError(f"{target.url} accepts only text, and this prompt is token ids")
