"""Shapes read from config.json: parameter counts of published checkpoints, and errors that name the key."""

import json
from math import comb
from pathlib import Path

import pytest

from burstline.errors import RooflineError
from burstline.roofline.device.calibration import load_calibration
from burstline.roofline.device.device import load_device
from burstline.roofline.model.checkpoint import quant_of
from burstline.roofline.model.families import FAMILIES, read_config
from burstline.roofline.model.ops import Step, ops
from burstline.roofline.model.shapes import QUANTS, Dense, Moe, Parallel, Quant
from burstline.roofline.predict.capacity import kv_bytes, state_bytes, weight_bytes
from burstline.roofline.predict.predict import predict

MODELS = Path(__file__).parents[2] / "burstline/roofline" / "model" / "configs"
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "deepseek-v3": 671_026_419_200,
    "gpt2": 124_439_808,
    "opt-6.7b": 6_658_473_984,
    "reference": 3_548_416,
    # As transformers builds them (test_flops.py); published rounded: 117B, 21B, 109B with vision, 400B, 355B
    # and 106B with the layer that predicts further tokens, 80B, 1T, 685B with that layer.
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "glm-4.5": 352_797_829_024,
    "glm-4.5-air": 106_852_251_264,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "kimi-k2": 1_026_408_232_448,
    "deepseek-v3.2": 671_877_944_064,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-405b": 405_853_388_800,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def bundled(name: str) -> dict[str, object]:
    return json.loads((MODELS / f"{name}.json").read_text())


def test_every_bundled_model_has_a_published_count():
    assert {path.stem for path in MODELS.glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoint(name):
    assert read_config(bundled(name), name).params() == PUBLISHED[name]


def test_a_token_passes_through_the_experts_it_picks_only():
    assert read_config(bundled("mixtral-8x7b")).active_params() == 12_879_925_248
    dense = read_config(bundled("llama-2-7b"))
    assert dense.active_params() == dense.params()


@pytest.mark.parametrize("key", [key for key in LLAMA if key not in ("model_type", "num_key_value_heads")])
def test_a_missing_key_is_named(key):
    with pytest.raises(RooflineError, match=f"config.json has no {key}, which a llama model needs"):
        read_config({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "'mamba', which the roofline does not know; it knows llama"),
        ({"model_type": None}, "model_type None"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide into 3 KV heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0; expected a whole number"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "visit 3 of 2 experts"),
        ({"hidden_size": 66}, "hidden_size 66 does not divide into 4 heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; expected a whole number"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    ],
)
def test_an_odd_config_is_refused_with_its_value(change, says):
    with pytest.raises(RooflineError, match=says):
        read_config(LLAMA | change)


def test_opt_with_a_projected_embedding_is_refused():
    with pytest.raises(RooflineError, match="OPT-350m"):
        read_config(bundled("opt-6.7b") | {"word_embed_proj_dim": 512})


def test_head_size_need_not_be_hidden_size_over_heads():
    shape = read_config(LLAMA | {"head_dim": 40})
    assert [(linear.n, linear.k) for linear in shape.layers[0].linears(64)[:2]] == [(320, 64), (64, 160)]


def test_the_text_part_of_a_multimodal_config_is_read():
    whole = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"} | {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
    }}  # fmt: skip
    shape = read_config(whole, "gemma-3-4b")
    assert shape.params() == 3_880_263_168
    assert sorted((layer.attention.window or 0, layer.count) for layer in shape.layers) == [
        (0, 5),
        (1024, 29),
    ]


def test_windows_follow_layer_types_or_the_familys_rule():
    def windows(**more: object) -> list[tuple[int | None, int]]:
        shape = read_config(bundled("gemma-2-9b") | more)
        return [(layer.attention.window, layer.count) for layer in shape.layers]

    assert windows() == [(4096, 21), (None, 21)]
    assert windows(layer_types=["full_attention"] * 42) == [(None, 42)]
    mistral = read_config(bundled("mistral-7b"))
    assert [layer.attention.window for layer in mistral.layers] == [4096]


