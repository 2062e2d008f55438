"""A Llama of 5 million parameters without weights, for engines that can invent them (vLLM's dummy format)."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 8192
MAX_LEN = 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def make_tiny_model(folder: Path) -> Path:
    """The folder, with config.json and a byte-level BPE tokenizer trained on made-up words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "tokenizer.json").write_text(_tokenizer())
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"model_max_length": MAX_LEN}))
    return folder


@cache
def _tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_made_up_text(), trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise AssertionError(
            f"{tokenizer.get_vocab_size()} tokens trained, {VOCAB} wanted: more text is needed"
        )
    return tokenizer.to_str(pretty=True)


def _made_up_text() -> Iterator[str]:
    rng = np.random.Generator(np.random.PCG64(0))
    syllables = [c + v + e for c in "bcdfghklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    for lengths in rng.integers(1, 5, (4000, 8)).tolist():
        drawn = iter(rng.integers(0, len(syllables), sum(lengths)).tolist())
        words = ("".join(syllables[next(drawn)] for _ in range(n)) for n in lengths)
        yield " ".join(words) + "."
