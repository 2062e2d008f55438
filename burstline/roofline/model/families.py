"""Models by name, folder or config.json, as a `ModelShape`: one reader per family of architectures."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from burstline.roofline.errors import RooflineError
from burstline.roofline.model.shapes import (
    ELEMENT_BYTES,
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

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_Group = tuple[Quant, Sequence[str]]

_FOLDER = Path(__file__).parent / "configs"


def bundled_models() -> list[str]:
    """The names of the bundled configs, in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def bundled_config(name: str) -> dict[str, Any]:
    """A bundled model's config.json, parsed."""
    return _json_object(_FOLDER / f"{name}.json")


def load_model(name_or_path: str, quant: str | None = None) -> tuple[ModelShape, Quant]:
    """A model's shape and how its checkpoint is stored, unless `quant` says how; a bundled name wins over a
    path."""
    name, path = name_or_path.lower(), Path(name_or_path)
    if name in bundled_models():
        path = _FOLDER / f"{name}.json"
    elif path.exists():
        path = path / "config.json" if path.is_dir() else path
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
    else:
        near = difflib.get_close_matches(name, bundled_models(), n=3, cutoff=0.4)
        raise RooflineError(
            f"unknown model {name_or_path!r}: neither a bundled one ({', '.join(near or bundled_models())})"
            " nor a folder or file with a config.json"
        )
    config = config_file(path)
    model = read_config(config, name)
    return model, QUANTS[quant] if quant else _held(path.parent, model, quant_of(config, model))


def _held(folder: Path, model: ModelShape, quant: Quant) -> Quant:
    """The storage with the bytes of the folder's own weights, where they are another number than it says."""
    n_bytes, index = 0, folder / "model.safetensors.index.json"
    names = _json_object(index).get("weight_map", {}).values() if index.is_file() else ["model.safetensors"]
    paths = {folder / name for name in names}
    if quant.experts_only or not paths or not all(path.is_file() for path in paths):
        return quant
    for path in paths:
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), 1 << 30))
        try:
            for name, row in json.loads(header).items():
                layer = re.search(r"layers\.(\d+)\.", name)  # those beyond the last predict further tokens
                unused = _UNSERVED.search(name) or (model.tied and "lm_head" in name)
                if not unused and (layer is None or int(layer[1]) < model.n_layers):
                    n_bytes += row["data_offsets"][1] - row["data_offsets"][0]
        except (ValueError, TypeError, LookupError, AttributeError):
            raise RooflineError(f"{path} is cut or no safetensors file; expected a header of JSON") from None
    linears = [(layer.count * each.params, quant.of(each.name).weight_bytes)
               for layer in model.layers for each in layer.linears(model.d) if each.quantised]  # fmt: skip
    others = (model.params() - sum(n for n, _ in linears)) * ELEMENT_BYTES[quant.stream]
    held = (n_bytes - others) / sum(n * each for n, each in linears)
    if held <= 0 or abs(held - 1) < 0.03:
        return quant
    return replace(quant, held=held, others=tuple(replace(each, held=held) for each in quant.others))


_UNSERVED = re.compile(r"^__metadata__$|vision|visual|audio|projector|patch|mtp\.|\.attn\.bias$")


