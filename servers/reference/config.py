"""The shape of a Llama decoder, as an ordinary Hugging Face `config.json` gives it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ModelError(ValueError):
    """The model cannot be served: what was found, what was expected, what to try."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama decoder; the defaults are the built-in model that needs no folder (5 million parameters).

    Field names are those of `transformers.LlamaConfig`; `eos_ids` is its `eos_token_id`, always a tuple.
    """

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

    def kv_bytes_per_tok(self) -> int:
        """Bytes one token takes in the KV cache: keys and values of every layer, float32."""
        return 2 * 4 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "ModelConfig":
        """The shape in a parsed `config.json`, absent keys as `transformers.LlamaConfig` fills them.

        Raises ModelError for whatever would make the logits differ from transformers'.
        """
        _refuse_unsupported(raw)
        try:
            heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
            eos, n_ids = raw.get("eos_token_id", 2), int(raw["vocab_size"])
            eos_ids = eos if isinstance(eos, list) else [eos]
            config = ModelConfig(
                hidden_size=hidden,
                intermediate_size=int(raw["intermediate_size"]),
                num_hidden_layers=int(raw["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or hidden // heads),
                vocab_size=n_ids,
                max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                eos_ids=tuple(i for i in eos_ids if i is not None and i < n_ids),
            )
        except KeyError as missing:
            raise ModelError(f"config.json has no {missing}, which a Llama decoder needs") from None
        if heads % config.num_key_value_heads:
            raise ModelError(
                f"{heads} attention heads do not divide into {config.num_key_value_heads} KV heads"
            )
        if config.head_dim % 2:
            raise ModelError(f"head_dim is {config.head_dim}; rotary embeddings need an even one")
        return config


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_scaling`."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if architectures[0] != "LlamaForCausalLM" or raw.get("model_type", "llama") != "llama":
        found = f"{architectures[0]} (model_type {raw.get('model_type')!r})"
        raise ModelError(f"the reference engine serves LlamaForCausalLM, not {found}; try --engine vllm")
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
    for key, expected in plain.items():
        if raw.get(key, expected) != expected:
            raise ModelError(
                f"config.json has {key}={raw[key]!r}; the reference engine knows {expected!r} only"
            )
    kind = _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"
    if kind != "default":
        raise ModelError(
            f"config.json asks for {kind!r} RoPE scaling; the reference engine knows 'default' only"
        )
