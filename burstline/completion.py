"""`burstline --print-completion SHELL`: a script that completes commands, flags, their choices, and names."""

import argparse

import shtab

from burstline.roofline.device.device import bundled_devices
from burstline.roofline.model.families import bundled_models
from burstline.servers.registry import ENGINES
from burstline.verbs import VERBS
from burstline.verbs.arguments import add_arguments
from burstline.workloads.request import WorkloadError


def script_for(shell: str) -> str:
    """The script, which knows all commands; WorkloadError where there is none for this shell."""
    if shell not in shtab.SUPPORTED_SHELLS:
        shells = f"expected one of {', '.join(shtab.SUPPORTED_SHELLS)}"
        raise WorkloadError(f"--print-completion {shell!r}: {shells}; try: burstline --print-completion bash")
    known = {
        "engines": " ".join(ENGINES),
        "devices": " ".join(("cpu", *(device.id for device in bundled_devices()))),
        "models": " ".join(bundled_models()),
    }
    bash = [f"_burstline_{kind}() {{ compgen -W '{names}' -f -- \"$1\"; }}" for kind, names in known.items()]
    zsh = [f"_burstline_{kind}() {{ compadd {names}; _files; }}" for kind, names in known.items()]
    parser = argparse.ArgumentParser(prog="burstline")
    verbs = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, summary in VERBS.items():
        add_arguments(name, verbs.add_parser(name, help=summary))
    preambles = {"bash": "\n".join(bash), "zsh": "\n".join(zsh)}
    return shtab.complete(parser, shell, preamble=preambles.get(shell, ""))
