"""The weights of a model: seeded and random, or out of a folder's safetensors; float32 either way."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from servers.reference.config import ModelConfig, ModelError
from workloads.seeds import rng

Array = npt.NDArray[np.float32]
Source = Callable[[str, tuple[int, ...]], Array]
"""A tensor by its Hugging Face name, in the shape asked for."""

INIT_STD = 0.02  # transformers' LlamaConfig.initializer_range


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Matrices are (in, out), projections that share an input are fused."""

    input_norm: Array
    qkv: Array
    o: Array
    post_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights; `lm_head` is (hidden, vocabulary), a view of `embed` where the two are tied."""

    embed: Array
    layers: tuple[Layer, ...]
    norm: Array
    lm_head: Array

    def n_bytes(self, *, tied: bool) -> int:
        layers = sum(getattr(layer, name).nbytes for layer in self.layers for name in Layer.__slots__)
        return int(self.embed.nbytes + layers + self.norm.nbytes + (0 if tied else self.lm_head.nbytes))


def random_source(seed: int) -> Source:
    """Weights as transformers initialises them (norms 1, the rest normal), each tensor seeded by name."""

    def tensor(name: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return rng(seed, name).standard_normal(shape, dtype=np.float32) * np.float32(INIT_STD)

    return tensor


def safetensors_source(folder: Path) -> Source | None:
    """The tensors of `model.safetensors` or of the shards its index names; None where there are neither."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif single.exists():
        files = [single.name]
    else:
        return None
    stored: dict[str, dict[str, Any]] = {}
    for file in files:
        stored.update(safetensors.deserialize((folder / file).read_bytes()))  # type: ignore[no-untyped-call]

    def tensor(name: str, shape: tuple[int, ...]) -> Array:
        if name not in stored:
            raise ModelError(f"{folder} has no tensor {name!r}; it holds {len(stored)} others")
        info = stored[name]
        if tuple(info["shape"]) != shape:
            raise ModelError(f"{name} has shape {tuple(info['shape'])}, config.json means {shape}")
        return _float32(info["dtype"], info["data"], name).reshape(shape)

    return tensor


def _float32(dtype: str, data: bytes, name: str) -> Array:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F32", "F16"):
        return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)
    raise ModelError(f"{name} is stored as {dtype}; expected F32, F16 or BF16")


def assemble(config: ModelConfig, source: Source) -> Weights:
    """Every weight of the model, fetched from `source` by its Hugging Face name."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def fused(prefix: str, outputs: dict[str, int], n_in: int) -> Array:
        parts = [source(f"{prefix}.{name}_proj.weight", (n_out, n_in)).T for name, n_out in outputs.items()]
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        return Layer(
            input_norm=source(f"{at}.input_layernorm.weight", (hidden,)),
            qkv=fused(f"{at}.self_attn", {"q": q, "k": kv, "v": kv}, hidden),
            o=fused(f"{at}.self_attn", {"o": hidden}, q),
            post_norm=source(f"{at}.post_attention_layernorm.weight", (hidden,)),
            gate_up=fused(f"{at}.mlp", {"gate": ffn, "up": ffn}, hidden),
            down=fused(f"{at}.mlp", {"down": hidden}, ffn),
        )

    embed = source("model.embed_tokens.weight", (config.vocab_size, hidden))
    tied = config.tie_word_embeddings
    head = embed if tied else source("lm_head.weight", (config.vocab_size, hidden))
    layers = tuple(layer(i) for i in range(config.num_hidden_layers))
    return Weights(embed, layers, source("model.norm.weight", (hidden,)), head.T)
