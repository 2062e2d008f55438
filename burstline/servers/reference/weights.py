"""The shape and weights of a model: seeded and random, or out of a folder's safetensors; always float32."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from burstline.workloads.prompts import rng

SERVED = {
    "architecture": "LlamaForCausalLM", "model_type": "llama", "hidden_act": "silu", "rope_type": "default",
    "attention_bias": False, "mlp_bias": False, "quantization_config": None,
}  # fmt: skip
"""What a config.json may say besides the shape: anything else would give other logits than transformers."""

ABSENT = {
    "tie_word_embeddings": False, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0
}  # fmt: skip
"""What `transformers.LlamaConfig` takes for a key that is not there."""


class ModelError(ValueError):
    """The model cannot be served: what was found, what was expected, what to try."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama decoder in LlamaConfig's names; the defaults are the built-in model (3.5 million)."""

    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    eos_ids: tuple[int, ...] = (0,)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "ModelConfig":
        """The shape in a parsed `config.json`; raises ModelError for one that cannot be served."""
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # transformers 5, and before
        rope_type = rope.get("rope_type") or rope.get("type")
        given = {**raw, "architecture": (raw.get("architectures") or [None])[0], "rope_type": rope_type}
        for key, served in SERVED.items():
            if (found := given.get(key) or served) != served:
                raise ModelError(f"{key}={found!r} in config.json: this engine serves {served}, not {found}")
        shape = ABSENT | {key: value for key, value in {**raw, **rope}.items() if value is not None}
        eos = raw.get("eos_token_id", 2)
        try:
            shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
            shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
            ids = eos if isinstance(eos, list) else [eos]
            shape["eos_ids"] = tuple(i for i in ids if i is not None and i < shape["vocab_size"])
            config = ModelConfig(**{field.name: shape[field.name] for field in fields(ModelConfig)})
        except KeyError as missing:
            raise ModelError(f"config.json has no {missing}, which a Llama decoder needs") from None
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % kv_heads:
            raise ModelError(f"{heads} attention heads do not divide into {kv_heads} KV heads")
        if config.head_dim % 2:
            raise ModelError(f"head_dim is {config.head_dim}; rotary embeddings need an even one")
        return config


Array = npt.NDArray[np.float32]
Source = Callable[[str, tuple[int, ...]], Array]
"""A tensor by its Hugging Face name, in the shape asked for."""

INIT_STD = np.float32(0.02)  # transformers' LlamaConfig.initializer_range


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights. Matrices but `embed` are (in, out); `lm_head` is a view of `embed` where they are tied."""

    embed: Array
    layers: tuple[Mapping[str, Array], ...]
    norm: Array
    lm_head: Array

    def n_bytes(self) -> int:
        arrays = [self.embed, self.norm, *(array for layer in self.layers for array in layer.values())]
        tied = np.may_share_memory(self.embed, self.lm_head)
        return sum(array.nbytes for array in arrays) + (0 if tied else self.lm_head.nbytes)


def random_source(seed: int) -> Source:
    """Weights as transformers initialises them (norms 1, the rest normal), each tensor seeded by name."""

    def tensor(name: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return rng(seed, name).standard_normal(shape, dtype=np.float32) * INIT_STD

    return tensor


def safetensors_source(folder: Path) -> Source | None:
    """The tensors of `model.safetensors` or of the shards its index names; None where there are neither."""
    index, files = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    elif not (folder / "model.safetensors").exists():
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
        if info["dtype"] == "BF16":  # the upper half of a float32
            return (np.frombuffer(info["data"], "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
        if info["dtype"] not in ("F32", "F16"):
            raise ModelError(f"{name} is stored as {info['dtype']}; expected F32, F16 or BF16")
        stored_type = "<f4" if info["dtype"] == "F32" else "<f2"
        return np.frombuffer(info["data"], stored_type).astype(np.float32).reshape(shape)

    return tensor


def assemble(config: ModelConfig, source: Source) -> Weights:
    """Every weight of the model, fetched from `source`; projections that share an input are fused."""
    hidden, ffn, n_ids = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def fused(prefix: str, n_in: int, **n_outs: int) -> Array:
        parts = [source(f"{prefix}.{name}_proj.weight", (n_out, n_in)).T for name, n_out in n_outs.items()]
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    def layer(at: str) -> dict[str, Array]:
        return {
            "input_norm": source(f"{at}.input_layernorm.weight", (hidden,)),
            "qkv_proj": fused(f"{at}.self_attn", hidden, q=q, k=kv, v=kv),
            "o_proj": fused(f"{at}.self_attn", q, o=hidden),
            "post_norm": source(f"{at}.post_attention_layernorm.weight", (hidden,)),
            "gate_up_proj": fused(f"{at}.mlp", hidden, gate=ffn, up=ffn),
            "down_proj": fused(f"{at}.mlp", ffn, down=hidden),
        }

    embed = source("model.embed_tokens.weight", (n_ids, hidden))
    lm_head = embed if config.tie_word_embeddings else source("lm_head.weight", (n_ids, hidden))
    layers = tuple(layer(f"model.layers.{i}") for i in range(config.num_hidden_layers))
    return Weights(embed, layers, source("model.norm.weight", (hidden,)), lm_head.T)
