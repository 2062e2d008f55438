"""The HTTP side: routes, and one answer's way from the compute thread to its client."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from itertools import count
from uuid import uuid4

import numpy as np
import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from servers.reference import completions, metrics
from servers.reference.completions import ApiError, Ask, Limits, Writer
from servers.reference.engine import Engine, Output
from servers.reference.scheduler import Sequence
from servers.reference.tokenizer import TextStream
from workloads.seeds import rng

JSON = "application/json"


class Answer:
    """One completion on its way out: an ASGI response that ends, and frees its KV blocks, with its client."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, ask: Ask, sequence: Sequence, writer: Writer
    ) -> None:
        self._engine, self._ask, self._sequence, self._writer = engine, ask, sequence, writer
        self._text = TextStream(tokenizer)
        self._queue: asyncio.Queue[tuple[int | None, str | None]] = asyncio.Queue()
        sequence.sink = self._queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(self._watch(receive))
        self._engine.submit(self._sequence)
        try:
            await (self._stream(send) if self._ask.stream else self._whole(scope, receive, send))
        finally:
            watcher.cancel()
            self._engine.abort(self._sequence)

    async def _watch(self, receive: Receive) -> None:
        """Wakes the answer when its client goes: nothing comes after the body but a disconnect."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait((None, "abort"))

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        reason = None
        while reason is None:
            events = []
            token, reason = await self._queue.get()
            events.append(self._event(token, reason))
            while reason is None and not self._queue.empty():  # late: what has piled up goes out at once
                token, reason = self._queue.get_nowait()
                events.append(self._event(token, reason))
            if reason:
                events.append(self._writer.end())
            body = b"".join(events)
            await send({"type": "http.response.body", "body": body, "more_body": reason is None})

    def _event(self, token: int | None, reason: str | None) -> bytes:
        text = "" if token is None else self._text.push(token, last=reason is not None)
        return self._writer.event(text, token, reason)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        ids, texts, reason = [], [], None
        while reason is None:
            token, reason = await self._queue.get()
            if token is not None:
                ids.append(token)
                texts.append(self._text.push(token, last=reason is not None))
        body = self._writer.whole("".join(texts), ids, reason)
        await Response(body, media_type=JSON)(scope, receive, send)


def _dispatch(outputs: list[Output]) -> None:
    for sink, token, reason in outputs:
        sink.put_nowait((token, reason))


class Api:
    """The endpoints; `info` is what `/server_info` shows, `seed` rules requests that bring none."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, limits: Limits, info: Mapping[str, object], seed: int
    ) -> None:
        self._engine, self._tokenizer, self._limits, self._seed = engine, tokenizer, limits, seed
        self._numbers = count()
        cache = {k: str(v) for k, v in info.items() if "block" in k or k.startswith("kv_cache")}
        cache |= {
            "num_gpu_blocks": cache["num_blocks"],
            "enable_prefix_caching": "False",
            "cache_dtype": "float32",
        }
        self._registry = metrics.registry(engine, limits.served_name, cache)
        card = {"id": limits.served_name, "object": "model", "owned_by": "burstline", "root": info["model"]}
        card["max_model_len"] = limits.max_model_len
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/models", lambda _: _json({"object": "list", "data": [card]})),
                Route("/health", lambda _: Response(status_code=503 if engine.failure else 200)),
                Route("/version", lambda _: _json({"version": info["version"]})),
                Route("/server_info", lambda _: _json(info)),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={ApiError: _refuse},
            lifespan=self._lifespan,
        )

    async def _complete(self, request: Request) -> Answer:
        if self._engine.failure:
            raise ApiError(f"the engine has failed: {self._engine.failure}", status=503)
        ask = completions.read(completions.parse(await request.body()), self._limits, self._tokenizer)
        sequence = Sequence(
            list(ask.prompt_ids),
            ask.max_tokens,
            ask.min_tokens,
            ask.ignore_eos,
            ask.sampling,
            self._generator(ask),
            arrived_ns=time.monotonic_ns(),
        )
        now = int(datetime.now(UTC).timestamp())
        writer = Writer(ask, f"cmpl-{uuid4().hex[:16]}", now, self._limits.served_name)
        return Answer(self._engine, self._tokenizer, ask, sequence, writer)

    def _generator(self, ask: Ask) -> np.random.Generator | None:
        if ask.sampling.temperature == 0:
            return None
        return (
            rng(ask.seed, "request")
            if ask.seed is not None
            else rng(self._seed, f"request {next(self._numbers)}")
        )

    async def _tokenize(self, request: Request) -> Response:
        body = completions.parse(await request.body())
        completions.check_model(body, self._limits)
        ids = completions.prompt_ids(body, self._limits, self._tokenizer)
        limit = self._limits.max_model_len
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(outputs: list[Output]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(_dispatch, outputs)

        self._engine.start(deliver)
        yield


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body, error.status, media_type=JSON)


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)
