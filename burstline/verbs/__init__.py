"""The commands by name: what each does. Its module, imported on use, runs it."""

from collections.abc import Mapping
from typing import Final

VERBS: Final[Mapping[str, str]] = {
    "run": "send a workload to an engine and write the report",
    "limit": "find the highest load within the SLOs, as an interval",
    "certify": "measure the client's own error under this load",
    "compare": "compare runs, if they did the same work",
    "gate": "run two servers or versions in turn until the faster one is known",
    "make-model": "make a model folder: config, tokenizer, random weights",
    "engines": "list the engines that are installed or running, and how to install the others",
    "serve": "start an engine by itself and print its URL",
    "verify": "check that a run's numbers follow from its captures",
    "report": "regenerate a run's page, print the run, or convert it to other formats",
    "bound": "predict speed and bottleneck of a model on a device",
    "study": "predict the time and memory of a training step",
    "calibrate": "measure this machine for the roofline",
}