def test_qwen_windows_stay_closed_unless_asked_for():
    closed = read_config(bundled("qwen2.5-7b") | {"sliding_window": 4096})
    assert [layer.attention.window for layer in closed.layers] == [None]
    opened = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20}
    shape = read_config(bundled("qwen2.5-7b") | opened)
    assert [(layer.attention.window, layer.count) for layer in shape.layers] == [(None, 20), (4096, 8)]


@pytest.mark.parametrize("window", [None, 0, -1])
def test_a_window_of_nothing_is_none(window):
    shape = read_config(bundled("mistral-7b") | {"sliding_window": window})
    assert [layer.attention.window for layer in shape.layers] == [None]


def test_mixtures_know_which_layers_are_dense():
    shape = read_config(bundled("deepseek-v3"))
    assert [(type(layer.ffn), layer.count) for layer in shape.layers] == [(Dense, 3), (Moe, 58)]
    sparse = read_config(bundled("qwen3-30b-a3b") | {"mlp_only_layers": [0], "decoder_sparse_step": 2})
    assert [(type(layer.ffn), layer.count) for layer in sparse.layers] == [(Dense, 24), (Moe, 24)]


@pytest.mark.parametrize(
    ("config", "quant"),
    [
        ({"torch_dtype": "float16"}, Quant("fp16", "fp16", "fp16")),
        ({"dtype": "float32"}, Quant("fp32", "fp32", "fp32")),
        ({}, Quant()),
        (
            {
                "torch_dtype": "float16",
                "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
            },
            Quant("int4", "fp16", "fp16", group=128, zero_points=True),
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, Quant("fp8", "fp8", "bf16")),
    ],
)
def test_the_checkpoint_says_how_it_is_stored(config, quant):
    assert quant_of(config) == quant


@pytest.mark.parametrize(
    "config", [{"torch_dtype": "int3"}, {"quantization_config": {"quant_method": "aqlm", "bits": 2}}]
)
def test_an_unknown_storage_is_refused(config):
    with pytest.raises(RooflineError, match=r"int3|aqlm"):
        quant_of(config)


def grouped(weights, inputs=None, **other):
    scheme = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    scheme["config_groups"]["group_0"]["input_activations"] = inputs
    return {"torch_dtype": "bfloat16", "quantization_config": scheme | other}


FP8 = {"type": "float", "num_bits": 8, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("config", "quant"),
    [
        (grouped(FP8, FP8 | {"dynamic": False}), QUANTS["fp8-static"]),
        (grouped(FP8, FP8 | {"dynamic": True, "strategy": "token"}), QUANTS["fp8"]),
        (grouped(FP8, FP8 | {"dynamic": False}, kv_cache_scheme=FP8), QUANTS["fp8-static-kv8"]),
        (grouped(FP8 | {"strategy": "block"}, FP8 | {"dynamic": True}), QUANTS["fp8-block"]),
        (
            grouped({"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}),
            QUANTS["int4"],
        ),
        (
            grouped(
                {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
                {"type": "float", "num_bits": 4, "dynamic": "local"},
            ),
            QUANTS["nvfp4"],
        ),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, QUANTS["fp8-static"]),
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"
                }
            },
            QUANTS["nvfp4-kv8"],
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, QUANTS["mxfp4"]),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            QUANTS["fp8-block"],
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            QUANTS["fp8-static"],
        ),
    ],
)  # fmt: skip
def test_quantised_checkpoints_of_todays_tools_are_read(config, quant):
    assert quant_of(config) == quant


def test_storage_of_an_unheard_of_width_is_refused():
    with pytest.raises(RooflineError, match="int3"):
        quant_of(grouped({"type": "int", "num_bits": 3}))


def test_only_the_experts_of_gpt_oss_are_stored_in_four_bits():
    model = read_config(bundled("gpt-oss-120b"))
    gibibytes = weight_bytes(model, QUANTS["mxfp4"], Parallel()) / 2**30
    assert gibibytes == pytest.approx(64.4, rel=0.01)  # in vLLM, which pads; its published checkpoint: 60.8
    quantised = [
        op for op in ops(model, QUANTS["mxfp4"], Parallel(), Step.decode(1, 100)) if op.kind == "matmul"
    ]
    for op in quantised:
        per_weight = op.weight_bytes / (op.n * op.k * op.groups)
        assert per_weight == pytest.approx(0.53125 if op.name.startswith("experts_") else 2)