def config_file(path: Path) -> dict[str, Any]:
    """A config.json, with what `hf_quant_config.json` beside it says of the storage (as NVIDIA writes it)."""
    config, beside = _json_object(path), path.with_name("hf_quant_config.json")
    own = _text_part(config).get("quantization_config") or {}
    said = _json_object(beside).get("quantization") if beside.is_file() else None
    if said and isinstance(own, dict):
        own = {"quant_method": "modelopt", **said, **own}
    return config | ({"quantization_config": own} if own else {})


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError:
        raise RooflineError(f"no {path.name} in {path.parent}") from None
    except ValueError as error:
        raise RooflineError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RooflineError(f"{path} is not a JSON object")
    return found


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
    raw = _text_part(raw)
    family = str(raw.get("model_type"))
    if family not in FAMILIES:
        raise RooflineError(
            f"config.json has model_type {raw.get('model_type')!r}, which the roofline does not know;"
            f" it knows {', '.join(FAMILIES)}"
        )
    reader, defaults = FAMILIES[family]
    return reader(_Config(raw, defaults), name or str(raw.get("_name_or_path") or family))


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What describes the text's part of a multimodal model, with what only the whole says of its storage."""
    parts = [raw[name] for name in ("text_config", "language_config", "llm_config") if raw.get(name)]
    if not parts or "num_hidden_layers" in raw:
        return raw
    whole = ("torch_dtype", "dtype", "model_type", "quantization_config")
    own = {key: value for key, value in parts[0].items() if value is not None}
    return {key: raw[key] for key in whole if raw.get(key)} | own


def quant_of(raw: Mapping[str, Any], model: ModelShape | None = None) -> Quant:
    """How the checkpoint of this `config.json` is stored: its dtype, or its `quantization_config`.

    With the `model`'s shape also which of its products are stored in another way, or not quantised.
    """
    part = _text_part(raw)
    scheme = part.get("quantization_config")
    dtype = str(part.get("torch_dtype") or part.get("dtype") or "bfloat16").removeprefix("torch.")
    if not scheme:
        if dtype not in _DTYPES:
            raise RooflineError(
                f"config.json has torch_dtype {dtype!r}; expected one of {', '.join(_DTYPES)}"
            )
        return QUANTS[_DTYPES[dtype]]
    try:
        scheme = {**scheme, **(scheme.get("quantization") or {})}
        groups = _groups(scheme, _DTYPES.get(dtype, "fp16"))
        kv = str(scheme.get("kv_cache_quant_algo") or scheme.get("kv_cache_scheme"))
        if "'num_bits': 8" in kv or kv == "FP8":
            groups = [(replace(quant, kv="fp8"), names) for quant, names in groups]
        return groups[-1][0] if model is None else _by_product(model, groups, scheme)
    except (LookupError, TypeError, AttributeError, re.error):  # another tool's words
        raise RooflineError(
            f"config.json has quantization_config {str(scheme)[:100]}, which the roofline cannot read;"
            f" say it yourself with --quant, one of {', '.join(QUANTS)}"
        ) from None


def _by_product(model: ModelShape, groups: Sequence[_Group], scheme: Mapping[str, Any]) -> Quant:
    """The last group's storage, with each product that is stored in another way in most of its layers."""
    base, plain = groups[-1][0], groups[-1][0].plain
    kept = [name for key in _KEPT for name in scheme.get(key) or ()]
    n_params: Counter[tuple[str, Quant]] = Counter()
    for i, kind in enumerate(model.order):
        rules = [(quant, _covering(names, i)) for quant, names in [(plain, kept), *groups]]
        for linear in (each for each in model.layers[kind].linears(model.d) if each.quantised):
            modules = _MODULES.get(linear.name, f"self_attn.{linear.name}_proj").split()
            names = [f"{before}layers.{i}.{module}" for before in _BEFORE for module in modules]
            quant = next((quant for quant, covers in rules if any(map(covers.search, names))), plain)
            n_params[linear.name, quant] += linear.params
    by_name = {name: quant for (name, quant), _ in reversed(n_params.most_common())}
    others = [replace(quant, product=name) for name, quant in by_name.items() if quant != base]
    return base if base.experts_only else replace(base, others=tuple(others))


def _covering(names: Sequence[str], layer: int) -> re.Pattern[str]:
    """What finds the modules below these, globs, expressions behind `re:` or "Linear", in a layer."""
    each = [f"^(?:{name[3:]})" for name in names if name.startswith("re:")]
    for name in set(names).difference("re:" + one[4:-1] for one in each):
        own = re.search(r"layers\.(\d+)", name)
        if own is None or str(layer).startswith(own[1]):  # thousands of names make a slow expression
            glob = re.escape(name).replace(r"\*", ".*")
            each.append(rf"(?:^|\.){glob}(?:\.|$)")
    return re.compile("" if "Linear" in names else "|".join(each) or "(?!)")


