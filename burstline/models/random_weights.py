"""Random weights as safetensors, written as they are drawn: no shard ever stands in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError

FORMATS: Final = ("safetensors", "gguf")
"""Of weights: llama.cpp reads GGUF, every other engine safetensors."""
STD: Final = 0.02
"""transformers' `initializer_range` of these families."""
SHARD_BYTES: Final = 5 * 10**9
"""transformers' own `max_shard_size`."""
_CHUNK: Final = 1 << 22
_SAFETENSORS: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_N_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPES: Final = tuple(_N_BYTES)

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * _N_BYTES[self.dtype]


def n_bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.n_bytes for tensor in tensors)


def tensors_of(config: Mapping[str, Any], like: str) -> list[Tensor]:
    """Every tensor of a dense decoder in checkpoint order; WorkloadError where the layout is not known."""
    family, dtype = config.get("model_type"), str(config["torch_dtype"])
    if family not in FAMILIES:
        raise WorkloadError(
            f"--weights: the checkpoint layout of {like} (model_type {family!r}) is unknown; known are "
            f"{', '.join(FAMILIES)}; leave --weights out and let vLLM or SGLang generate random ones"
        )
    if dtype not in _N_BYTES:
        raise WorkloadError(f"--dtype {dtype}: expected one of {', '.join(_N_BYTES)}")
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
        header[tensor.name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
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
