"""Lines of the step log as PyTorch's profiler would write them."""

import gzip
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from burstline.servers.reference.model import GEMMS
from burstline.servers.reference.weights import Weights


def write_trace(folder: Path, steps: Sequence[Mapping[str, Any]], weights: Weights) -> None:
    """Each step annotated as vLLM does; in it each GEMM and attention, all layers as one."""
    matrices = {**weights.layers[0], "lm_head": weights.lm_head}
    events: list[dict[str, Any]] = []

    def add(kind: str, name: str, start_ns: int, ns: int, *shapes: Sequence[int]) -> None:
        args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
        event = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": 0, "args": args}
        events.append(event | {"ts": start_ns / 1e3, "dur": ns / 1e3})

    for step in steps:
        at_ns = step["start_ns"]
        add("user_annotation", _annotation(step), at_ns, step["end_ns"] - at_ns)
        for name in (GEMMS[0], "attention", *GEMMS[1:]):
            if name == "attention":
                ns = step["attention_ns"]
                add("cpu_op", "burstline::attention", at_ns, ns)
            elif ns := step["gemm_ns"][name]:  # the head has none where no prompt has ended
                rows = step["n_logits"] if name == "lm_head" else sum(step["new_tok"])
                k, n = matrices[name].shape
                add("cpu_op", "burstline::matmul", at_ns, ns, (rows, k), (k, n))
            at_ns += ns
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"reference-{os.getpid()}.pt.trace.json.gz"
    path.write_bytes(gzip.compress(orjson.dumps({"traceEvents": events})))


def _annotation(step: Mapping[str, Any]) -> str:
    """Requests, new tokens and contexts of prompts and of decodes, which the scheduler puts first."""
    n, new, context = step["decode_tok"], step["new_tok"], step["context_tok"]
    prompts, decodes = (
        f"{len(new[part])}(sq{sum(new[part])}sk{sum(context[part])}sqsq0sqsk0)"
        for part in (slice(n, None), slice(n))
    )
    return f"execute_{sum(new)}_context_{prompts}_generation_{decodes}"
