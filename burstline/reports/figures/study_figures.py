"""The figure of `burstline study training`."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from burstline.reports.figures.drawing import plain
from burstline.roofline.training.step import TrainingStep

# Okabe and Ito's colours, which readers with colour-blindness can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#999999")


@plain()
def write_training(path: Path, methods: Mapping[str, TrainingStep]) -> None:
    """Each method's seconds by part and its memory by kind, beside what the device has."""
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    panels = list(figure.subplots(1, 2))
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
        panel.spines[["top", "right"]].set_visible(False)
        panel.invert_yaxis()
        panel.set_xlabel(title)
        panel.legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    capacity = steps[0].recipe.device.memory.capacity_bytes
    panels[1].axvline(capacity / 1e9, color="black", linewidth=0.8, linestyle="--")
    panels[1].set_yticklabels([])
    path.parent.mkdir(parents=True, exist_ok=True)
    # An SVG has the same bytes each time.
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
