"""FLOPs and parameters against torch itself: FlopCounterMode over transformers' models, difference 0.

Full-size models run on the meta device; experts are chosen by data, so mixtures run small, on the CPU. The
counter counts the whole rectangle of attention, and is blind to fused CPU attention and to grouped products.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from burstline.roofline.model.families import read_config
from burstline.roofline.model.ops import Step, ops
from burstline.roofline.model.shapes import QUANTS, ModelShape, Parallel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

MODELS = Path(__file__).parents[2] / "burstline/roofline" / "model" / "configs"
DENSE = [
    *("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"),
    *("gemma-2-9b", "gpt2", "opt-6.7b"),
]
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "torch_dtype": "float32",
}
GQA = TINY | {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 80}
MOE = GQA | {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
LATENT = TINY | {
    "num_key_value_heads": 4,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SMALL: dict[str, dict[str, Any]] = {
    "gemma2 with a window": GQA | {"model_type": "gemma2", "sliding_window": 16},
    "gemma3 with a window": GQA | {"model_type": "gemma3_text", "sliding_window": 16, "num_hidden_layers": 7},
    "gemma": GQA | {"model_type": "gemma"},
    "mistral with a window": GQA | {"model_type": "mistral", "sliding_window": 16},
    "phi3": TINY
    | {"model_type": "phi3", "num_key_value_heads": 2, "intermediate_size": 80, "pad_token_id": 0},
    "llama with biases": GQA | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mixtral": GQA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": MOE | {"model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE | {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [1]},
    "deepseek_v3": LATENT | {"model_type": "deepseek_v3", "q_lora_rank": 24},
    "gpt_oss": GQA
    | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
    # transformers computes all of Llama 4's experts for all tokens; with one it computes what is needed.
    "llama4": GQA
    | {
        "model_type": "llama4_text",
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 112,
        "pad_token_id": 0,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
    },
    "glm4_moe": MOE
    | {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "granite": GQA | {"model_type": "granite"},
    "smollm3": GQA | {"model_type": "smollm3", "pad_token_id": 0, "tie_word_embeddings": True},
    "seed_oss": GQA | {"model_type": "seed_oss", "pad_token_id": 0},
    "ernie4_5": GQA | {"model_type": "ernie4_5", "tie_word_embeddings": True},
    "exaone4": GQA
    | {
        "model_type": "exaone4",
        "sliding_window": 16,
        "sliding_window_pattern": 4,
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "olmo2": GQA | {"model_type": "olmo2", "pad_token_id": 0},
    "olmo3": GQA
    | {
        "model_type": "olmo3",
        "sliding_window": 16,
        "pad_token_id": 0,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere": GQA | {"model_type": "cohere", "pad_token_id": 0, "eos_token_id": 1},
    "cohere2": GQA
    | {
        "model_type": "cohere2",
        "sliding_window": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2 with whole queries": LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None},
}


def bundled(name: str) -> dict[str, Any]:
    return json.loads((MODELS / f"{name}.json").read_text())


def build(config: dict[str, Any], device: str) -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    keys = {key: value for key, value in config.items() if key != "model_type"}
    full = transformers.AutoConfig.for_model(config["model_type"], **keys)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(full, attn_implementation="eager")
    if device != "meta":
        model.set_experts_implementation("eager")
    return model.eval()


def flops(model: Any, batch: int, *chunks: int) -> list[int]:
    """What the counter sees of each chunk of prompts fed one after the other; logits for the last token."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    cache, counted = None, []
    with torch.no_grad():
        for n_tok in chunks:
            ids = torch.zeros((batch, n_tok), dtype=torch.long, device=model.device)
            with FlopCounterMode(display=False) as counter:
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            counted.append(counter.get_total_flops())
    return counted


def ours(config: dict[str, Any], batch: int, *chunks: int) -> list[int]:
    shape = read_config(config)
    steps = [Step.prefill(batch, n_tok, sum(chunks[:i])) for i, n_tok in enumerate(chunks)]
    return [full_flops(shape, step) for step in steps]


def full_flops(shape: ModelShape, step: Step) -> int:
    found = ops(shape, QUANTS["bf16"], Parallel(), step, absorb=False)
    return sum(op.count * int(op.flops_full) for op in found)


def test_linear_and_gated_attention_agree_in_every_product_with_weights():
    """The delta rule's own products depend on the kernel, so those of its weights are compared alone."""
    config = MOE | {
        "model_type": "qwen3_next", "num_experts": 8, "shared_expert_intermediate_size": 32, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "pad_token_id": 0,
    }  # fmt: skip
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = build(config, "cpu")
    assert n_params(model) == read_config(config).params()
    ids = torch.zeros((2, 37), dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False, depth=None) as counter:
        model(ids, logits_to_keep=1)
    by_module = counter.get_flop_counts()
    linear = sum(
        sum(counts.values())
        for name, counts in by_module.items()
        if name.rpartition(".")[2]
        in ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
    )
    found = ops(read_config(config), QUANTS["bf16"], Parallel(), Step.prefill(2, 37))
    assert sum(op.count * op.flops for op in found if op.name in ("qkvz", "ba", "qkv", "o")) == linear


def n_params(model: Any) -> int:
    """What the checkpoint holds; transformers keeps the routers' biases as buffers."""
    biases = [b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(p.numel() for p in model.parameters()) + sum(biases)


@pytest.mark.parametrize("name", DENSE)
def test_full_size_models_agree_with_torch_in_every_flop_and_parameter(name):
    """All parameters at full depth; FLOPs in layers of full width, four of which hold every kind of layer."""
    config = bundled(name)
    assert n_params(build(config, "meta")) == read_config(config).params()
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config |= {depth: 4}
    model = build(config, "meta")
    for batch, chunks in ((1, (512, 1)), (64, (512, 1)), (3, (37, 11, 1))):
        assert ours(config, batch, *chunks) == flops(model, batch, *chunks)


@pytest.mark.parametrize("name", SMALL)
def test_small_models_of_every_family_agree_in_every_flop_and_parameter(name):
    config = SMALL[name]
    model = build(config, "cpu")
    assert n_params(model) == read_config(config).params()
    for batch, chunks in ((1, (37, 1)), (3, (40, 1, 1)), (2, (20, 9, 1))):
        assert ours(config, batch, *chunks) == flops(model, batch, *chunks)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "mixtral-8x7b",
            "qwen3-30b-a3b",
            "qwen3-235b-a22b",
            "deepseek-v3",
            "deepseek-v3.2",
            "gpt-oss-120b",
            "gpt-oss-20b",
        ),
        *("llama-4-scout", "llama-4-maverick", "glm-4.5", "glm-4.5-air", "qwen3-next-80b-a3b", "qwen3-32b"),
    ],
)
def test_full_size_mixtures_have_every_parameter(name):
    config = bundled(name)
    assert n_params(build(config, "meta")) == read_config(config).params()


HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "head_dim": 32,
}  # fmt: skip
COUNTED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": GQA | HYBRID,
    "qwen3_5_moe_text": MOE | HYBRID | {"num_experts": 8, "shared_expert_intermediate_size": 32},
    "glm4_moe_lite": LATENT | {"q_lora_rank": 24},
    "glm_moe_dsa": LATENT | {"q_lora_rank": 24, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "minimax_m2": GQA | {"num_local_experts": 8, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize("name", COUNTED)
def test_families_whose_kernels_differ_from_torchs_have_every_parameter(name):
    config = COUNTED[name] | {"model_type": name, "pad_token_id": 0}
    assert n_params(build(config, "meta")) == read_config(config).params()
