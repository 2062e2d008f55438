"""What a Python environment, ours or another, has installed; asked of its own interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from burstline.servers.engine import Engine
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError

_ASK = """
import importlib.metadata, importlib.util, json, sys, sysconfig
module, names, versions = sys.argv[1], sys.argv[2:], {}
for name in names:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
found = importlib.util.find_spec(module) is not None
print(json.dumps([found, versions, sysconfig.get_path("scripts")]))
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """A package in an environment: `versions` of its distributions by name, `scripts` where commands lie."""

    python: str
    versions: Mapping[str, str]
    scripts: Path


def python_of(named: str | None, variable: str) -> str:
    """The interpreter that the user named, or that the environment's `variable` names, else ours."""
    return named or os.environ.get(variable) or sys.executable


def installation_for(
    options: LaunchOptions,
    engine: Engine,
    variable: str,
    find: Callable[[str | None], Installation | None],
) -> Installation | None:
    """Where an engine that is to be started is installed; None in a container, which brings its own.

    Raises EngineError, with how to get it, where it is not installed.
    """
    if options.image:
        return None
    found = find(options.python)
    if found is None:
        python = python_of(options.python, variable)
        raise EngineError(f"{engine.title} is not installed for {python}. {engine.how_to_get}")
    return found


def find_installation(python: str, module: str, *distributions: str) -> Installation | None:
    """The environment of the interpreter `python` if it could import `module`, which is not imported.

    Raises EngineError where `python` is no working interpreter.
    """
    # -I: our own PYTHONPATH and folder are no part of another environment.
    argv = [python, "-I", "-c", _ASK, module, *distributions]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise EngineError(f"{python} does not run as a Python interpreter: {words}") from error
    found, versions, scripts = json.loads(answer.stdout)
    return Installation(python, versions, Path(scripts)) if found else None
