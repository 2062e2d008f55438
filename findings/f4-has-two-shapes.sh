#!/bin/sh
# safetensors 0.8.0 and torch 2.13.0: a tensor of 4-bit floats has twice the elements in the file that it has in
# memory, and numpy cannot read the file.
#
# Expected: one shape, as for all other types, and parameter counts that agree.
# Seen: torch packs two values of `float4_e2m1fn_x2` into one element of a byte. safetensors writes type F4 with
# the last dimension doubled, and `get_slice(...).get_shape()` says so: [4, 16]. The tensor loaded from it is
# [4, 8] and `numel()` half. safetensors' numpy loader raises AttributeError for the same file.
# For a benchmark: parameters by `numel()` are half of those in the header, and bytes per parameter twice as many:
# a roofline from the one is a factor of two off the other. Take bytes from `data_offsets`, parameters from the
# shapes in the header.
. "$(dirname "$0")/lib.sh"

needs torch==2.13.0 safetensors==0.8.0 numpy==2.4.6

check <<'EOF'
import json
from pathlib import Path

import torch
from finding import observed
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file

save_file({"w": torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, "model.safetensors")
raw = Path("model.safetensors").read_bytes()
header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["w"]
with safe_open("model.safetensors", "pt") as file:
    part, whole = file.get_slice("w").get_shape(), file.get_tensor("w")
n_bytes = header["data_offsets"][1] - header["data_offsets"][0]
text = f"header {header['dtype']} {header['shape']}, get_slice {part}, tensor {list(whole.shape)}, numel {whole.numel()}"
same = header["shape"] == part == [4, 16] and list(whole.shape) == [4, 8] and n_bytes == whole.numel() == 32
observed(f"{text}, {n_bytes} bytes", same)
try:
    load_file("model.safetensors")
    error = "none"
except Exception as raised:
    error = type(raised).__name__
observed(f"numpy loader: {error}", error == "AttributeError")
EOF
