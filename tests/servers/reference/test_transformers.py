"""The reference engine's logits against transformers' LlamaForCausalLM on the same weights."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from burstline.compute_threads import Cores
from burstline.servers.reference.model import Chunk, KVCache, Transformer
from burstline.servers.reference.weights import ModelConfig, assemble, safetensors_source

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

BLOCK = 16
SHAPES = {
    "grouped and tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "not grouped, own head": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 5e5},
    "odd head size, one KV head": {"num_key_value_heads": 1, "head_dim": 48},
}


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Imported where a test runs: collecting the quick suite would wait seconds for it."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torch, transformers):
    """The same random model twice: transformers' and, through its saved folder, ours. Shards included."""
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **shape, vocab_size=1000, initializer_range=0.1, **SHAPES[request.param]
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # norms that are all 1 would hide that they are used
        for name, weight in theirs.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    theirs.save_pretrained(folder, max_shard_size="4MB")
    ours_config = ModelConfig.from_json(json.loads((folder / "config.json").read_text()))
    source = safetensors_source(folder)
    assert source is not None
    return theirs, Transformer(ours_config, assemble(ours_config, source), Cores(2))


def their_logits(model, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids[None].astype(np.int64))).logits[0].numpy()


def table(first: int, n_tok: int) -> list[int]:
    """Blocks of one sequence, in no order."""
    return [int(b) for b in np.random.default_rng(first).permutation(-(-n_tok // BLOCK)) + first]


def test_a_whole_prompt_gives_transformers_logits(pair) -> None:
    theirs, ours = pair
    ids = np.random.default_rng(1).integers(0, 1000, 300)
    kv = KVCache(ours.config, 64, BLOCK)
    got = ours.logits(ours.forward([Chunk(ids, 0, table(0, 300))], kv))
    assert np.abs(got - their_logits(theirs, ids)).max() < 1e-4


def test_chunked_prefill_gives_transformers_logits(pair) -> None:
    theirs, ours = pair
    ids = np.random.default_rng(2).integers(0, 1000, 300)
    kv, blocks, parts = KVCache(ours.config, 64, BLOCK), table(0, 300), []
    for low, high in ((0, 7), (7, 8), (8, 150), (150, 299), (299, 300)):
        parts.append(ours.logits(ours.forward([Chunk(ids[low:high], low, blocks)], kv)))
    assert np.abs(np.concatenate(parts) - their_logits(theirs, ids)).max() < 1e-4


def test_decode_batched_with_a_prefill_gives_transformers_logits(pair) -> None:
    theirs, ours = pair
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 1000, n) for n in (1, 15, 16, 17, 200, 33)]
    kv = KVCache(ours.config, 128, BLOCK)
    tables = [table(20 * i, 220) for i in range(len(prompts))]
    ours.forward([Chunk(p, 0, t) for p, t in zip(prompts, tables, strict=True)], kv)
    for step in range(3):
        new = rng.integers(0, 1000, len(prompts))
        late = rng.integers(0, 1000, 40)
        chunks = [Chunk([i], len(p), t) for i, p, t in zip(new, prompts, tables, strict=True)]
        got = ours.logits(ours.forward([*chunks[:2], Chunk(late, 0, table(124 - 3, 40)), *chunks[2:]], kv))
        prompts = [np.append(p, i) for p, i in zip(prompts, new, strict=True)]
        expected = [their_logits(theirs, p)[-1:] for p in prompts]
        expected.insert(2, their_logits(theirs, late))
        assert np.abs(got - np.concatenate(expected)).max() < 1e-4, step


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_widened_exactly(
    pair, tmp_path: Path, dtype: str, torch, transformers
) -> None:
    theirs, _ = pair
    halved = transformers.LlamaForCausalLM(theirs.config)
    halved.load_state_dict(theirs.state_dict())
    halved.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    config = ModelConfig.from_json(json.loads((tmp_path / "config.json").read_text()))
    source = safetensors_source(tmp_path)
    assert source is not None
    ids = np.random.default_rng(4).integers(0, 1000, 50)
    ours = Transformer(config, assemble(config, source))
    got = ours.logits(ours.forward([Chunk(ids, 0, table(0, 50))], KVCache(config, 8, BLOCK)))
    widened = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert np.abs(got - their_logits(widened, ids)).max() < 1e-4
