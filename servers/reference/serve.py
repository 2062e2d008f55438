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

from servers.reference import api, tokenizer
from servers.reference.completions import Limits
from servers.reference.config import ModelConfig, ModelError
from servers.reference.engine import Engine
from servers.reference.kv import BlockPool, KVCache
from servers.reference.model import GEMMS, Model
from servers.reference.scheduler import Scheduler
from servers.reference.steplog import StepLog
from servers.reference.weights import assemble, random_source, safetensors_source

STOP_S = 1
"""How long streams have to send their last event after SIGTERM."""


def serve(options: argparse.Namespace, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; a model that cannot be served ends the process with one line."""
    try:
        engine, info = load(options)
    except (ModelError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"error: {error}")
    folder = Path(options.model) if options.model else None
    config = engine.model.config
    limits = Limits(str(info["served_model_name"]), int(str(info["max_model_len"])), config.vocab_size)
    app = api.Api(engine, tokenizer.load(folder, config.vocab_size), limits, info, options.seed).app
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_S)
    _Server(settings, engine).run(sockets=[listener])


def load(options: argparse.Namespace) -> tuple[Engine, dict[str, object]]:
    """The engine with its weights, and what `/server_info` says of it."""
    folder = Path(options.model) if options.model else None
    config = ModelConfig()
    if folder:
        config = ModelConfig.from_json(json.loads((folder / "config.json").read_text()))
    max_model_len = options.max_model_len or min(config.max_position_embeddings, options.kv_tokens)
    n_blocks = options.kv_tokens // options.block_size
    for limit, name in (
        (config.max_position_embeddings, "the model's"),
        (n_blocks * options.block_size, "the KV cache's"),
    ):
        if max_model_len > limit:
            raise ModelError(f"--max-model-len {max_model_len} is above {name} {limit} tokens; lower it")
    stored = safetensors_source(folder) if folder else None
    weights = assemble(config, stored or random_source(options.seed))
    kv = KVCache(config, n_blocks, options.block_size)
    scheduler = Scheduler(
        BlockPool(n_blocks), options.block_size, options.max_num_seqs, options.max_num_batched_tokens
    )
    info: dict[str, object] = {
        "engine": "reference",
        "version": version("burstline"),
        "model": str(folder) if folder else "reference",
        "served_model_name": options.served_model_name or (folder.resolve().name if folder else "reference"),
        "weights": "safetensors" if stored else f"random, seed {options.seed}",
        "weight_bytes": weights.n_bytes(tied=config.tie_word_embeddings),
        "dtype": "float32",
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "block_size": options.block_size,
        "num_blocks": n_blocks,
        "kv_cache_size_tokens": n_blocks * options.block_size,
        "kv_cache_memory_bytes": kv.n_bytes(),
        "threads": options.threads,
        "config": dataclasses.asdict(config),
    }
    log = StepLog(options.step_log, {**info, "gemms": GEMMS}) if options.step_log else None
    return Engine(Model(config, weights), kv, scheduler, log), info


class _Server(uvicorn.Server):
    """Says when it listens, and on a signal ends open streams before their connections."""

    def __init__(self, settings: uvicorn.Config, engine: Engine) -> None:
        super().__init__(settings)
        self._engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            sys.stdout.write(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
            sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.stop()
        super().handle_exit(sig, frame)
