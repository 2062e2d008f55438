"""Models by name, folder or config.json, as a `ModelShape`: one reader per family of architectures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from burstline.errors import RooflineError, tables_beside
from burstline.roofline.model.checkpoint import config_file, held_by, json_object, quant_of, text_part
from burstline.roofline.model.shapes import (
    QUANTS,
    Attention,
    DeltaNet,
    Dense,
    Layer,
    Mla,
    ModelShape,
    Moe,
    Quant,
)
from burstline.wording import hint

_FOLDER = Path(__file__).parent / "configs"


def bundled_models() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def bundled_config(name: str) -> dict[str, Any]:
    return json_object(_FOLDER / f"{name}.json")


def load_model(name_or_path: str, quant: str | None = None) -> tuple[ModelShape, Quant]:
    """A model's shape and how its checkpoint is stored, unless `quant` says how; a bundled name wins over a
    path."""
    name, path = name_or_path.lower(), Path(name_or_path)
    if not path.exists():  # meta-llama/Llama-3.1-8B: as the hub calls it
        name = name.rpartition("/")[2]
    if name in bundled_models():
        path = _FOLDER / f"{name}.json"
    elif path.exists():
        path = path / "config.json" if path.is_dir() else path
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
    else:
        raise RooflineError(
            f"unknown model {name_or_path!r}: expected a folder or file with a config.json, or a bundled "
            f"one; {hint(name, bundled_models())}"
        )
    config = config_file(path)
    model = read_config(config, name)
    return model, QUANTS[quant] if quant else held_by(path.parent, model, quant_of(config, model))


class _Config:
    """config.json with errors that name the missing key."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = {**defaults, **{key: value for key, value in raw.items() if value is not None}}
        self.family = str(raw.get("model_type"))

    def __getitem__(self, key: str) -> Any:
        if key not in self.raw:
            raise RooflineError(f"config.json has no {key}, which a {self.family} model needs")
        return self.raw[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.raw.get(key, default)

    def count(self, key: str) -> int:
        value = self[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RooflineError(f"config.json has {key} = {value!r}; expected a whole number of at least 1")
        return value


def read_config(raw: Mapping[str, Any], name: str | None = None) -> ModelShape:
    """The shape a Hugging Face `config.json` describes; the text part of a multimodal one."""
    tower = raw.get("vision_config") or {}
    raw = text_part(raw)
    family = str(raw.get("model_type"))
    if family not in FAMILIES:
        raise RooflineError(
            f"config.json has model_type {raw.get('model_type')!r}, which the roofline does not know;"
            f" it knows {', '.join(FAMILIES)}"
        )
    reader, defaults = FAMILIES[family]
    shape = reader(_Config(raw, defaults), name or str(raw.get("_name_or_path") or family))
    # The products of a vision tower's layers; patches and the projector are a few percent of them.
    width, wide = tower.get("hidden_size", 0), tower.get("intermediate_size", 0)
    n_layers = tower.get("num_hidden_layers") or tower.get("depth") or 0
    return replace(shape, vision_params=int(n_layers * (4 * width * width + 2 * width * wide)))


def _shape(
    config: _Config, name: str, layers: Sequence[tuple[Attention | Mla | DeltaNet, Dense | Moe]], **other: Any
) -> ModelShape:
    """The shape of these layers, each (attention, feed-forward); equal ones are gathered by first use."""
    kinds = list(dict.fromkeys(layers))
    return ModelShape(
        name=name,
        family=config.family,
        d=other.pop("d", None) or config.count("hidden_size"),
        vocab=config.count("vocab_size"),
        layers=tuple(Layer(attention, ffn, list(layers).count((attention, ffn))) for attention, ffn in kinds),
        order=tuple(map(kinds.index, layers)),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_context=config.get("max_position_embeddings"),
        **other,
    )


def _attention(config: _Config, **other: Any) -> Attention:
    d, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads") if "num_key_value_heads" in config.raw else heads
    if heads % kv_heads:
        raise RooflineError(f"{heads} query heads do not divide into {kv_heads} KV heads")
    if "head_dim" not in config.raw and d % heads:
        raise RooflineError(f"hidden_size {d} does not divide into {heads} heads, and there is no head_dim")
    return Attention(heads, kv_heads, config.get("head_dim", d // heads), **other)


def _windows(config: _Config, default: Callable[[int], bool]) -> list[int | None]:
    """Each layer's window: what `layer_types` says, else `default(index)` says whether the layer slides."""
    n = config.count("num_hidden_layers")
    window = config.get("sliding_window") or -1
    if (types := config.get("layer_types")) is not None and len(types) != n:
        raise RooflineError(f"config.json names {len(types)} layer_types for {n} layers")
    slides = [kind == "sliding_attention" for kind in types] if types else [default(i) for i in range(n)]
    return [window if slide and window > 0 else None for slide in slides]  # 0 and -1 say that none slides


def _llama(config: _Config, name: str) -> ModelShape:
    """Llama and its like: one kind of layer. Qwen2 and Qwen3 add a bias or a norm to queries and keys, OLMo 2
    a norm over all heads; EXAONE 4 has windows, Seed-OSS no bias behind its heads."""
    qwen2, qwen3 = config.family.startswith("qwen2"), config.family.startswith(("qwen3", "exaone"))
    bias = bool(config.get("attention_bias", config.get("use_bias", False)))
    out_bias = bool(config.get("attention_out_bias", bias))
    from_layer = config.get("max_window_layers", 0) if qwen2 or qwen3 else 0
    slides = config.get("use_sliding_window", False) if qwen2 or qwen3 else "sliding_window" in config.raw
    ffn = Dense(config.count("intermediate_size"), bias=bool(config.get("mlp_bias", config.get("use_bias"))))
    wide = config.family.startswith("olmo")
    norms = {"qk_norm": qwen3 or wide, "wide_norm": wide}
    layers = [
        (_attention(config, window=w, qkv_bias=bias or qwen2, out_bias=out_bias, **norms), ffn)
        for w in _windows(config, lambda i: bool(slides) and i >= from_layer)
    ]
    return _shape(config, name, layers)


def _gemma(config: _Config, name: str) -> ModelShape:
    """Gemma: tied; from the second on, norms on both sides of each block and windows in most layers.

    Command R: tied too; attention and feed-forward side by side behind one norm; windows from the second on.
    """
    cohere, third = config.family.startswith("cohere"), config.family.startswith("gemma3")
    first = config.family in ("gemma", "cohere")
    period = config.get("sliding_window_pattern", 6 if third else 4 if cohere else 2)
    ffn = Dense(config.count("intermediate_size"))
    layers = [
        (_attention(config, window=w, qk_norm=third), ffn)
        for w in _windows(config, lambda i: not first and (i + 1) % period != 0)
    ]
    return _shape(config, name, layers, norms_per_layer=1 if cohere else 2 if first else 4)


def _gpt2(config: _Config, name: str) -> ModelShape:
    d, heads = config.count("n_embd"), config.count("n_head")
    if d % heads:
        raise RooflineError(f"n_embd {d} does not divide into {heads} heads")
    attention = Attention(heads, heads, d // heads, qkv_bias=True, out_bias=True, rope=False)
    ffn = Dense(config.get("n_inner", 4 * d), gated=False, bias=True)
    layers = [(attention, ffn)] * config.count("n_layer")
    return _shape(config, name, layers, d=d, norm="layer", n_positions=config.count("n_positions"))


def _opt(config: _Config, name: str) -> ModelShape:
    d = config.count("hidden_size")
    if config.get("word_embed_proj_dim", d) != d:
        raise RooflineError(
            f"{name} projects its embedding from {config['word_embed_proj_dim']} to {d} (as OPT-350m does);"
            " the roofline does not model that"
        )
    bias = bool(config.get("enable_bias", True))
    attention = _attention(config, qkv_bias=bias, out_bias=bias, rope=False)
    layers = [(attention, Dense(config.count("ffn_dim"), gated=False, bias=bias))]
    layers *= config.count("num_hidden_layers")
    n_positions = config.count("max_position_embeddings") + 2  # two slots before the first (transformers')
    return _shape(config, name, layers, norm="layer", n_positions=n_positions)


def _moe(config: _Config, n: str, d_ff: str = "moe_intermediate_size", **other: Any) -> Moe:
    """Experts whose number and width these keys tell."""
    return Moe(config.count(n), config.count("num_experts_per_tok"), config.count(d_ff), **other)


def _mixtral(config: _Config, name: str) -> ModelShape:
    """Experts in each layer. MiniMax-M2 norms queries and keys over all heads; gpt-oss has biases throughout,
    sinks, and a window in every other layer."""
    oss, m2 = config.family == "gpt_oss", config.family == "minimax_m2"
    moe = _moe(config, "num_local_experts", "intermediate_size", router_bias=oss or m2, expert_bias=oss)
    bias = oss and bool(config.get("attention_bias", True))
    flags = {"qkv_bias": bias, "out_bias": bias, "sinks": oss, "qk_norm": m2, "wide_norm": m2}
    windows = _windows(config, lambda i: i % 2 == 0 if oss else "sliding_window" in config.raw)
    return _shape(config, name, [(_attention(config, window=w, **flags), moe) for w in windows])


def _qwen_moe(config: _Config, name: str) -> ModelShape:
    """Qwen2-MoE (shared experts behind a gate, biased queries), Qwen3-MoE (neither; normed queries)."""
    second = config.family == "qwen2_moe"
    shared = config.count("shared_expert_intermediate_size") if second else 0
    moe = _moe(config, "num_experts", d_ff_shared=shared, shared_gate=second)
    attention = _attention(config, qkv_bias=second or bool(config.get("attention_bias")), qk_norm=not second)
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers", ()))
    layers: list[tuple[Attention | Mla | DeltaNet, Dense | Moe]] = [
        (attention, Dense(config.count("intermediate_size")) if i in dense or (i + 1) % step else moe)
        for i in range(config.count("num_hidden_layers"))
    ]
    return _shape(config, name, layers)


def _qwen3_next(config: _Config, name: str) -> ModelShape:
    """Qwen3-Next, Qwen3.5: three layers of linear attention, then one of gated attention; experts or none."""
    ffn: Dense | Moe = Dense(config.get("intermediate_size", 0))
    if "num_experts" in config.raw:
        shared = config.count("shared_expert_intermediate_size")
        ffn = _moe(config, "num_experts", d_ff_shared=shared, shared_gate=True)
    full = _attention(config, qk_norm=True, gated=True)
    linear = DeltaNet(
        config.count("linear_num_key_heads"),
        config.count("linear_num_value_heads"),
        config.count("linear_key_head_dim"),
        config.count("linear_value_head_dim"),
        config.count("linear_conv_kernel_dim"),
    )
    n, every = config.count("num_hidden_layers"), config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(n)
    ]
    if len(types) != n:
        raise RooflineError(f"config.json names {len(types)} layer_types for {n} layers")
    return _shape(config, name, [(linear if kind == "linear_attention" else full, ffn) for kind in types])


def _llama4(config: _Config, name: str) -> ModelShape:
    """Llama 4: chunked attention but in every fourth layer, which has no rotary positions; one expert a token
    and one shared by all, in every layer (Scout) or every other one (Maverick)."""
    n, step = config.count("num_hidden_layers"), config.get("interleave_moe_layer_step", 1)
    every = config.get("no_rope_layer_interval", 4)
    rope = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n)]
    d_ff, sparse = config.count("intermediate_size"), config.get("moe_layers") or range(step - 1, n, step)
    moe = _moe(config, "num_local_experts", "intermediate_size", d_ff_shared=d_ff)
    dense = Dense(config.get("intermediate_size_mlp", d_ff))
    bias, chunk = bool(config.get("attention_bias", False)), config.get("attention_chunk_size")
    layers = [
        (
            _attention(
                config, chunk=chunk if rope[i] else None, rope=bool(rope[i]), qkv_bias=bias, out_bias=bias
            ),
            moe if i in set(sparse) else dense,
        )
        for i in range(n)
    ]
    return _shape(config, name, layers)


def _deepseek(config: _Config, name: str) -> ModelShape:
    """DeepSeek-V2, V3, Kimi-K2, GLM: dense layers first, then experts of which some are shared. Latent
    attention, but in GLM-4.5.

    The multi-token-prediction layer that V3's checkpoint carries besides is not part of the model served.
    """
    attention: Attention | Mla
    if config.family == "glm4_moe":
        bias, qk_norm = bool(config.get("attention_bias")), bool(config.get("use_qk_norm"))
        attention = _attention(config, qkv_bias=bias, qk_norm=qk_norm)
    else:
        heads, index = config.count("num_attention_heads"), ("index_n_heads", "index_head_dim", "index_topk")
        keys = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        sizes: list[Any] = [config.get("q_lora_rank"), *map(config.count, keys)]
        attention = Mla(heads, *sizes, *(config.get(key, 0) for key in index))
    shared = config.count("moe_intermediate_size") * config.get("n_shared_experts", 0)
    moe = _moe(config, "n_routed_experts", d_ff_shared=shared, router_bias=config.family != "deepseek_v2")
    first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    layers: list[tuple[Attention | Mla | DeltaNet, Dense | Moe]] = [
        (attention, moe if i >= first and i % every == 0 else Dense(config.count("intermediate_size")))
        for i in range(config.count("num_hidden_layers"))
    ]
    return _shape(config, name, layers)


_READERS = {
    reader.__name__.removeprefix("_"): reader
    for reader in (_llama, _gemma, _gpt2, _opt, _mixtral, _qwen_moe, _qwen3_next, _llama4, _deepseek)
}
FAMILIES: Mapping[str, tuple[Callable[[_Config, str], ModelShape], Mapping[str, Any]]] = {
    name: (_READERS[row["reader"]], row.get("defaults", {}))
    for row in tables_beside(__file__, "families.toml")["families"]
    for name in row["types"]
}
