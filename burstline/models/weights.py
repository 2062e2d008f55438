"""Random weights, written as they are drawn: as safetensors, no shard ever in memory, or as GGUF.

A GGUF file, which llama.cpp reads, has the same weights and the same tokenizer as the folder. Its keys and
tensor names are those of the specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); PyPI's `gguf` writes it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from burstline.dtypes import DTYPES, FLOATS
from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError

FORMATS: Final = ("safetensors", "gguf")
"""Of weights: llama.cpp reads GGUF, every other engine safetensors."""
STD: Final = 0.02
"""transformers' `initializer_range` of these families."""
SHARD_BYTES: Final = 5 * 10**9
"""transformers' own `max_shard_size`."""
_CHUNK: Final = 1 << 22

ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The families whose layout is known, by model_type: llama.cpp serves Mistral's shape as its llama."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        return int(math.prod(self.shape) * DTYPES[self.dtype].n_bytes)


def n_bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.n_bytes for tensor in tensors)


def tensors_of(config: Mapping[str, Any], like: str) -> list[Tensor]:
    """Every tensor of a dense decoder in checkpoint order; WorkloadError where the layout is not known."""
    family, dtype = config.get("model_type"), str(config["torch_dtype"])
    if family not in ARCHITECTURES:
        raise WorkloadError(
            f"--weights: the checkpoint layout of {like} (model_type {family!r}) is unknown; known are "
            f"{', '.join(ARCHITECTURES)}; leave --weights out and let vLLM or SGLang generate random ones"
        )
    if dtype not in FLOATS:
        raise WorkloadError(f"--dtype {dtype}: expected one of {', '.join(FLOATS)}")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for k in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{k}.{name}": shape for name, shape in _layer(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return [Tensor(name, shape, dtype) for name, shape in shapes.items()]


def _layer(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    q, kv = heads * head, (config.get("num_key_value_heads") or heads) * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config["model_type"] == "qwen2":
        shapes |= {f"self_attn.{name}_proj.bias": (n,) for name, n in (("q", q), ("k", kv), ("v", kv))}
    if config["model_type"] == "qwen3":
        shapes |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    return shapes


def write_weights(folder: Path, tensors: Sequence[Tensor], seed: int) -> None:
    """model.safetensors, or shards with their index; the same seed gives the same bytes."""
    shards = _sharded(tensors)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0], seed)
        return
    weight_map: dict[str, str] = {}
    for k, shard in enumerate(shards, 1):
        name = f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, seed)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": n_bytes_of(tensors)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _sharded(tensors: Sequence[Tensor], most_bytes: int = SHARD_BYTES) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and n_bytes_of(shards[-1]) + tensor.n_bytes > most_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _write_file(path: Path, tensors: Sequence[Tensor], seed: int) -> None:
    """One file: the header's length (8 bytes, little endian), the header (JSON), the values in its order.

    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.n_bytes
        stored, shape = DTYPES[tensor.dtype].stored, list(tensor.shape)
        header[tensor.name] = {"dtype": stored, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            file.writelines(encoded(values, tensor.dtype) for values in values_of(tensor, seed))


def values_of(tensor: Tensor, seed: int) -> Iterator[NDArray[np.float32]]:
    """Its values in chunks, flat. Norms are 1, biases 0, the rest normal, from a stream named after it."""
    n = math.prod(tensor.shape)
    if len(tensor.shape) == 1:
        yield np.full(n, float(not tensor.name.endswith(".bias")), np.float32)
        return
    random = rng(seed, tensor.name)
    for start in range(0, n, _CHUNK):
        yield random.standard_normal(min(_CHUNK, n - start), dtype=np.float32) * np.float32(STD)


def encoded(values: NDArray[np.float32], dtype: str) -> bytes:
    """The values as little-endian bytes of a dtype."""
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    # bfloat16 is the upper half of a float32, rounded to nearest.
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype("<u2").tobytes()


def gguf_package() -> ModuleType:
    """The package `gguf`; WorkloadError, with how to get it, where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise WorkloadError(
            "--format gguf needs the package gguf beside Burstline: pip install gguf, or uv pip install gguf"
        ) from None
    package: ModuleType = gguf
    return package


def write_gguf(file: Path, config: Mapping[str, Any], tensors: Sequence[Tensor], seed: int) -> None:
    """The file, one tensor in memory at a time. The folder of `file` holds the model's tokenizer.json."""
    gguf, architecture = gguf_package(), ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(None, architecture)
    _add_shape(writer, gguf, config)
    _add_tokenizer(writer, gguf, json.loads((file.parent / "tokenizer.json").read_text("utf-8")))
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[DTYPES[_dtype(tensor)].stored]
        n_bytes = Tensor(tensor.name, tensor.shape, _dtype(tensor)).n_bytes
        name = names.get_name(tensor.name, (".weight", ".bias"))
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
    stored = DTYPES[config["torch_dtype"]].stored
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if stored == 'F32' else 'MOSTLY'}_{stored}"])
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
    n = n_heads.get(name.split(".")[-2])
    if n is None or ARCHITECTURES[config["model_type"]] != "llama":
        return values
    return values.reshape(n, 2, values.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(values.shape)