_KEPT = (
    "ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers",
    "llm_int8_skip_modules",
)  # fmt: skip
_BEFORE = ("model.", "model.language_model.", "language_model.model.")
# The modules of a checkpoint that are one product here, where they are not `self_attn.NAME_proj`.
_MODULES = {
    "qkv": "self_attn.q_proj", "kv_a": "self_attn.kv_a_proj_with_mqa", "qkvz": "linear_attn.in_proj_qkvz",
    "index_q": "self_attn.indexer.wq_b", "index_k": "self_attn.indexer.wk", "down": "mlp.down_proj",
    "o": "self_attn.o_proj linear_attn.out_proj", "gate_up": "mlp.gate_proj mlp.gate_up_proj",
    "experts_gate_up": "mlp.experts.0.gate_proj block_sparse_moe.experts.0.w1",
    "experts_down": "mlp.experts.0.down_proj block_sparse_moe.experts.0.w2",
    "shared_gate_up": "mlp.shared_experts.gate_proj mlp.shared_expert.gate_proj",
    "shared_down": "mlp.shared_experts.down_proj mlp.shared_expert.down_proj",
}  # fmt: skip


def _groups(scheme: Mapping[str, Any], stream: str) -> Sequence[_Group]:
    """Each way of storing modules, and their names, those of all last; none where it is not known."""
    method, bits, size = str(scheme.get("quant_method")), scheme.get("bits"), scheme.get("group_size") or 128
    by_algo: dict[str, list[str]] = {}
    for name, row in (scheme.get("quantized_layers") or {"Linear": scheme}).items():
        if not re.search(r"experts\.[1-9]", name):  # one expert stands for all
            by_algo.setdefault(str(row.get("quant_algo")), []).append(name)
    if all(algo in _MODELOPT for algo in by_algo):
        return [(_MODELOPT[algo], names) for algo, names in by_algo.items()]
    groups = scheme.get("config_groups") or {}
    rows = [(row["weights"], row.get("input_activations"), row.get("targets")) for row in groups.values()]
    if method == "quark":
        groups = {**(scheme.get("layer_quant_config") or {}), "Linear": scheme.get("global_quant_config")}
        rows = [(row["weight"], row.get("input_tensors"), [name]) for name, row in groups.items()]
    if rows:
        ways = [(_stored(numbers, inputs, stream), names or ["Linear"]) for numbers, inputs, names in rows]
        return sorted(ways, key=lambda way: "Linear" in way[1])
    if method == "bitsandbytes":
        four, eight = Quant("int4", stream, stream, group=64), Quant("int8", "int8", stream)
        return [(four if scheme.get("load_in_4bit") else eight, ["Linear"])]
    if method.startswith(("awq", "gptq", "auto-round", "intel/auto-round")) and bits in (4, 8):
        group = size if size > 0 else None
        return [(Quant(f"int{bits}", stream, stream, group=group, zero_points=True), ["Linear"])]
    scales = "-block" if scheme.get("weight_block_size") else ""
    scales = "-static" if scheme.get("activation_scheme") == "static" and not scales else scales
    known = {"fp8": f"fp8{scales}", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
    return [(QUANTS[known[method]], ["Linear"])] if method in known else []


_MODELOPT = {
    "FP8": QUANTS["fp8-static"], "FP8_PER_CHANNEL_PER_TOKEN": QUANTS["fp8"], "FP8_PB_WO": QUANTS["fp8-block"],
    "NVFP4": QUANTS["nvfp4"], "W4A16_NVFP4": replace(QUANTS["nvfp4"], activations="bf16"),
    "W4A16_AWQ": QUANTS["int4"], "MXFP8": QUANTS["fp8"], "W4A16_MXFP4": QUANTS["mxfp4"],
}  # fmt: skip


def _stored(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, stream: str) -> Quant:
    """How numbers are stored in the words of compressed-tensors or Quark; `inputs`: where quantised."""
    strategy = str(weights.get("strategy") or weights.get("qscheme"))
    scales: Literal["dynamic", "static", "block"] = "dynamic"
    if inputs and inputs.get("dynamic", inputs.get("is_dynamic")) is False:
        scales = "static"
    elif strategy == "block":
        scales = "block"
    return Quant(
        _dtype(weights), _dtype(inputs) if inputs else stream, stream, scales=scales,
        group=weights.get("group_size") if "group" in strategy or strategy == "None" else None,
        zero_points=weights.get("symmetric") is False,
    )  # fmt: skip


def _dtype(numbers: Mapping[str, Any]) -> str:
    own = str(numbers.get("dtype") or f"{numbers.get('type')}{numbers.get('num_bits')}")
    kind = re.fullmatch(r"(fp|float|u?int)(4|8)(_e4m3)?", own)
    if kind is None:
        raise RooflineError(f"config.json quantises to numbers of type {own!r}, which is not known")
    return f"{'int' if 'int' in kind[1] else 'fp'}{kind[2]}"


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
        dtype=_DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16"),
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
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if types is not None and len(types) != n:
        raise RooflineError(f"config.json names {len(types)} layer_types for {n} layers")
    slides = [kind == "sliding_attention" for kind in types] if types else [default(i) for i in range(n)]
    return [window if slide else None for slide in slides]


def _llama(config: _Config, name: str) -> ModelShape:
    """Llama, Mistral, Phi-3: one kind of layer; Qwen2 and Qwen3 add a bias or a norm to queries and keys."""
    qwen2, qwen3 = config.family == "qwen2", config.family == "qwen3"
    bias = bool(config.get("attention_bias", False))
    from_layer = config.get("max_window_layers", 0) if qwen2 or qwen3 else 0
    slides = config.get("use_sliding_window", False) if qwen2 or qwen3 else "sliding_window" in config.raw
    ffn = Dense(config.count("intermediate_size"), bias=bool(config.get("mlp_bias", False)))
    layers = [
        (_attention(config, window=w, qkv_bias=bias or qwen2, out_bias=bias, qk_norm=qwen3), ffn)
        for w in _windows(config, lambda i: bool(slides) and i >= from_layer)
    ]
    return _shape(config, name, layers)


def _gemma(config: _Config, name: str) -> ModelShape:
    """Gemma: tied; from the second on, norms on both sides of each block and windows in most layers."""
    first, third = config.family == "gemma", config.family.startswith("gemma3")
    period = config.get("sliding_window_pattern", 6 if third else 2)
    ffn = Dense(config.count("intermediate_size"))
    layers = [
        (_attention(config, window=w, qk_norm=third), ffn)
        for w in _windows(config, lambda i: not first and (i + 1) % period != 0)
    ]
    return _shape(config, name, layers, norms_per_layer=2 if first else 4)


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
    moe = _moe(config, "num_local_experts", "intermediate_size")
    windows = _windows(config, lambda _: "sliding_window" in config.raw)
    return _shape(config, name, [(_attention(config, window=w), moe) for w in windows])


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
    """Qwen3-Next: three layers of linear attention, then one of gated attention; experts in each."""
    shared = config.count("shared_expert_intermediate_size")
    moe = _moe(config, "num_experts", d_ff_shared=shared, shared_gate=True)
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
    return _shape(config, name, [(linear if kind == "linear_attention" else full, moe) for kind in types])


def _gpt_oss(config: _Config, name: str) -> ModelShape:
    """gpt-oss: biases throughout, sinks, a window in every other layer; experts in each layer."""
    moe = _moe(config, "num_local_experts", "intermediate_size", router_bias=True, expert_bias=True)
    bias = bool(config.get("attention_bias", True))
    windows = _windows(config, lambda i: i % 2 == 0)
    layers = [(_attention(config, window=w, qkv_bias=bias, out_bias=bias, sinks=True), moe) for w in windows]
    return _shape(config, name, layers)


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


def _glm4_moe(config: _Config, name: str) -> ModelShape:
    """GLM-4.5: dense layers first, then experts of which some are shared; biased queries, keys, values."""
    attention = _attention(
        config,
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
    )
    first = config.get("first_k_dense_replace", 0)
    shared = config.count("moe_intermediate_size") * config.get("n_shared_experts", 0)
    moe = _moe(config, "n_routed_experts", d_ff_shared=shared, router_bias=True)
    dense = Dense(config.count("intermediate_size"))
    n = config.count("num_hidden_layers")
    return _shape(config, name, [(attention, dense if i < first else moe) for i in range(n)])


def _deepseek(config: _Config, name: str) -> ModelShape:
    """DeepSeek-V2, V3, Kimi-K2: latent attention, dense layers first, then experts of which some are shared.

    The multi-token-prediction layer that V3's checkpoint carries besides is not part of the model served.
    """
    attention = Mla(
        config.count("num_attention_heads"),
        config.get("q_lora_rank"),
        config.count("kv_lora_rank"),
        config.count("qk_nope_head_dim"),
        config.count("qk_rope_head_dim"),
        config.count("v_head_dim"),
        config.get("index_n_heads", 0),
        config.get("index_head_dim", 0),
        config.get("index_topk", 0),
    )
    shared = config.count("moe_intermediate_size") * config.get("n_shared_experts", 0)
    moe = _moe(config, "n_routed_experts", d_ff_shared=shared, router_bias=config.family != "deepseek_v2")
    first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    layers: list[tuple[Attention | Mla | DeltaNet, Dense | Moe]] = [
        (attention, moe if i >= first and i % every == 0 else Dense(config.count("intermediate_size")))
        for i in range(config.count("num_hidden_layers"))
    ]
    return _shape(config, name, layers)


_TIED = {"tie_word_embeddings": True}
# Values transformers fills in where a published config.json leaves them out.
_GEMMA3 = {
    **_TIED, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    "sliding_window": 4096,
}  # fmt: skip

_LLAMA4 = {"head_dim": 128, "attention_chunk_size": 8192}
_SPARSE = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}

