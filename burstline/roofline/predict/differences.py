"""Where published kernels of an op differ by so much that no constant tells which of two choices is faster.

Factors are measured times over predicted ones. Sources: the measured tables of aiconfigurator-core 0.12.0.
"""

from burstline.roofline.device.device import Device
from burstline.roofline.model.ops import Op

_NARROW = (
    768 * 2048
)  # weights of an expert's `down` in Qwen3-30B-A3B, where int4 and fp8 were slower than bf16
_FEW_ROWS = 16


def difference(op: Op, device: Device) -> tuple[float, float, str] | None:
    """The factors of the fastest and the slowest published kernel, and which those are; None: they agree.

    Of an exchange, an indexer and a pass that quantises the factors are the floor's.
    """
    if op.collective == "all_to_all":
        return 14 / 34, 77 / 34, "expert exchange: 14 us in SGLang, 77 us in TensorRT-LLM, H100, 4 tokens"
    if op.kind == "collective":
        pcie = bool(device.links) and device.links[-1].kind.startswith("PCIe") and op.n_ranks > 2
        table = "all-reduce on PCIe: 2.9 ms in one table, 30 ms in four, L40S, 8 ranks"
        return (2.9 / 3.75, 30 / 3.75, table) if pcie and op.collective == "all_reduce" else None
    if op.name == "indexer" and op.phase == "decode":
        # H200: 5.4 ms a step more than V3 with 8 requests of 32k, where 3.6 is predicted
        table = "sparse attention: 5.4 ms a step more than dense in vLLM 0.24, H200"
        low = 0.0 if device.arch == "sm100" else 1.0
        return low, 1 + (5.4e-3 - 3.6e-3) / 61 / 81.6e-6, table + ", none in TensorRT-LLM, GB200" * (low == 0)
    if op.name.startswith("experts_") and op.kind == "matmul":
        return _experts(op, device)
    if op.name == "quantise" and device.arch == "sm100" and op.m <= _FEW_ROWS:
        return 1.0, 4.0, "quantising few rows: 8 us in TensorRT-LLM, B200"
    if op.kind == "attention" and op.phase == "decode" and op.kv_element_bytes <= 1 and op.name != "indexer":
        if device.arch == "sm89":
            return 1.0, 1057 / 182, "8-bit cache: 1,057 us in TensorRT-LLM, L40S, 64k tokens (16 bits: 415)"
        return (
            (1.0, 0.92 / 0.58, "8-bit cache: 0.58 of the bandwidth in vLLM 0.24, H100, up to 200 MB")
            if (device.arch == "sm90" and op.kv_bytes < 200e6)
            else None
        )
    return None


def _experts(op: Op, device: Device) -> tuple[float, float, str] | None:
    """Experts of fewer than 16 bits: narrow ones, and in 4 bits on Blackwell all."""
    weight_bytes = op.weight_bytes / (op.n * op.k * op.groups)
    narrow = op.n * op.k <= _NARROW * (1 if op.name == "experts_down" else 2)
    if weight_bytes < 1 and (narrow or device.arch == "sm100"):
        return 1.0, 220 / 41, "experts in 4 bits: 220 us in vLLM 0.19, B200, 16 tokens (bf16: 117)"
    if weight_bytes < 2 and narrow:
        return 1.0, 638 / 152, "narrow experts in 8 bits: 638 us in vLLM 0.24, H100 (bf16: 220)"
    return None
