"""A tiny model, and an engine around it that is stepped by hand."""

from collections.abc import Callable

import pytest

from burstline.servers.reference.engine import InferenceEngine
from burstline.servers.reference.model import KVCache, Transformer
from burstline.servers.reference.scheduler import BlockPool, Scheduler
from burstline.servers.reference.weights import ModelConfig, assemble, random_source


@pytest.fixture(scope="session")
def model() -> Transformer:
    config = ModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8, vocab_size=300,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Transformer(config, assemble(config, random_source(0)))


@pytest.fixture
def make_engine(model: Transformer) -> Callable[..., InferenceEngine]:
    def make(
        n_blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 32, **more
    ) -> InferenceEngine:
        scheduler = Scheduler(BlockPool(n_blocks), block_size, seqs, budget)
        return InferenceEngine(model, KVCache(model.config, n_blocks, block_size), scheduler, **more)

    return make
