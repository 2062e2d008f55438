"""The reference engine's web server: options become a model, a cache and an engine, with routes around."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from burstline.compute_threads import Cores
from burstline.servers.reference import tokenizer
from burstline.servers.reference.completions import ApiError, BodyReader, Writer
from burstline.servers.reference.engine import InferenceEngine, Output, write_trace
from burstline.servers.reference.model import GEMMS, KVCache, Transformer
from burstline.servers.reference.scheduler import BlockPool, Scheduler, Sequence
from burstline.servers.reference.steplog import StepLog
from burstline.servers.reference.weights import (
    ModelConfig,
    ModelError,
    assemble,
    random_source,
    safetensors_source,
)
from burstline.workloads.chat import template_of
from burstline.workloads.prompts import rng

PROMETHEUS = {"content-type": CONTENT_TYPE_LATEST}


class Api:
    """The endpoints; `info` is what `/server_info` shows, `seed` rules requests that bring none."""

    def __init__(
        self, engine: InferenceEngine, reader: BodyReader, info: Mapping[str, Any], seed: int
    ) -> None:
        self._engine, self._reader, self._seed, self._n_asked = engine, reader, seed, 0
        card = {"id": reader.served_name, "object": "model", "owned_by": "burstline", "root": info["model"]}
        card["max_model_len"] = reader.max_model_len
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Metrics(engine, info))
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/start_profile", self._start_profile, methods=["POST"]),
                Route("/stop_profile", self._stop_profile, methods=["POST"]),
                Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [card]})),
                Route("/health", lambda _: Response(status_code=503 if engine.failure else 200)),
                Route("/version", lambda _: JSONResponse({"version": info["version"]})),
                Route("/server_info", lambda _: JSONResponse(info)),
                Route("/metrics", lambda _: Response(generate_latest(registry), headers=PROMETHEUS)),
            ],
            exception_handlers={ApiError: _refuse},
            lifespan=self._lifespan,
        )

    async def _complete(self, request: Request) -> Response:
        if self._engine.failure:
            raise ApiError(f"the engine has failed: {self._engine.failure}", status=503)
        body = self._reader.parse(await request.body())
        if is_chat := request.url.path.endswith("/chat/completions"):
            body = self._reader.of_chat(body)
        self._n_asked += 1
        sequence = self._reader.sequence(body, unseeded=rng(self._seed, f"request {self._n_asked}"))
        writer = Writer(body, sequence, self._reader, is_chat=is_chat)
        kind = "text/event-stream" if writer.streams else "application/json"
        return StreamingResponse(self._answer(sequence, writer), media_type=kind)

    async def _answer(self, sequence: Sequence, writer: Writer) -> AsyncIterator[bytes]:
        """Closed where the client goes; the sequence, and its KV blocks, go with it."""
        sequence.sink = queue = asyncio.Queue[tuple[int | None, str | None]]()
        self._engine.submit(sequence)
        reason = None
        try:
            while reason is None:
                token, reason = await queue.get()
                due = [writer.write(token, reason)]
                while not queue.empty():  # late: what has piled up goes out at once
                    token, reason = queue.get_nowait()
                    due.append(writer.write(token, reason))
                yield b"".join(due)
        finally:
            self._engine.abort(sequence)

    async def _tokenize(self, request: Request) -> Response:
        ids = self._reader.prompt_ids(self._reader.parse(await request.body()))
        limit = self._reader.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    async def _start_profile(self, request: Request) -> Response:
        self._engine.profiled, self._profile_to = [], Path((await request.json())["output_dir"])
        return Response()

    async def _stop_profile(self, _: Request) -> Response:
        steps, self._engine.profiled = self._engine.profiled, None
        if steps is not None:
            write_trace(self._profile_to, steps, self._engine.model.weights)
        return Response()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(outputs: list[Output]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: no client is left
                loop.call_soon_threadsafe(_hand_out, outputs)

        self._engine.start(deliver)
        yield


def _hand_out(outputs: list[Output]) -> None:
    for sink, token, reason in outputs:
        sink.put_nowait((token, reason))


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status)


CACHE = (
    "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_memory_bytes", "cache_dtype",
    "enable_prefix_caching",
)  # fmt: skip
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(Collector):
    """What the engine counts; `info` has the model's name, and what becomes `vllm:cache_config_info`."""

    def __init__(self, engine: InferenceEngine, info: Mapping[str, object]) -> None:
        self._engine, self._cache = engine, {name: str(info[name]) for name in CACHE}
        self._labels = {"engine": "0", "model_name": str(info["served_model_name"])}

    def collect(self) -> Iterator[Metric]:
        engine, scheduler, pool = self._engine, self._engine.scheduler, self._engine.scheduler.pool
        used = 1 - pool.n_free / pool.n_blocks
        n_prompt_tok, n_output_tok = engine.n_tok["prompt"], engine.n_tok["generation"]
        ended = [({"finished_reason": r}, engine.n_finished[r]) for r in ("stop", "length", "abort", "error")]
        for family, name, text, samples in (
            (Gauge, "num_requests_running", "Requests being computed.", [({}, len(scheduler.running))]),
            (Gauge, "num_requests_waiting", "Requests not yet computed.", [({}, len(scheduler.waiting))]),
            (Gauge, "kv_cache_usage_perc", "KV cache in use, 1 is all of it.", [({}, used)]),
            (Gauge, "cache_config_info", "The KV cache.", [(self._cache, 1)]),
            (Counter, "num_preemptions", "Requests that lost their blocks.", [({}, scheduler.n_preemptions)]),
            (Counter, "prompt_tokens", "Prompt tokens up to a first token.", [({}, n_prompt_tok)]),
            (Counter, "prefix_cache_queries", "Prompt tokens looked up.", [({}, scheduler.n_queried_tok)]),
            (Counter, "prefix_cache_hits", "Prompt tokens found cached.", [({}, scheduler.n_hit_tok)]),
            (Counter, "generation_tokens", "Tokens generated.", [({}, n_output_tok)]),
            (Counter, "request_success", "Requests ended.", ended),
        ):
            metric = family(f"vllm:{name}", text, labels=[*self._labels, *samples[0][0]])
            for labels, value in samples:
                metric.add_metric([*self._labels.values(), *labels.values()], value)
            yield metric
        yield from (*engine.ttft.collect(), *engine.e2e.collect())


