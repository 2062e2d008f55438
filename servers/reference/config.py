"""The shape of a Llama decoder, as an ordinary Hugging Face `config.json` gives it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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
    """A Llama decoder in LlamaConfig's names; the defaults are the built-in model (5 million parameters)."""

    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 4
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
        said = {**raw, "architecture": (raw.get("architectures") or [None])[0], "rope_type": rope_type}
        for key, served in SERVED.items():
            if (found := said.get(key) or served) != served:
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
