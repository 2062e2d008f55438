"""The commands by name: the module that has its flags and runs it, imported on use, and what it does."""

from collections.abc import Mapping
from typing import Final

VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("burstline.verbs.run", "send a workload to an engine and write the report"),
    "limit": ("burstline.verbs.limit", "find the highest load within the SLOs, as an interval"),
    "certify": ("burstline.verbs.certify", "measure the client's own error under this load"),
    "compare": ("burstline.verbs.compare", "compare runs, if they did the same work"),
    "gate": ("burstline.verbs.gate", "run two servers or versions in turn until the faster one is known"),
    "make-model": ("burstline.verbs.make_model", "make a model folder: config, tokenizer, random weights"),
    "engines": (
        "burstline.verbs.engines",
        "list the engines that are installed or running, and how to install the others",
    ),
    "serve": ("burstline.verbs.serve", "start an engine by itself and print its URL"),
    "verify": ("burstline.verbs.verify", "check that a run's numbers follow from its captures"),
    "report": (
        "burstline.verbs.report",
        "regenerate a run's page, print the run, or convert it to other formats",
    ),
    "bound": ("burstline.verbs.bound", "predict speed and bottleneck of a model on a device"),
    "study": ("burstline.verbs.study", "predict the time and memory of a training step"),
    "calibrate": ("burstline.verbs.calibrate", "measure this machine for the roofline"),
}
