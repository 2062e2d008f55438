"""Memory that fits: published logs of engines against the room that is predicted, in GiB a device."""

import pytest

from burstline.roofline.device.device import load_device
from burstline.roofline.model.checkpoint import quant_of
from burstline.roofline.model.families import bundled_config, load_model, read_config
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.capacity import request_bytes, room, weight_bytes
from burstline.roofline.predict.predict import Deployment

GIB = 2**30


@pytest.mark.parametrize(
    ("model", "device", "quant", "utilisation", "tp", "weights", "kv"),
    [
        ("deepseek-v3", "h200", None, 0.9, 8, 79.7, 41.6),  # R1 fp8
        ("llama-3.1-8b", "h100", None, 0.95, 1, None, 58.11),  # from here: vLLM 0.19, H100
        ("qwen2.5-7b", "h100", None, 0.95, 1, None, 58.53),
        ("qwen3-30b-a3b", "h100", None, 0.95, 1, None, 15.4),
        ("llama-3.1-70b", "h100", "fp8", 0.95, 2, None, 37.6),
        ("mixtral-8x7b", "h100", None, 0.95, 2, None, 28.8),
        ("llama-4-scout", "h100", None, 0.95, 4, 53.1, 17.1),
        ("gpt-oss-120b", "h100", None, 0.95, 1, 64.4, 1.71),  # the engine refused to start
        ("gpt-oss-20b", "h100", None, 0.9, 2, 7.01, None),
    ],
)
def test_published_rooms_are_met_or_inside_the_band(model, device, quant, utilisation, tp, weights, kv):
    shape, stored = load_model(model, quant)
    of = room(Deployment(shape, stored, Parallel(tp=tp), load_device(device)), utilisation=utilisation)
    met_or_inside(of, weights, kv)


def met_or_inside(of, weights, kv):
    if weights:
        assert of.weight_bytes / GIB == pytest.approx(weights, rel=0.05)
    if kv:
        low, high = (each / GIB for each in of.kv_range_bytes)
        assert of.kv_bytes / GIB == pytest.approx(kv, rel=0.05) or low <= kv <= high


def text_model(family, hidden, wide, n_layers, n_heads, n_kv, vocab, **more):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    counts = dict(zip(names, (hidden, wide, n_layers, n_heads), strict=True))
    counts |= {"num_key_value_heads": n_kv, "vocab_size": vocab, "max_position_embeddings": 40960}
    return {"model_type": family, "tie_word_embeddings": False} | counts | more


LLAMA_405B = bundled_config("llama-3.1-405b") | {
    "quantization_config": {
        "quant_method": "fbgemm_fp8",
        "modules_to_not_convert": [
            *(f"model.layers.{k}.self_attn.{name}_proj" for k in range(126) for name in "qkvo"),
            *(f"model.layers.{k}.mlp.{name}_proj" for k in (0, 125) for name in ("gate", "up", "down")),
        ],
    }
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
QWEN3_235B = bundled_config("qwen3-235b-a22b") | {"quantization_config": BLOCKS}


@pytest.mark.parametrize(
    ("config", "tp", "utilisation", "weights", "kv"),
    [
        (text_model("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128), 1, 0.95, None, 45.2),
        (
            text_model("gemma2", 4608, 36864, 46, 32, 16, 256000, head_dim=128, tie_word_embeddings=True),
            1,
            0.95,
            None,
            20.6,
        ),
        (text_model("qwen2", 8192, 29568, 80, 64, 8, 152064), 2, 0.95, None, 3.2),
        (LLAMA_405B, 8, 0.95, 57.75, None),
        (QWEN3_235B, 4, 0.9, None, 8.02),  # 178,880 tokens
    ],
    ids=["qwen3-14b", "gemma-2-27b", "qwen2.5-72b", "llama-3.1-405b-fp8", "qwen3-235b-fp8"],
)
def test_published_rooms_of_other_files_are_met_or_inside_the_band(config, tp, utilisation, weights, kv):
    shape = read_config(config)
    on = Deployment(shape, quant_of(config, shape), Parallel(tp=tp), load_device("h100"))
    met_or_inside(room(on, utilisation=utilisation), weights, kv)


def test_fitting_has_three_answers():
    shape, stored = load_model("gpt-oss-120b")
    parallel, h100 = Parallel(), load_device("h100")
    of = room(Deployment(shape, stored, parallel, h100), utilisation=0.95)
    assert of.fits(1, 1024) == "yes"
    assert of.fits(1, 131072) == "within the band"
    assert of.fits(10, 131072) == "no"
    shape, stored = load_model("deepseek-v3")
    of = room(Deployment(shape, stored, Parallel(tp=8), load_device("h200")))
    assert of.fits(8, 32768) == "yes"


# As transformers' script that converts Gemma 3 has it.
GEMMA_27B = {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    "vocab_size": 262208, "max_position_embeddings": 131072,
}  # fmt: skip
# SigLIP as google/gemma_pytorch has it.
TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}


def test_windowed_requests_are_counted_as_the_engine_groups_its_layers():
    """gemma-3-27b, vLLM 0.19, H100, util 0.95: 4.46 requests of 8,192 tokens in 19.5 GiB."""
    shape = read_config({"text_config": GEMMA_27B, "vision_config": TOWER, "model_type": "gemma3"})
    parallel = Parallel()
    one = request_bytes(shape, QUANTS["bf16"], parallel, 8192)
    assert 19.5 * GIB / one == pytest.approx(4.46, rel=0.01)
    assert weight_bytes(shape, QUANTS["bf16"], parallel) / GIB == pytest.approx(51.45, rel=0.02)
    of = room(Deployment(shape, QUANTS["bf16"], parallel, load_device("h100")), utilisation=0.95)
    assert of.kv_bytes / GIB == pytest.approx(19.5, rel=0.05)
    assert of.largest_batch(8192) == 4


def test_a_vision_tower_takes_memory_but_is_no_parameter_of_the_text():
    with_tower = read_config({"text_config": GEMMA_27B, "vision_config": TOWER, "model_type": "gemma3"})
    plain = read_config(GEMMA_27B)
    assert with_tower.params() == plain.params()
    more = weight_bytes(with_tower, QUANTS["bf16"], Parallel()) - weight_bytes(
        plain, QUANTS["bf16"], Parallel()
    )
    assert more == 2 * TOWER["num_hidden_layers"] * (4 * 1152**2 + 2 * 1152 * 4304)  # its products


def test_modules_that_stay_in_16_bits_are_counted_so():
    """Llama-3.1-405B-FP8, TP 8: 57.75 GiB a device, as its attention stays bf16."""
    from burstline.roofline.model.checkpoint import quant_of
    from burstline.roofline.model.families import bundled_config

    kept = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(126) for name in ("q", "k", "v", "o")]
    scheme = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": kept}
    shape, _ = load_model("llama-3.1-405b")
    stored = quant_of(bundled_config("llama-3.1-405b") | {"quantization_config": scheme}, shape)
    assert weight_bytes(shape, stored, Parallel(tp=8)) / GIB == pytest.approx(57.75, rel=0.05)
