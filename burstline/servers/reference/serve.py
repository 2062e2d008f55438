"""From options to a listening server: the model, the cache, the engine, the web server around them."""

import argparse
import dataclasses
import json
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import uvicorn

from burstline.cores import Cores
from burstline.servers.reference import tokenizer
from burstline.servers.reference.api import Api
from burstline.servers.reference.completions import BodyReader
from burstline.servers.reference.engine import InferenceEngine
from burstline.servers.reference.kv import BlockPool, KVCache
from burstline.servers.reference.model import GEMMS, Transformer
from burstline.servers.reference.scheduler import Scheduler
from burstline.servers.reference.steplog import StepLog
from burstline.servers.reference.weights import (
    ModelConfig,
    ModelError,
    assemble,
    random_source,
    safetensors_source,
)
from burstline.workloads.chat import template_of


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
    info = {
        "engine": "reference",
        "version": version("burstline"),
        "model": str(folder or "reference"),
        "served_model_name": name,
        "weights": "safetensors" if stored else f"random, seed {options.seed}",
        "weight_bytes": weights.n_bytes(),
        "dtype": "float32",
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "block_size": options.block_size,
        "num_gpu_blocks": n_blocks,
        "kv_cache_size_tokens": n_blocks * options.block_size,
        "kv_cache_memory_bytes": kv.n_bytes(),
        "cache_dtype": "float32",
        "enable_prefix_caching": options.enable_prefix_caching,
        "threads": options.threads,
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
