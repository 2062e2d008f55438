"""The decoder against itself: how tokens are cut into steps and batches must not show in the logits."""

import json
import time
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstline.compute_threads import Cores
from burstline.servers.reference.model import Chunk, KVCache, Transformer
from burstline.servers.reference.weights import ModelConfig, ModelError

BLOCK = 4
PROMPT = np.random.default_rng(0).integers(0, 300, 40)


def whole(model: Transformer, ids: np.ndarray) -> np.ndarray:
    kv = KVCache(model.config, 16, BLOCK)
    return model.logits(model.forward([Chunk(ids, 0, range(16))], kv))


@settings(deadline=None, max_examples=25)
@given(cuts=st.sets(st.integers(1, len(PROMPT) - 1), max_size=6), order=st.permutations(range(10)))
def test_chunked_prefill_gives_the_logits_of_one_chunk(
    model: Transformer, cuts: set[int], order: list[int]
) -> None:
    kv, edges = KVCache(model.config, 10, BLOCK), [0, *sorted(cuts), len(PROMPT)]
    parts = [
        model.logits(model.forward([Chunk(PROMPT[low:high], low, order)], kv))
        for low, high in pairwise(edges)
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole(model, PROMPT), atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7))
def test_a_batch_gives_every_sequence_the_logits_it_has_alone(model: Transformer, lengths: list[int]) -> None:
    """All prompts but their last tokens, then one step that decodes them all."""
    kv = KVCache(model.config, 8 * len(lengths), BLOCK)
    tables = [range(8 * i, 8 * i + 8) for i in range(len(lengths))]
    prompts = [np.random.default_rng(n).integers(0, 300, n) for n in lengths]
    prefill = [Chunk(p[:-1], 0, t) for p, t in zip(prompts, tables, strict=True) if len(p) > 1]
    if prefill:
        model.forward(prefill, kv)
    decode = [Chunk(p[-1:], len(p) - 1, t) for p, t in zip(prompts, tables, strict=True)]
    batched = model.logits(model.forward(decode, kv))
    alone = np.concatenate([whole(model, p)[-1:] for p in prompts])
    np.testing.assert_allclose(batched, alone, atol=1e-6)


def test_a_prompt_longer_than_a_query_tile_is_causal(model: Transformer) -> None:
    ids = np.random.default_rng(1).integers(0, 300, 400)
    kv = KVCache(model.config, 100, BLOCK)
    got = model.logits(model.forward([Chunk(ids, 0, range(100))], kv))
    changed = ids.copy()
    changed[300:] = 7
    after = model.logits(model.forward([Chunk(changed, 0, range(100))], kv))
    np.testing.assert_allclose(after[:300], got[:300], atol=1e-6)
    assert np.abs(after[301:] - got[301:]).max() > 1e-3


def test_several_cores_give_the_logits_and_the_timings_of_one(model: Transformer) -> None:
    """A step of whole prompts, parts of them and single tokens, all long enough to be shared out."""
    rng, several = np.random.default_rng(2), Transformer(model.config, model.weights, Cores(3))
    prompts = [rng.integers(0, 300, n) for n in (600, 300, *[500] * 40)]
    tables = [range(150 * k, 150 * k + 150) for k in range(len(prompts))]
    first = [Chunk(ids[:-1], 0, table) for ids, table in zip(prompts, tables, strict=True)]
    second = [Chunk(p[-1:], len(p) - 1, t) for p, t in zip(prompts[2:], tables[2:], strict=True)]
    answers = []
    for each in (model, several):
        kv = KVCache(model.config, 150 * len(prompts), BLOCK)
        each.forward(first, kv)
        each.clear_clock()
        began = time.monotonic_ns()
        answers.append(each.logits(each.forward([*second, Chunk(prompts[0][-1:], 599, tables[0])], kv)))
        assert min(each.spent_ns.values()) > 0
        assert sum(each.spent_ns.values()) < time.monotonic_ns() - began
    np.testing.assert_allclose(answers[1], answers[0], atol=1e-6)


def test_a_failure_on_another_core_is_raised() -> None:
    done = []

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Cores(2).run([partial(time.sleep, 0.05), fail, *[partial(done.append, k) for k in range(3)]])
    assert Cores(2).run([partial(pow, k, 2) for k in range(5)]) == [0, 1, 4, 9, 16]


def test_every_gemm_and_attention_are_timed(model: Transformer) -> None:
    model.clear_clock()
    whole(model, PROMPT)
    assert list(model.spent_ns) == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "attention"]
    assert min(model.spent_ns.values()) > 0


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500,
}  # fmt: skip


def test_a_config_without_optional_keys_is_filled_as_transformers_does() -> None:
    config = ModelConfig.from_json(json.loads(json.dumps(LLAMA)))
    assert (config.num_key_value_heads, config.head_dim, config.eos_ids) == (4, 16, (2,))
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-6, 10000.0, False)


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, {"rope_theta": 7e5}),
        ({"num_key_value_heads": 2, "head_dim": 32}, {"num_key_value_heads": 2, "head_dim": 32}),
        ({"eos_token_id": [3, 4]}, {"eos_ids": (3, 4)}),
        ({"eos_token_id": None}, {"eos_ids": ()}),
        ({"eos_token_id": [3, 500]}, {"eos_ids": (3,)}),
    ],
)
def test_a_config_key_is_honoured(keys: dict, read: dict) -> None:
    config = ModelConfig.from_json(LLAMA | keys)
    assert {name: getattr(config, name) for name in read} == read


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "not MixtralForCausalLM"),
        ({"model_type": "qwen2"}, "qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_type='llama3'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_a_config_that_would_give_other_logits_is_refused(keys: dict, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ModelConfig.from_json(LLAMA | keys)


def test_a_config_without_its_shape_is_refused_by_the_missing_name() -> None:
    with pytest.raises(ModelError, match="no 'vocab_size'"):
        ModelConfig.from_json({k: v for k, v in LLAMA.items() if k != "vocab_size"})