def test_a_chunk_of_positions_sees_itself_only():
    step = Step.of([(10, 10, 1), (3, 9, 1)])
    assert step.keys_seen(chunk=4) == 3 * 10 - 7 + (3 + 4 + 1)  # 1..4, 1..4, 1..2; positions 7, 8 and 9
    assert step.keys_read(chunk=4) == 10 + 5
    assert Step.decode(1, 9).keys_read(chunk=4) == 1
    assert Step.prefill(1, 4).keys_seen(chunk=4) == Step.prefill(1, 4).keys_seen()


def test_sparse_attention_reads_no_more_keys_than_it_selects_but_scores_all():
    model = read_config(bundled("deepseek-v3.2"))
    short, long = (
        {op.name: op for op in ops(model, QUANTS["bf16"], Parallel(), Step.decode(1, n))}
        for n in (8192, 65536)
    )
    assert short["attention"].kv_bytes == long["attention"].kv_bytes == 2048 * 576 * 2
    assert long["indexer"].flops == 8 * short["indexer"].flops == 2 * 64 * 128 * 65536


def test_an_indexers_keys_and_products_have_eight_bits():
    """61 layers of 512 + 64 elements in the cache's dtype and 128 of one byte; 64 heads of 128."""
    model = read_config(bundled("deepseek-v3.2"))
    assert kv_bytes(model, QUANTS["bf16"], Parallel(), 1) == 61 * (2 * 576 + 128)
    found = {op.name: op for op in ops(model, QUANTS["bf16"], Parallel(), Step.prefill(1, 8192))}
    assert found["kv_write"].kv_bytes == 8192 * (2 * 576 + 128)
    indexer = found["indexer"]
    assert indexer.flops == 2 * 64 * 128 * comb(8193, 2)
    for name, peak in (("h200-sxm-141g", "fp8"), ("a100-sxm4-80g", "bf16")):
        device = load_device(name)
        seconds = indexer.count * indexer.flops / device.peaks[peak]
        assert predict(indexer, device, None).seconds == pytest.approx(seconds)
        known = load_calibration(device)
        expected = pytest.approx(seconds / known.constants.prompt, rel=0.1)
        assert predict(indexer, device, known).seconds == expected


def test_a_linear_attentions_state_is_as_large_for_any_context():
    model = read_config(bundled("qwen3-next-80b-a3b"))
    assert kv_bytes(model, QUANTS["bf16"], Parallel(), 1) == 12 * 2 * 2 * 2 * 256
    assert state_bytes(model, Parallel()) == 36 * 4 * (32 * 128 * 128 + 4 * (2 * 16 * 128 + 32 * 128))
    moved = [
        next(
            op for op in ops(model, QUANTS["bf16"], Parallel(), Step.decode(4, n)) if op.name == "delta_rule"
        )
        for n in (100, 100_000)
    ]
    assert moved[0] == moved[1]


@pytest.mark.parametrize(
    ("quant", "bytes_"),
    [
        (Quant(), 2),
        (Quant("int4", group=128), 0.515625),
        (Quant("int4", group=128, zero_points=True), 0.51953125),
        (Quant("fp8", "fp8"), 1),
        (Quant("int8", group=64), 1.03125),
    ],
)
def test_a_weight_takes_its_bits_and_its_share_of_the_scales(quant, bytes_):
    assert quant.weight_bytes == bytes_


def test_eight_bit_products_keep_a_sixteen_bit_stream_between_them():
    assert Quant("fp8", "fp8").stream == "bf16"
    assert Quant("int4", "fp16").stream == "fp16"
    with pytest.raises(RooflineError, match="unknown kv dtype 'fp7'"):
        Quant(kv="fp7")


def test_every_family_has_a_reader():
    assert len(FAMILIES) >= 8