FAMILIES: Mapping[str, tuple[Callable[[_Config, str], ModelShape], Mapping[str, Any]]] = {
    "llama": (_llama, {}),
    "mistral": (_llama, {}),
    "phi3": (_llama, {}),
    "qwen2": (_llama, {}),
    "qwen3": (_llama, {"head_dim": 128}),
    "gemma": (_gemma, {**_TIED, "head_dim": 256}),
    "gemma2": (_gemma, {**_TIED, "head_dim": 256, "sliding_window": 4096}),
    "gemma3": (_gemma, _GEMMA3),
    "gemma3_text": (_gemma, _GEMMA3),
    "gpt2": (_gpt2, _TIED),
    "opt": (_opt, _TIED),
    "mixtral": (_mixtral, {}),
    "qwen2_moe": (_qwen_moe, {}),
    "qwen3_moe": (_qwen_moe, {"head_dim": 128}),
    "deepseek_v2": (_deepseek, {}),
    "deepseek_v3": (_deepseek, {}),
    "deepseek_v32": (_deepseek, _SPARSE),
    "kimi_k2": (_deepseek, {}),
    "glm4_moe": (_glm4_moe, {"head_dim": 128}),
    "gpt_oss": (_gpt_oss, {"head_dim": 64, "sliding_window": 128}),
    "llama4_text": (_llama4, _LLAMA4),
    "llama4": (_llama4, _LLAMA4),
    "qwen3_next": (_qwen3_next, {"head_dim": 256}),
}
