"""`python -m research.training`: training steps and memory against measurements; the papers' studies."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from burstline.reports.formats.text import columns
from burstline.roofline.device.calibration import load_calibration, shared, with_host
from burstline.roofline.device.device import Device, load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Attention, Dense, Layer, ModelShape, Parallel
from burstline.roofline.predict.capacity import room
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.roofline.predict.simulate import Asked, Limits, simulate
from burstline.roofline.training.recipe import KERNELS, Recipe, Sharding, State, zero
from burstline.roofline.training.step import TrainingStep, training_memory, training_step
from burstline.verbs import study
from burstline.verbs.arguments import add_arguments
from research import published
from research.__main__ import DATA

Rows = list[tuple[str, Recipe, float]]
"""Measured steps: a name, the recipe, seconds."""

SELENE = (25e9, 10e-6)  # a 200 Gb/s card for each device; NCCL's latency of a hop between nodes
MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
    "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip
H100 = load_device("h100-sxm5-80g").with_network(50e9, 10e-6)


def gpt(layers: int, d: int, heads: int, vocab: int, n_positions: int, *, bias: bool = True) -> ModelShape:
    """A GPT: learned positions, tied embedding, four times as many columns in the feed-forward block."""
    attention = Attention(heads, heads, d // heads, rope=False, qkv_bias=bias, out_bias=bias)
    layer = Layer(attention, Dense(4 * d, gated=False, bias=bias), layers)
    return ModelShape(
        "GPT", "gpt", d, vocab, (layer,), tied=True, norm="layer" if bias else "rms", n_positions=n_positions
    )


def read(folder: Path, name: str) -> list[Any]:
    path = folder / "papers" / f"{name}.csv"
    return list(pd.read_csv(path, comment="#").itertuples()) if path.is_file() else []


def megatron(folder: Path) -> Iterator[tuple[str, Recipe, float]]:
    """The eight cells on which arXiv 2407.14645 validates its training model."""
    for row in read(folder, "megatron_step_times"):
        if row.dp == 1:
            recipe = Recipe(
                gpt(row.layers, row.hidden, row.heads, row.vocab, row.seq), a100(), int(row.batch), row.seq,
                int(row.micro_batch), zero(0, 1), row.tp, row.pp, int(row.virtual_stages),
                row.sequence_parallel == "yes", row.recompute, KERNELS["megatron"], overlap=0.0,
            )  # fmt: skip
            yield f"{row.model} {row.recompute}", recipe, row.measured_s


def weak_scaling(folder: Path) -> Iterator[tuple[str, Recipe, float]]:
    """arXiv 2104.04473, table 1. It states no micro-batch: the fastest that fits."""
    for row in read(folder, "megatron_a100_weak_scaling"):
        model = gpt(row.layers, row.hidden, row.heads, 51200, 2048)
        sizes = (
            Recipe(
                model, a100(), int(row.batch), 2048, size, zero(0, row.dp), row.tp, row.pp,
                recompute="full", kernels=KERNELS["megatron"], overlap=0.0,
            ) for size in (1, 2, 4, 8) if row.batch % (size * row.dp) == 0
        )  # fmt: skip
        fastest = min((each for each in sizes if training_memory(each).fits(each.device)), key=seconds)
        yield f"{row.model} on {row.gpus}", fastest, row.derived_step_s


def zero3(folder: Path) -> Iterator[tuple[str, Recipe, float]]:
    """arXiv 2104.04473, table 2: DeepSpeed's ZeRO-3 (flat rings) and 3D parallelism."""
    for row in read(folder, "zero3_against_3d_parallel"):
        n_ranks, is_zero = row.gpus // (row.tp * row.pp), row.scheme == "ZeRO-3"
        recipe = Recipe(
            gpt(row.layers, row.hidden, row.heads, row.vocab, row.seq), a100(), int(row.batch), row.seq,
            int(row.micro_batch),
            zero(3, n_ranks, flat=True, regathers=True) if is_zero else zero(0, n_ranks),
            row.tp, row.pp, recompute="full", kernels=KERNELS["megatron"], overlap=0.5 if is_zero else 0.0,
        )  # fmt: skip
        yield f"{row.scheme} {row.params_1e9:.0f}B on {row.gpus}", recipe, row.derived_step_s


