"""The packages of a Python environment, as reported by its own interpreter."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
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


class PackagedEngine(Engine):
    """An engine that is a package of some Python environment.

    `variable` names the environment variable for its interpreter, `distributions` the package, called as its
    module, and what else of it may be installed.
    """

    variable: str
    distributions: tuple[str, ...]

    def find(self, python: str | None) -> Installation | None:
        python = python_of(python, self.variable)
        return find_installation(python, self.distributions[0], *self.distributions)

    def installed(self, python: str | None) -> str | None:
        found = self.find(python)
        return next(iter(found.versions.values()), "") if found else None

    def installation(self, options: LaunchOptions) -> Installation | None:
        """Where it is installed; None in a container, which brings its own.

        Raises EngineError, with how to get it, where it is not installed.
        """
        if options.image:
            return None
        if (found := self.find(options.python)) is None:
            python = python_of(options.python, self.variable)
            raise EngineError(f"{self.title} is not installed for {python}. {self.how_to_get}")
        return found


class ProgramEngine(Engine):
    """An engine that is a program on the PATH, or the one that the environment's `variable` names."""

    variable: str
    program: str

    def find(self) -> str | None:
        """The program's path; EngineError where the user names one that cannot be run."""
        named = os.environ.get(self.variable)
        found = shutil.which(named or self.program)
        if named and found is None:
            raise EngineError(
                f"{self.variable}={named} is not an executable program; expected {self.program}"
            )
        return found

    def installed(self, python: str | None) -> str | None:  # noqa: ARG002
        return None if self.find() is None else ""

    def installation(self, options: LaunchOptions) -> str | None:
        """As of a package."""
        found = None if options.image else self.find()
        if found is None and not options.image:
            raise EngineError(f"{self.title} is not installed: no {self.program} is found. {self.how_to_get}")
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
