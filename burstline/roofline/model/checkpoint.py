"""How a checkpoint is stored: by its config.json, hf_quant_config.json and the headers of its weights."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from burstline.dtypes import FLOATS
from burstline.errors import RooflineError, read_small, tables_beside
from burstline.roofline.model.shapes import ELEMENT_BYTES, QUANTS, ModelShape, Quant

MOST_BYTES = 32 << 20
_Group = tuple[Quant, Sequence[str]]
_NAMES = tables_beside(__file__, "checkpoint.toml")
_MODELOPT = {name: replace(QUANTS[row.pop("like")], **row) for name, row in _NAMES["modelopt"].items()}


def held_by(folder: Path, model: ModelShape, quant: Quant) -> Quant:
    """The storage with the bytes of the folder's own weights, where they are another number than it says."""
    n_bytes, index = 0, folder / "model.safetensors.index.json"
    names = json_object(index).get("weight_map", {}).values() if index.is_file() else ["model.safetensors"]
    paths = {folder / name for name in names}
    if quant.experts_only or not paths or not all(path.is_file() for path in paths):
        return quant
    for path in paths:
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000))  # the format's limit
        try:
            for name, row in json.loads(header).items():
                layer = re.search(r"layers\.(\d+)\.", name)  # those beyond the last predict further tokens
                unused = _UNSERVED.search(name) or (model.tied and "lm_head" in name)
                if not unused and (layer is None or int(layer[1]) < model.n_layers):
                    n_bytes += row["data_offsets"][1] - row["data_offsets"][0]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise RooflineError(f"{path} is cut or no safetensors file; expected a header of JSON") from None
    linears = [(layer.count * each.params, quant.of(each.name).weight_bytes)
               for layer in model.layers for each in layer.linears(model.d) if each.quantised]  # fmt: skip
    others = (model.params() - sum(n for n, _ in linears)) * ELEMENT_BYTES[quant.stream]
    held = (n_bytes - others) / sum(n * each for n, each in linears)
    return quant if held <= 0 or abs(held - 1) < 0.03 else quant.holding(held)


_UNSERVED = re.compile(r"^__metadata__$|vision|visual|audio|projector|patch|mtp\.|\.attn\.bias$")


def config_file(path: Path) -> dict[str, Any]:
    """A config.json, with what `hf_quant_config.json` beside it says of the storage (as NVIDIA writes it)."""
    config, beside = json_object(path), path.with_name("hf_quant_config.json")
    own = text_part(config).get("quantization_config") or {}
    said = json_object(beside).get("quantization") if beside.is_file() else None
    if said and isinstance(own, dict):
        own = {"quant_method": "modelopt", **said, **own}
    return config | ({"quantization_config": own} if own else {})


def json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(path, MOST_BYTES, "a config.json"))
    except OSError:
        raise RooflineError(f"no {path.name} in {path.parent}") from None
    except (ValueError, RecursionError) as error:
        raise RooflineError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RooflineError(f"{path} is not a JSON object")
    return found


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
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
    part = text_part(raw)
    scheme = part.get("quantization_config")
    dtype = str(part.get("torch_dtype") or part.get("dtype") or "bfloat16").removeprefix("torch.")
    if not scheme:
        if dtype not in FLOATS:
            raise RooflineError(f"config.json has torch_dtype {dtype!r}; expected one of {', '.join(FLOATS)}")
        return QUANTS[FLOATS[dtype]]
    try:
        scheme = {**scheme, **(scheme.get("quantization") or {})}
        groups = _groups(scheme, FLOATS.get(dtype, "fp16"))
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
    kept = [name for key in _NAMES["not_quantised"] for name in scheme.get(key) or ()]
    n_params: Counter[tuple[str, Quant]] = Counter()
    for i, kind in enumerate(model.order):
        rules = [(quant, _covering(names, i)) for quant, names in [(plain, kept), *groups]]
        for linear in (each for each in model.layers[kind].linears(model.d) if each.quantised):
            modules = _NAMES["modules"].get(linear.name, [f"self_attn.{linear.name}_proj"])
            starts = [f"{before}layers.{i}" for before in _NAMES["before_layers"]]
            names = [f"{start}.{module}" for start in starts for module in modules]
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