def foundry(folder: Path, kernels: str, section: str = "A100") -> Iterator[tuple[str, Recipe, float]]:
    """llm-foundry's FSDP runs on A100, or of another section."""
    for row in read(folder, "llm_foundry_zero3_training"):
        if section not in row.section:
            continue
        layers, d, heads = MPT[row.model]
        device = H100 if row.gpu == "h100_80gb" else a100(f"a100-sxm4-{row.gpu[5:8]}")
        n_seq = int(row.micro_batch * row.grad_accum * row.gpus)
        recipe = Recipe(
            gpt(layers, d, heads, 50368, row.seq, bias=False), device, n_seq, int(row.seq),
            int(row.micro_batch), zero(3 if row.sharding == "FULL_SHARD" else 2, int(row.gpus)),
            recompute="full" if row.recompute else "none", kernels=KERNELS[kernels],
            products="fp8" if "FP8" in section else "",
        )  # fmt: skip
        measured_s = n_seq * row.seq / row.tok_per_s_gpu / row.gpus
        yield f"{row.model} {row.seq} on {row.gpus} {row.gpu}", recipe, measured_s


def halves(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows constants were set on, and which they are judged on: a random half each, always the same."""
    order = np.random.default_rng(0).permutation(n)
    return order[: n // 2], order[n // 2 :]


def a100(name: str = "a100-sxm4-80g") -> Device:
    return load_device(name).with_network(*SELENE)


def seconds(recipe: Recipe) -> float:
    return training_step(recipe, load_calibration(recipe.device)).seconds


def nanotron(stage: int, n_ranks: int) -> Sharding:
    """nanotron's states in bytes a parameter, read off the rows: gradients are summed in fp32.

    Without ZeRO 2 + 4 + 12, and DDP's buckets of 2 where there are several ranks; with stage 1, 10 stay and
    14 are divided.
    """
    if stage == 0:
        return Sharding("nanotron", n_ranks, State(2), State(6 if n_ranks > 1 else 4), State(12))
    return Sharding("nanotron ZeRO-1", n_ranks, State(2), State(8), State(14, n_ranks))


def huggingface(folder: Path) -> tuple[dict[str, Rows], list[float], list[bool]]:
    """Hugging Face's H100 runs; how far off their allocated memory is; is fits or not said right?"""
    shapes: dict[float, ModelShape] = {}
    allocated, right, mended, before = list[float](), list[bool](), Rows(), Rows()
    for name, did_fit in (("hf_ultrascale_h100", True), ("hf_ultrascale_h100_oom", False)):
        for row in read(folder, name):
            if did_fit and row.num_params not in shapes and row.interm_dim == row.interm_dim:
                head = int(row.hidden_size // row.num_heads)
                attention = Attention(int(row.num_heads), int(row.num_kv_heads), head)
                layers = (Layer(attention, Dense(int(row.interm_dim)), int(row.num_layers)),)
                shapes[row.num_params] = ModelShape(
                    "Llama", "llama", int(row.hidden_size), 131072, layers, tied=row.num_params < 2
                )
            if row.num_params not in shapes:
                continue
            model = shapes[row.num_params]
            sharding, n_micro = nanotron(int(row.zero_stage), int(row.dp)), int(row.batch_accum)
            recipe = Recipe(
                model, H100, int(row.mbs * row.dp * n_micro), 4096, int(row.mbs), sharding,
                int(row.tp), min(int(row.pp), model.n_layers), sequence_parallel=True,
            )  # fmt: skip
            memory = training_memory(recipe)
            right.append(memory.fits(H100) == did_fit)
            if did_fit:
                allocated.append(memory.states / 2**30 / row.Mem_Alloc_GB - 1)
                tok = 4096 * recipe.n_seq / recipe.n_devices
                rows = mended if row.after_pp_fix or row.pp == 1 else before
                rows.append((name, recipe, tok / row.tok_per_s_per_gpu))
    judged = [mended[k] for k in halves(len(mended))[1]]
    return {"nanotron, judging half": judged, "nanotron, before its pipeline fix": before}, allocated, right


def errors(rows: Rows, overlap: float | None = None) -> np.ndarray:
    tried = [r if overlap is None else replace(r, overlap=overlap) for _, r, _ in rows]
    return np.array([seconds(r) / measured_s - 1 for r, (_, _, measured_s) in zip(tried, rows, strict=True)])


def inside(rows: Rows) -> float:
    """The share of rows in the range that `study training` prints where no --recipe is given."""
    found = []
    for _, recipe, measured_s in rows:
        tiers, flat = (replace(recipe.sharding, flat=x, regathers=x) for x in (False, True))
        fast = replace(recipe, kernels=KERNELS["fused"], sharding=tiers, overlap=1.0, host_layer_s=0.0)
        slow = replace(recipe, kernels=KERNELS["eager"], sharding=flat, overlap=0.0,
                       host_layer_s=(study.HOST_MS + study.RANK_MS * (recipe.tp - 1)) / 1e3)  # fmt: skip
        found.append(seconds(fast) <= measured_s <= study.WIDER * seconds(slow))
    return float(np.mean(found))


def logic_study(_: Path) -> str:
    """S1: compute doubled node by node, memory and links as they are: a sensitivity, not nodes' own data."""
    device = load_device("a100-sxm4-80g")
    rows = [["compute", "HBM", "s a step", "faster by", "share that is not products"]]
    for memory in (1, 2, 4):
        first = 0.0
        for times in (1, 2, 4, 8, 16, 32):
            level = replace(device.memory, bytes_per_s=device.bytes_per_s * memory)
            peaks = {k: v * times for k, v in device.peaks.items()}
            faster = replace(device, peaks=peaks, levels=(*device.levels[:-1], level))
            recipe = Recipe(load_model("llama-2-13b")[0], faster, 16, 4096, 4, zero(3, 4), tp=2)
            step = training_step(recipe, shared())
            products = sum(w.seconds for w in step.work if w.op.kind == "matmul") * recipe.n_micro
            first, rest = first or step.seconds, 1 - products / step.seconds
            cells = [f"x{times}", f"x{memory}", f"{step.seconds:.3f}", f"{first / step.seconds:.2f}x"]
            rows.append([*cells, f"{rest:.0%}"])
    return columns(rows)


def step_of(words: str) -> TrainingStep:
    """What `burstline study training` computes for these flags."""
    parser = argparse.ArgumentParser()
    add_arguments("study", parser)
    args = parser.parse_args(["training", *words.replace("tests/data", str(DATA)).split()])
    recipe = study.recipe_of(args.model, args.device, study.given_of(args))
    return training_step(recipe, load_calibration(recipe.device))


@cache
def figure(of: str, words: str) -> float:
    """A field of the step, or seconds of a pass or some ops; "burst": S3's; "cells", "set": mean errors."""
    if of == "burst":
        return burst_s(*words.split())
    if of == "set":
        return float(np.abs(errors(sets(DATA)[words])).mean())
    if of == "cells":
        off = (c.predicted_s / c.measured_s - 1 for c in published.cells() if c.device == words)
        return float(np.mean([*map(abs, off)]))
    step, (first, *names) = step_of(words), of.split()
    if first not in ("forward", "backward", "recompute"):
        return float(getattr(step, first))
    of_pass = (each for each in step.work if each.during == first)
    return sum(each.seconds for each in of_pass if not names or each.op.name.split(".")[0] in names)


def burst_s(size: str, name: str, off: str = "") -> float:
    """1,000 requests of 512 tokens in and, which the paper does not say, 512 out; TP 8."""
    device = study.without_p2p(load_device(name)) if off else load_device(name)
    deployment = Deployment(load_model(f"llama-2-{size}")[0], QUANTS["fp16"], Parallel(tp=8), device)
    kv_tok = room(deployment).kv_tok
    clock = Clock(deployment, with_host(load_calibration(device)))
    return simulate([Asked(0.0, 512, 512)] * 1000, Limits(256, 8192, kv_tok), clock).makespan_s


def papers(folder: Path) -> Iterator[tuple[Any, float, float]]:
    """Each row of paper_rows.csv, our figure, and how far it is off (NaN where nothing can be said)."""
    for row in read(folder, "paper_rows"):
        flags, over = (words if isinstance(words, str) else "" for words in (row.flags, row.over))
        ours = figure(row.of, flags) / (figure(row.of, over) if over else 1) if flags else np.nan
        yield row, ours, ours / row.paper - 1


def papers_study(folder: Path) -> str:
    """S1, S2, S3: each fact that could be read; of tables II to IX every other cell is unread."""
    rows, notes = [["where", "what", "paper", "ours", "off", "note", "set by", "read in"]], list[str]()
    for row, ours, off in papers(folder):
        cells = ["" if x != x else f"{x:.4g}" for x in (row.paper, ours)]
        note = "" if abs(off) <= 0.1 else row.sentence
        notes += [note] if note and note not in notes else []
        cells += ["" if off != off else f"{off:+.1%}", str(notes.index(note) + 1) if note else ""]
        rows.append([row.where, row.what, *cells, row.set_by, str(row.assurance).replace("nan", "")])
    return "\n".join([columns(rows, (0, 1, 6, 7)), *(f"{n}. {note}" for n, note in enumerate(notes, 1))])


PHASES = {"forward": "forward", "attention": "forward attention qkv rope o", "backward": "backward"}
PHASES |= {"attention backward": "backward attention qkv rope o", "again": "recompute", "Adam": "optimizer_s"}


def methods_study(folder: Path) -> str:
    """S3: its methods, 8 devices, 350 tokens, --recipe eager; ms of a micro-batch's passes; cells unread."""
    rows = [["table", "model", "device", "method", *PHASES, "tok/s", "GB", "largest", "tok/s", "paper"]]
    for model, device, row in product(
        ("7b", "13b", "70b"), ("a800", "rtx4090 --no-p2p", "rtx3090"), read(folder, "paper_methods")
    ):
        if row.only not in ("all", f"{model} {device}"):
            continue
        flags = f"--model llama-2-{model} --device {device} --seq 350 --recipe eager {row.flags}"
        step = step_of(flags := flags.removesuffix("nan"))
        most = study.largest_micro_batch(step.recipe)
        filled = f"{step_of(f'{flags} --micro-batch {most}').tok_per_s:,.0f}" if most else "does not fit"
        cells = [*(f"{1e3 * figure(of, flags):.3g}" for of in PHASES.values()), f"{step.tok_per_s:,.0f}"]
        cells += [f"{step.memory.total / 1e9:.1f}", str(most), filled]
        rows.append([row.tables, model, device, row.method, *cells, "unread"])
    return columns(rows, range(4))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.training", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with papers/ (default: the clone's)")
    parser.add_argument("--studies", action="store_true", help="print the papers' studies, too")
    args = parser.parse_args(argv)
    timed, allocated, right = huggingface(args.data)
    table = [["set", "rows", "mean", "median", "largest", "bias", "in range", "overlap 0", "0.5", "1"]]
    for name, rows in (sets(args.data) | timed).items():
        if rows:
            off = errors(rows)
            figures = (np.abs(off).mean(), np.median(np.abs(off)), np.abs(off).max())
            cells = [*(f"{x:.1%}" for x in figures), f"{off.mean():+.1%}", f"{inside(rows):.0%}"]
            cells += [f"{np.abs(errors(rows, share)).mean():.1%}" for share in (0.0, 0.5, 1.0)]
            table.append([name, str(len(rows)), *cells])
    print(columns(table))
    fit = [training_memory(recipe).fits(recipe.device) for _, recipe, _ in foundry(args.data, "llm-foundry")]
    print(f"Said to fit: {sum(fit)} of llm-foundry's {len(fit)} runs.")
    if allocated:
        print(
            f"Hugging Face's H100 runs: allocated memory off by {np.median(np.abs(allocated)):.1%} in the"
            f" median of {len(allocated)}; fits or not right in {np.mean(right):.1%} of {len(right)}"
        )
    if args.studies:
        for each in (papers_study, methods_study, logic_study):
            print(f"\n{each.__doc__}\n{each(args.data)}")
    return 0


def sets(folder: Path) -> dict[str, Rows]:
    """Each measured set; of llm-foundry's runs the half that set nothing."""
    found = {"Megatron, eight cells": [*megatron(folder)], "Megatron, weak scaling": [*weak_scaling(folder)]}
    for name, recipe, measured_s in zero3(folder):
        scheme, size, *_ = name.split()
        set_on = "set on 175B" if size == "175B" else "judged on 530B"
        where = f"ZeRO-3, overlap {set_on}" if scheme == "ZeRO-3" else "3D parallelism, 384 to 2,240"
        found.setdefault(where, []).append((name, recipe, measured_s))
    for name, kernels, section in (
        ("llm-foundry, judging half", "llm-foundry", "A100"), ("the same, nothing set", "fused", "A100"),
        ("llm-foundry on H100, judging half", "llm-foundry-h100", "H100 80GB BF16"),
    ):  # fmt: skip
        rows = [*foundry(folder, kernels, section)]
        found[name] = [rows[k] for k in halves(len(rows))[1]]
    found["llm-foundry on H100, fp8"] = [*foundry(folder, "llm-foundry-h100", "H100 80GB FP8")]
    for row in read(folder, "measured_steps"):
        found.setdefault(row.set, []).append((row.flags, step_of(row.flags).recipe, row.measured_s))
    return found


if __name__ == "__main__":
    sys.exit(main())
