"""How checkpoints as people have them are stored: of which parts, in which format, said in which file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from burstline.cli import main
from burstline.errors import RooflineError
from burstline.machine.catalogue import config_at
from burstline.roofline.model.checkpoint import quant_of
from burstline.roofline.model.families import bundled_config, load_model, read_config
from burstline.roofline.model.ops import Step, ops
from burstline.roofline.model.shapes import QUANTS, Parallel, Quant
from burstline.roofline.predict.capacity import weight_bytes

FACTS = Path(__file__).parents[1] / "data" / "real_configs.jsonl"
REAL = [json.loads(line) for line in FACTS.read_text().splitlines()]
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
KIMI = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": None}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
FP8_OF_NVIDIA = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
ATTENTION = {"q_a", "q_b", "kv_a", "kv_b"}
DENSE = {"gate_up", "down"}
ALGOS = (("self_attn.q_proj", "FP8"), ("mlp.gate_proj", "NVFP4"), ("mlp.down_proj", "NVFP4"))
SHARED = {"shared_gate_up", "shared_down"}


@pytest.mark.parametrize("row", REAL, ids=lambda row: row["names"][0])
def test_real_configs_have_their_published_counts_or_are_refused_in_one_line(row):
    if "params" in row:
        assert read_config(row["config"]).params() == row["params"]
        return
    kind = row["config"]["model_type"]
    with pytest.raises(RooflineError, match=f"model_type '{kind}'|a {kind} model needs") as caught:
        read_config(row["config"])
    assert "\n" not in str(caught.value)


def test_there_are_enough_real_configs():
    assert sum(len(row["names"]) for row in REAL) >= 40


def layers_of(pattern, n):
    return [pattern.format(i) for i in range(n)]


@pytest.mark.parametrize(
    ("model", "scheme", "weights", "others"),
    [
        ("kimi-k2", KIMI, "int4", dict.fromkeys(ATTENTION | {"o"} | DENSE | SHARED, "bf16")),
        (
            "deepseek-v3",
            {
                "quant_algo": "NVFP4",
                "exclude_modules": [
                    "lm_head",
                    *(name for part in ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")
                      for name in layers_of(f"model.layers.{{}}.self_attn.{part}", 61)),
                    "model.layers.61*",
                ],
            },
            "fp4",
            dict.fromkeys(ATTENTION, "bf16"),
        ),
        (
            "kimi-k2",
            {
                "quant_algo": "NVFP4",
                "ignore": [
                    "language_model.model.layers.0*",
                    *layers_of("language_model.model.layers.{}.self_attn*", 61),
                    *layers_of("language_model.model.layers.{}.mlp.shared_experts*", 61),
                ],
            },
            "fp4",
            dict.fromkeys(ATTENTION | {"o"} | DENSE | SHARED, "bf16"),
        ),
        (
            "llama-3.1-8b",
            {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]},
            "int4",
            {"qkv": "bf16", "o": "bf16"},
        ),
        (
            "qwen3-30b-a3b",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "all": {"targets": ["Linear"], "weights": INT4},
                    "attention": {"targets": ["re:.*self_attn.*"], "weights": FP8},
                },
            },
            "int4",
            {"qkv": "fp8", "o": "fp8"},
        ),
        (
            "qwen3-8b",
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{i}.{name}": {"quant_algo": algo}
                    for i in range(36)
                    for name, algo in ALGOS
                },
            },
            "fp4",
            {"qkv": "fp8", "o": "bf16"},
        ),
        ("qwen3-8b", {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "visual"]}, "fp8", {}),
        ("gpt-oss-20b", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
         "fp4", {}),
    ],
)  # fmt: skip
def test_what_a_checkpoint_leaves_out_is_stored_otherwise(model, scheme, weights, others):
    config = bundled_config(model) | {"quantization_config": scheme, "torch_dtype": "bfloat16"}
    quant = quant_of(config, read_config(config))
    assert quant.weights == weights
    assert {other.product: other.weights for other in quant.others} == others


def test_bytes_and_peaks_follow_the_storage_of_each_product():
    """Kimi-K2.5: experts of 4 bits, the rest of 16: 594 GB where 4 bits alone were 581."""
    config = bundled_config("kimi-k2") | {"quantization_config": KIMI, "torch_dtype": "bfloat16"}
    model = read_config(config)
    quant = quant_of(config, model)
    gigabytes = weight_bytes(model, quant, Parallel()) / 1e9
    assert gigabytes == pytest.approx(594.2, abs=0.1)
    assert gigabytes > weight_bytes(model, quant_of(config), Parallel()) / 1e9 + 13
    found = {op.name: op for op in ops(model, quant, Parallel(), Step.decode(1, 100)) if op.kind == "matmul"}
    for name, op in found.items():
        per_weight = op.weight_bytes / (op.n * op.k * op.groups)
        assert per_weight == pytest.approx(0.5625 if name.startswith("experts_") else 2), name


def test_two_formats_in_one_model_quantise_each_its_own_inputs():
    model = read_config(bundled_config("qwen3-8b"))
    mixed = Quant("fp4", "fp4", group=16, others=(Quant("fp8", "fp8", product="qkv"),))
    found = {op.name: op for op in ops(model, mixed, Parallel(), Step.decode(8, 100)) if op.kind == "matmul"}
    assert (found["qkv"].dtype, found["o"].dtype, found["lm_head"].dtype) == ("fp8", "fp4", "bf16")
    assert found["qkv"].weight_bytes == found["qkv"].n * found["qkv"].k


def folder(tmp_path, config, **files):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return str(tmp_path)


PLAIN = bundled_config("llama-3.1-70b")
NESTED = {
    "model_type": "some_vl",
    "text_config": bundled_config("llama-3.1-8b") | {"quantization_config": KIMI},
}


@pytest.mark.parametrize(
    ("config", "files", "quant"),
    [
        (PLAIN, {"hf_quant_config": {"quantization": FP8_OF_NVIDIA}}, QUANTS["fp8-static-kv8"]),
        (PLAIN, {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}}, QUANTS["nvfp4"]),
        (PLAIN, {"hf_quant_config": {}}, QUANTS["bf16"]),
        (PLAIN | {"quantization_config": {"quant_algo": "FP8", "kv_cache_scheme": "FP8"}}, {},
         QUANTS["fp8-static-kv8"]),
        (NESTED, {}, Quant("int4", group=32)),
        ({"language_config": PLAIN | {"torch_dtype": "float16"}}, {}, QUANTS["fp16"]),
        ({"llm_config": PLAIN | {"torch_dtype": None}, "torch_dtype": "float16",
          "quantization_config": {"quant_method": "awq", "bits": 4}}, {}, QUANTS["awq"]),
    ],
)  # fmt: skip
def test_storage_is_found_wherever_engines_read_it(tmp_path, config, files, quant):
    path = folder(tmp_path, config, **files)
    assert replace(load_model(path)[1], others=()) == quant
    assert quant_of(config_at(path)) == quant, "a run's manifest keeps it"


def test_a_checkpoint_of_half_the_size_fits(tmp_path, capsys):
    path = folder(tmp_path, PLAIN, hf_quant_config={"quantization": FP8_OF_NVIDIA})
    argv = ["bound", "--model", path, "--device", "h100-sxm5-80g", "--json", "--utilisation", "0.97"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["weight_bytes"] == pytest.approx(72.7e9, rel=0.001)


@pytest.mark.parametrize(
    ("scheme", "quant"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Quant("int4", group=64)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Quant("int8", "int8")),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True},
         Quant("int4", group=128, zero_points=True)),
        ({"quant_method": "gptq_marlin", "bits": 8, "group_size": -1}, Quant("int8", zero_points=True)),
        ({"quant_method": "awq_marlin", "bits": 4, "group_size": 64},
         Quant("int4", group=64, zero_points=True)),
        (
            {"quant_method": "quark", "global_quant_config": {
                "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False}}},
            QUANTS["fp8-static"],
        ),
        (
            {"quant_method": "quark", "layer_quant_config": {}, "global_quant_config": {
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
                "input_tensors": {"dtype": "fp4", "is_dynamic": True}}},
            Quant("fp4", "fp4", group=32),
        ),
        ({"quant_method": "modelopt", "config_groups": {"g": {
            "weights": {"type": "float", "num_bits": 4, "group_size": 16, "dynamic": False}}}},
         Quant("fp4", group=16)),
        ({"quant_algo": "W4A16_NVFP4"}, Quant("fp4", group=16)),
        ({"quant_method": "modelopt", "quantization": FP8_OF_NVIDIA}, QUANTS["fp8-static-kv8"]),
    ],
)  # fmt: skip
def test_more_tools_that_quantise_are_read(scheme, quant):
    assert quant_of({"quantization_config": scheme}) == quant


@pytest.mark.parametrize(
    "scheme",
    [
        "int4",
        [1],
        {"quant_method": None},
        {"quant_method": "aqlm", "bits": 2},
        {"quant_method": "awq", "bits": "4"},
        {"quant_method": "quark"},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3"}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": None}}},
        {"quant_method": "compressed-tensors", "config_groups": [INT4]},
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["re:("]},
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": 7},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W2A16"}}},
        {"quant_algo": "MIXED_PRECISION"},
    ],
)
def test_a_scheme_of_another_shape_is_refused_in_one_line(tmp_path, capsys, scheme):
    path = folder(tmp_path, PLAIN | {"quantization_config": scheme})
    assert main(["bound", "--model", path, "--device", "h200-sxm-141g"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "quantis" in line or "quantization_config" in line


def test_a_group_size_that_is_not_said_is_the_usual_one():
    scheme = {"quant_method": "awq", "bits": 4, "group_size": None}
    assert quant_of({"quantization_config": scheme}).group == 128


def test_quant_is_taken_where_the_storage_cannot_be_read(tmp_path):
    path = folder(tmp_path, PLAIN | {"quantization_config": {"quant_method": "aqlm", "bits": 2}})
    with pytest.raises(RooflineError, match="say it yourself with --quant"):
        load_model(path)
    assert load_model(path, "int4")[1] == QUANTS["int4"]
    assert main(["bound", "--model", path, "--device", "h200-sxm-141g", "--quant", "int4"]) == 0


def weights(path, sizes, cut=None):
    """A safetensors file of these tensors, by name and bytes, without their bytes."""
    rows, at = {"__metadata__": {"format": "pt"}}, 0
    for name, n_bytes in sizes.items():
        rows[name] = {"dtype": "U8", "shape": [n_bytes], "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    header = json.dumps(rows).encode()
    path.write_bytes((len(header).to_bytes(8, "little") + header)[:cut])


EMBEDDINGS = 2 * 2 * 128256 * 8192
ALL = 2 * 70_553_706_496
MORE = {"model.layers.80.eh_proj.weight": 10**9, "vision_model.patch.weight": 10**9, "mtp.fc.weight": 10**9}


@pytest.mark.parametrize(
    ("parts", "gigabytes", "is_said"),
    [
        ({"model.embed_tokens.weight": EMBEDDINGS, "model.layers.0.x": ALL - EMBEDDINGS}, 141.1, False),
        ({"model.embed_tokens.weight": EMBEDDINGS, "model.layers.0.x": (ALL - EMBEDDINGS) // 2}, 72.7, True),
        ({"model.layers.79.x": ALL} | MORE, 141.1, False),
        ({"lm_head.weight": EMBEDDINGS, "model.layers.0.x": (ALL - EMBEDDINGS) // 4}, 38.5, True),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_are_those_of_the_files_and_a_disagreement_is_said(
    tmp_path, capsys, parts, gigabytes, is_said, sharded
):
    path = folder(tmp_path, PLAIN)
    if sharded:
        names = {name: f"model-{k:05d}.safetensors" for k, name in enumerate(parts)}
        for name, file in names.items():
            weights(tmp_path / file, {name: parts[name]})
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        weights(tmp_path / "consolidated.safetensors", {"the.same.again": ALL})
    else:
        weights(tmp_path / "model.safetensors", parts)
    model, quant = load_model(path)
    assert weight_bytes(model, quant, Parallel()) / 1e9 == pytest.approx(gigabytes, abs=0.2)
    assert main(["bound", "--model", path, "--device", "h200-sxm-141g", "--tp", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("bytes are as in the files, products as config.json says" in text) == is_said
    assert load_model(path, "bf16")[1] == QUANTS["bf16"], "what a person states wins"


@pytest.mark.parametrize("cut", [0, 5, 40])
def test_a_cut_file_of_weights_is_one_line(tmp_path, capsys, cut):
    path = folder(tmp_path, PLAIN)
    weights(tmp_path / "model.safetensors", {"model.layers.0.x": ALL}, cut)
    assert main(["bound", "--model", path, "--device", "h200-sxm-141g"]) == 2
    assert "is cut or no safetensors file" in capsys.readouterr().err
