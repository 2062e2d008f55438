"""The figures of `burstline bound` and of `burstline study`."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from burstline.reports.figures.drawing import plain
from burstline.roofline.training.step import TrainingStep

# Okabe and Ito's colours, which readers with colour-blindness can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#999999")


@plain()
def write_training(path: Path, methods: Mapping[str, TrainingStep]) -> None:
    """Each method's seconds by part and its memory by kind, beside what the device has."""
    figure, panels = _two_panels()
    names = list(methods)
    steps = list(methods.values())
    parts = {name: [step.parts_s[name] for step in steps] for name in steps[0].parts_s}
    kinds = {
        kind: [getattr(step.memory, kind) / 1e9 for step in steps]
        for kind in ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    }
    for panel, bars, title in zip(panels, (parts, kinds), ("seconds a step", "GB a device"), strict=True):
        left = np.zeros(len(names))
        for (label, widths), colour in zip(bars.items(), _COLOURS, strict=False):
            if any(widths):
                panel.barh(names, widths, left=left, color=colour, label=label)
                left += np.array(widths)
        panel.invert_yaxis()
        panel.set_xlabel(title)
        panel.legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    capacity = steps[0].recipe.device.memory.capacity_bytes
    panels[1].axvline(capacity / 1e9, color="black", linewidth=0.8, linestyle="--")
    panels[1].set_yticklabels([])
    _write(figure, path)


def _two_panels() -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    panels = list(figure.subplots(1, 2))
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _write(figure: Figure, path: Path) -> None:
    """An SVG has the same bytes each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


@plain()
def write_bound(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """The roofline of each device with the products of both phases, and its decode step by batch."""
    figure, (roof, curve) = _two_panels()
    for one, colour in zip(found, itertools.cycle(_COLOURS)):
        device, dtype = one["device"], one["quant"]["activations"]
        peak, per_s = device["peak_flops_per_s"][dtype], device["bytes_per_s"]
        x = np.geomspace(0.5, 8 * peak / per_s, 200)
        roof.plot(x, np.minimum(peak, x * per_s) / 1e12, color=colour, label=device["name"])
        for phase, mark in (("prefill", "o"), ("decode", "s")):
            ops = [op for op in one["phases"].get(phase, {"ops": ()})["ops"] if op["flops"] and op["ridge"]]
            rates = [op["flops"] / op["predicted_us"] / 1e6 for op in ops]
            roof.plot([op["intensity"] for op in ops], rates, mark, color=colour, fillstyle="none")
        batch, seconds = zip(*one["decode_s_by_batch"]["predicted"], strict=True)
        curve.plot(batch, 1e3 * np.array(seconds), "o-", color=colour, label=device["name"], markersize=4)
        ridge = one["answer"]["ridge_tok"]
        if ridge and ridge <= max(batch):
            curve.axvline(ridge, color=colour, linewidth=0.8, linestyle="--")
    for panel, (across, up) in zip(
        (roof, curve), (("FLOP per byte of memory", "TFLOP/s"), ("batch", "ms a decode step")), strict=True
    ):
        panel.set_xscale("log", base=10 if panel is roof else 2)
        panel.set_yscale("log")
        panel.set_xlabel(across)
        panel.set_ylabel(up)
        panel.legend(frameon=False, fontsize=8)
    roof.set_title("Circles: prefill, squares: decode, as predicted", loc="left", fontsize=9)
    curve.set_title("Dashed: products with weights turn compute-bound", loc="left", fontsize=9)
    _write(figure, path)