def serve(options: argparse.Namespace, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; a model that cannot be served ends the process with one line."""
    try:
        api, engine = _load(options)
    except (ModelError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"error: {error}")
    # A second is what open streams have to send their last event in after SIGTERM.
    settings = uvicorn.Config(api.app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    listener.listen(settings.backlog)
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
    sys.stdout.flush()
    _Server(settings, engine).run(sockets=[listener])


def _load(options: argparse.Namespace) -> tuple[Api, InferenceEngine]:
    folder = Path(options.model) if options.model else None
    config = ModelConfig()
    if folder:
        config = ModelConfig.from_json(json.loads((folder / "config.json").read_text("utf-8")))
    n_blocks = options.kv_tokens // options.block_size
    limits = {"the model's": config.max_position_embeddings, "the KV cache's": n_blocks * options.block_size}
    max_model_len = options.max_model_len or min(limits.values())
    for whose, limit in limits.items():
        if max_model_len > limit:
            raise ModelError(f"--max-model-len {max_model_len} is above {whose} {limit} tokens; lower it")
    stored = safetensors_source(folder) if folder else None
    weights = assemble(config, stored or random_source(options.seed))
    kv = KVCache(config, n_blocks, options.block_size)
    name = options.served_model_name or (folder.resolve().name if folder else "reference")
    stated = ("max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching", "threads")
    info = {
        "engine": "reference",
        "version": version("burstline"),
        "model": str(folder or "reference"),
        "served_model_name": name,
        "weights": "safetensors" if stored else f"random, seed {options.seed}",
        "weight_bytes": weights.n_bytes(),
        "dtype": "float32",
        "max_model_len": max_model_len,
        **{name: getattr(options, name) for name in stated},
        "num_gpu_blocks": n_blocks,
        "kv_cache_size_tokens": n_blocks * options.block_size,
        "kv_cache_memory_bytes": kv.n_bytes(),
        "cache_dtype": "float32",
        "config": dataclasses.asdict(config),
    }
    log = StepLog(options.step_log, {**info, "gemms": GEMMS}) if options.step_log else None
    pool, budget = BlockPool(n_blocks, caches=options.enable_prefix_caching), options.max_num_batched_tokens
    scheduler = Scheduler(pool, options.block_size, options.max_num_seqs, budget)
    engine = InferenceEngine(Transformer(config, weights, Cores(options.threads)), kv, scheduler, log)
    template = template_of(folder) if folder else None
    tokens = tokenizer.load(folder, config.vocab_size)
    reader = BodyReader(name, max_model_len, config.vocab_size, tokens, template)
    return Api(engine, reader, info, options.seed), engine


class _Server(uvicorn.Server):
    """On a signal it ends open streams before their connections."""

    def __init__(self, settings: uvicorn.Config, engine: InferenceEngine) -> None:
        super().__init__(settings)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.stop()
        super().handle_exit(sig, frame)
