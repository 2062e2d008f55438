"""A tiny model, and an engine around it that is stepped by hand."""

from collections.abc import Callable

import pytest

from servers.reference.engine import Engine
from servers.reference.kv import BlockPool, KVCache
from servers.reference.model import Model
from servers.reference.scheduler import Scheduler
from servers.reference.weights import ModelConfig, assemble, random_source


@pytest.fixture(scope="session")
def model() -> Model:
    config = ModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8, vocab_size=300,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Model(config, assemble(config, random_source(0)))


@pytest.fixture
def make_engine(model: Model) -> Callable[..., Engine]:
    def make(n_blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 32, **more) -> Engine:
        scheduler = Scheduler(BlockPool(n_blocks), block_size, seqs, budget)
        return Engine(model, KVCache(model.config, n_blocks, block_size), scheduler, **more)

    return make
