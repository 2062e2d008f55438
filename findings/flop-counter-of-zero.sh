#!/bin/sh
# torch 2.13.0: FlopCounterMode counts 0 for attention on a CPU and for a whole encoder layer in eval mode.
#
# Expected: the same layer on the same input has the same FLOPs in train() and eval(), and attention costs
# 4 x heads x tokens^2 x head size on each device.
# Seen: the counter knows an operator by name or counts it as nothing, without a word. On a CPU it does not know
# the fused attention (0; the same call with the plain kernel, or on the device "meta", is counted in full), the
# fused encoder layer that eval() under inference_mode runs, int8 products (`torch._int_mm`), nor a matrix times a
# vector. Causal attention is counted like full attention.
# For a benchmark: utilization (MFU) and arithmetic intensity from this counter are too low by whatever is fused
# or quantised, the very parts that engines speed up. Count on the device "meta", and check by a formula.
. "$(dirname "$0")/lib.sh"

needs torch==2.13.0 numpy==2.4.6

check <<'EOF'
import torch
from finding import observed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


heads, tokens, size = 8, 256, 64
true = 4 * heads * tokens**2 * size
q = torch.randn(1, heads, tokens, size)
fused = flops(lambda: attention(q, q, q))
with sdpa_kernel(SDPBackend.MATH):
    plain, causal = flops(lambda: attention(q, q, q)), flops(lambda: attention(q, q, q, is_causal=True))
meta = flops(lambda: attention(q.to("meta"), q.to("meta"), q.to("meta")))
text = f"attention, {true} by formula: CPU {fused}, CPU with the plain kernel {plain}, causal {causal}, meta {meta}"
observed(text, fused == 0 and plain == causal == meta == true)

layer, x = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(1, 512, 64)
trained = flops(lambda: layer(x))
layer.eval()
with torch.inference_mode():
    served = flops(lambda: layer(x))
observed(f"encoder layer: train() {trained}, eval() {served}", trained > 0 and served == 0)

a, b = torch.randn(64, 64), torch.ones(64, 64, dtype=torch.int8)
counts = [flops(run) for run in (lambda: a @ a, lambda: torch._int_mm(b, b), lambda: a @ a[0])]
observed("64 x 64 product: float {}, int8 {}, by a vector {}".format(*counts), counts == [2 * 64**3, 0, 0])
EOF
