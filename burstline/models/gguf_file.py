"""A generated model as a GGUF file, for llama.cpp: the same weights and the same tokenizer as the folder's.

Keys and tensor names are those of the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); PyPI's `gguf` writes the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from burstline.models.random_weights import Tensor, encoded, values_of
from burstline.workloads.request import WorkloadError

ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""By `model_type`; llama.cpp serves Mistral's shape as its llama."""
_TENSORS: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_TENSORS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# Of gguf's enumerations, by our names: what the file calls its tensors' type, and itself as a whole.
_FILE_TYPES: Final = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
_TENSOR_TYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def gguf_package() -> ModuleType:
    """The package `gguf`; WorkloadError, with how to get it, where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise WorkloadError(
            "--format gguf needs the package gguf, which is not installed: pip install gguf"
        ) from None
    package: ModuleType = gguf
    return package


def require_plain_positions(config: Mapping[str, Any], like: str) -> None:
    """WorkloadError where the shape scales its positions, which needs tensors of its own in the file."""
    if config.get("rope_scaling"):
        raise WorkloadError(f"--format gguf: {like} scales its positions (rope_scaling): not supported")


def write_gguf(file: Path, config: Mapping[str, Any], tensors: Sequence[Tensor], seed: int) -> None:
    """The file, one tensor in memory at a time. The folder of `file` holds the model's tokenizer.json."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(None, ARCHITECTURES[config["model_type"]])
    _add_shape(writer, gguf, config)
    _add_tokenizer(writer, gguf, json.loads((file.parent / "tokenizer.json").read_text("utf-8")))
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[_TENSOR_TYPES[_dtype(tensor)]]
        n_bytes = Tensor(tensor.name, tensor.shape, _dtype(tensor)).n_bytes
        name = _TENSORS.get(tensor.name)
        if layer := _LAYER.fullmatch(tensor.name):
            name = f"blk.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{layer[3]}"
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), n_bytes, kind)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        values = np.concatenate(list(values_of(tensor, seed)))
        data = encoded(_rows(values.reshape(tensor.shape), tensor.name, config), _dtype(tensor))
        writer.write_tensor_data(np.frombuffer(data, np.uint8))
    writer.close()


def _add_shape(writer: Any, gguf: ModuleType, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[config["torch_dtype"]]])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: Any, gguf: ModuleType, tokenizer: Mapping[str, Any]) -> None:
    """A byte-level BPE whose text is split as GPT-2's: that is what `tokenizers.ByteLevel` does."""
    special = {token["id"]: token["special"] for token in tokenizer["added_tokens"]}
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]} | tokenizer["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {id_: "CONTROL" if is_special else "USER_DEFINED" for id_, is_special in special.items()}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([getattr(gguf.TokenType, kinds.get(ids[token], "NORMAL")) for token in tokens])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _dtype(tensor: Tensor) -> str:
    """llama.cpp multiplies matrices of any type, but adds and scales by vectors in float32 only."""
    return "float32" if len(tensor.shape) == 1 else tensor.dtype


def _rows(values: NDArray[np.float32], name: str, config: Mapping[str, Any]) -> NDArray[np.float32]:
    """The values in llama.cpp's order of rows.

    Its llama rotates neighbouring pairs (GPT-J's way), Hugging Face's rotates halves of a head: rows of Q and
    K are interleaved as `LlamaModel.permute` of llama.cpp's conversion/llama.py does it.
    """
    heads = config["num_attention_heads"]
    n_heads = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    layer = _LAYER.fullmatch(name)
    n = n_heads.get(layer[2].rpartition(".")[2]) if layer else None
    if n is None or ARCHITECTURES[config["model_type"]] != "llama":
        return values
    return values.reshape(n, 2, values.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(values.shape)
