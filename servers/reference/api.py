"""The HTTP side: routes, and one answer's way from the compute thread to its client."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from itertools import count
from uuid import uuid4

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


def build(
    engine: Engine, tokenizer: Tokenizer, limits: Limits, info: Mapping[str, object], seed: int
) -> Starlette:
    """The web application; `info` is what `/server_info` shows. `seed` rules requests that bring none."""
    numbers = count()
    blocks = {k: str(info[k]) for k in ("block_size", "kv_cache_size_tokens", "kv_cache_memory_bytes")}
    cache = {
        **blocks,
        "num_gpu_blocks": str(info["num_blocks"]),
        "enable_prefix_caching": "False",
        "cache_dtype": "float32",
    }
    registry = metrics.registry(engine, limits.served_name, cache)

    async def complete(request: Request) -> Answer:
        if engine.failure:
            raise ApiError(f"the engine has failed: {engine.failure}", status=503)
        ask = completions.read(completions.parse(await request.body()), limits, tokenizer)
        stream = "request" if ask.seeded else f"request {next(numbers)}"
        sequence = Sequence(
            list(ask.prompt_ids), ask.max_tokens, ask.min_tokens, ask.ignore_eos, ask.sampling,
            rng(ask.sampling.seed if ask.seeded else seed, stream) if ask.sampling.temperature > 0 else None,
            arrived_ns=time.monotonic_ns(),
        )  # fmt: skip
        now = int(datetime.now(UTC).timestamp())
        writer = Writer(ask, f"cmpl-{uuid4().hex[:16]}", now, limits.served_name)
        return Answer(engine, tokenizer, ask, sequence, writer)

    async def tokenize(request: Request) -> Response:
        body = completions.parse(await request.body())
        completions.check_model(body, limits)
        ids = completions.prompt_ids(body, limits, tokenizer)
        return _json(
            {"count": len(ids), "max_model_len": limits.max_model_len, "tokens": ids, "token_strs": None}
        )

    async def models(_: Request) -> Response:
        card = {"id": limits.served_name, "object": "model", "owned_by": "burstline", "root": info["model"]}
        return _json({"object": "list", "data": [card | {"max_model_len": limits.max_model_len}]})

    async def health(_: Request) -> Response:
        return Response(status_code=503 if engine.failure else 200)

    async def version(_: Request) -> Response:
        return _json({"version": info["version"]})

    async def server_info(_: Request) -> Response:
        return _json(info)

    async def show_metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return Response(error.body, error.status, media_type=JSON)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(outputs: list[Output]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(_dispatch, outputs)

        engine.start(deliver)
        yield

    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/version", version),
        Route("/server_info", server_info),
        Route("/metrics", show_metrics),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: refuse}, lifespan=lifespan)


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)
