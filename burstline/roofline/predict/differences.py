"""Where published kernels of an op differ by so much that no constant tells which of two choices is faster.

Factors are measured times over predicted ones. Sources: the measured tables of aiconfigurator-core 0.12.0.
"""

from burstline.roofline.device.device import Device
from burstline.roofline.model.ops import Op

_NARROW = 768 * 2048  # weights of `down` in Qwen3-30B-A3B, whose int4 and fp8 experts were slower than bf16
# H200, 61 layers: 5.4 ms a step more than V3 with 8 requests of 32k, where 3.6 is predicted.
_SPARSE, _SPARSE_MOST = "sparse attention: 5.4 ms a step more than dense in vLLM 0.24, H200", 1.36


def difference(op: Op, device: Device) -> tuple[float, float, str]:
    """Factors of the fastest and slowest published kernel, and which those are; (1, 1, ""): they agree.

    Of an exchange, an indexer and a pass that quantises the factors are the floor's.
    """
    blackwell, decodes, index = device.arch == "sm100", op.phase == "decode", op.name == "indexer"
    weights = op.n * op.k * op.groups if op.kind == "matmul" and op.name.startswith("experts_") else 0
    narrow = op.n * op.k <= _NARROW * (1 if op.name == "experts_down" else 2)
    cache_8 = op.kind == "attention" and decodes and not index and op.kv_element_bytes <= 1
    pcie = op.collective == "all_reduce" and op.n_ranks > 2 and device.links[-1].kind.startswith("PCIe")
    rows = (
        (op.collective == "all_to_all", 14 / 34, 77 / 34,
         "expert exchange: 14 us in SGLang, 77 us in TensorRT-LLM, H100, 4 tokens"),
        (pcie, 2.9 / 3.75, 8.0, "all-reduce on PCIe: 2.9 ms in one table, 30 ms in four, L40S, 8 ranks"),
        (index and decodes and blackwell, 0.0, _SPARSE_MOST, f"{_SPARSE}, none in TensorRT-LLM, GB200"),
        (index and decodes, 1.0, _SPARSE_MOST, _SPARSE),
        (op.weight_bytes < weights and (narrow or blackwell), 1.0, 220 / 41,
         "experts in 4 bits: 220 us in vLLM 0.19, B200, 16 tokens (bf16: 117)"),
        (op.weight_bytes < 2 * weights and narrow, 1.0, 638 / 152,
         "narrow experts in 8 bits: 638 us in vLLM 0.24, H100 (bf16: 220)"),
        (op.name == "quantise" and op.m <= 16 and blackwell, 1.0, 4.0,
         "quantising few rows: 8 us in TensorRT-LLM, B200"),
        (cache_8 and device.arch == "sm89", 1.0, 1057 / 182,
         "8-bit cache: 1,057 us in TensorRT-LLM, L40S, 64k tokens (16 bits: 415)"),
        (cache_8 and device.arch == "sm90" and op.kv_bytes < 200e6, 1.0, 0.92 / 0.58,
         "8-bit cache: 0.58 of the bandwidth in vLLM 0.24, H100, up to 200 MB"),
    )  # fmt: skip
    return next(((low, high, said) for holds, low, high, said in rows if holds), (1.0, 1.0, ""))
