"""Every module, path, verb, flag and make target that a text names is there.

Texts: documents, compose, Dockerfiles, workflows, the Makefile, scripts, shipped suites, and the strings of
the product, which are its messages and docstrings. A flag of an engine or of another tool is no flag of
ours: it counts only in a command that starts with `burstline`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from burstline.verbs import VERBS
from tests.test_documentation import parser_of
from tests.test_house import LINKS

ROOT = Path(__file__).parents[1]
NO_MODULES = {
    "burstline.engines": "an entry point's group",
    "burstline.json": "a file",
    "burstline.gate": "a class name in JUnit's format",
}
"""What looks like a module and is none, with what it is."""
NO_PATHS = {
    "burstline/verbs/foo.py": "an example of a name",
    "servers/engines/foo.py": "an example of a name",
    "tests/golden/foo": "an example of a name",
    "tests/golden/NAME": "an example of a name",
    "scripts/check": "the beginning of two names",
}
"""What looks like a path and is none."""


@cache
def texts() -> Mapping[str, str]:
    """Each text by its place: whole files, and the strings of each module."""
    whole = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    whole += [ROOT / name for name in ("docker-compose.yml", "Dockerfile", "Dockerfile.vllm-cpu", "Makefile")]
    patterns = ("docs/**/*.md", "scripts/*", ".ci/*", ".github/workflows/*", "burstline/suites/shipped/*")
    whole += [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    found = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in whole}
    for name in ("reports/sentences.toml", "roofline/reconcile/sentences.toml", "console/flags.toml"):
        found[f"burstline/{name}"] = (ROOT / "burstline" / name).read_text("utf-8")
    for path in [*(ROOT / "burstline").rglob("*.py"), *(ROOT / "research").rglob("*.py")]:
        strings = (
            node.value
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        found[str(path.relative_to(ROOT))] = "\n".join(strings)
    return found


def unresolved(pattern: str, is_there: Callable[[re.Match[str]], bool]) -> list[str]:
    """The place and text of each match of a pattern that names what is not there."""
    matches = [
        (place, match)
        for place, text in texts().items()
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]
    assert matches, "the pattern finds nothing"
    return sorted({f"{place}: {match[0]}" for place, match in matches if not is_there(match)})


def module_exists(name: str) -> bool:
    """A module, or what one holds: `burstline.servers.engines.tgi.endless_copy`."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            if find_spec(".".join(parts[:n])) is None:
                continue
        except ModuleNotFoundError:
            continue
        value = importlib.import_module(".".join(parts[:n]))
        for part in parts[n:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_modules() -> None:
    """`burstline.x`, `python -m research`, and what code inside a text imports."""
    named = r"(?<![\w/.-])((?:burstline|research|tests)(?:\.[a-z_]\w*)+)(?!\w|/|\(\)|\.\w)"
    assert unresolved(named, lambda match: match[1] in NO_MODULES or module_exists(match[1])) == []
    imports = r"from ((?:burstline|research)[\w.]*) import ([\w, ]+)"

    def is_there(match: re.Match[str]) -> bool:
        return all(module_exists(f"{match[1]}.{name.strip()}") for name in match[2].split(","))

    assert unresolved(imports, is_there) == []


def test_paths() -> None:
    tops = "burstline|loadgen|measure|servers|workloads|reports|roofline|research|suites|scripts|tests|docs"

    def is_there(match: re.Match[str]) -> bool:
        top, _, rest = match[1].partition("/")
        bases = (top, LINKS.get(top, top))
        return match[1] in NO_PATHS or any((ROOT / base / rest).exists() for base in bases)

    assert unresolved(rf"(?<![\w/.-])((?:{tops})/[\w./-]*\w)", is_there) == []


@pytest.mark.parametrize("start", ["`", "^[ $]*"])
def test_verbs_and_their_flags(start: str) -> None:
    def is_there(match: re.Match[str]) -> bool:
        # In quotes, and after --, stand the words of another command.
        verb, own = match[1], re.sub(r"'[^']*'|\"[^\"]*\"", "", match[2]).partition(" -- ")[0]
        if verb not in VERBS:
            return False
        known = {*parser_of(verb).flags(), "--help-all"}  # type: ignore[attr-defined]
        return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", own)) <= known

    command = r"burstline ([a-z][a-z-]+)((?:[^`\n|&;\\]|\\\n)*)"
    assert unresolved(rf"{start}{command}", is_there) == []


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    target = r"(?:`|^ {4,}|^ *- run: )make ([a-z][a-z-]*)"
    assert unresolved(target, lambda match: match[1] in targets) == []


COLLECT = """
import json, pytest, sys

class Marks:
    def pytest_collection_modifyitems(self, items):
        marks = {each.nodeid: [mark.name for mark in each.iter_markers()] for each in items}
        print("MARKS" + json.dumps(marks))

words = ["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider", "tests"]
sys.exit(pytest.main(words, plugins=[Marks()]))
"""
"""Prints the marks of all tests: to collect them for each command would take a minute."""


@pytest.mark.slow
def test_tests_that_a_text_runs_are_there_and_have_its_marks() -> None:
    """`pytest -m MARK PATH -k WORD` runs at least one test."""
    argv = [sys.executable, "-c", COLLECT]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("MARKS"))
    marks: dict[str, list[str]] = json.loads(line.removeprefix("MARKS"))
    options = re.search(r'^addopts = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert options
    words = shlex.split(options[1])
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", default=words[words.index("-m") + 1])
    parser.add_argument("-k", default="")
    parser.add_argument("--ignore")
    parser.add_argument("-s", "-q", action="store_true")
    parser.add_argument("paths", nargs="+")

    def selects(match: re.Match[str]) -> bool:
        args = parser.parse_args(shlex.split(match[1]))
        return any(
            nodeid.startswith(tuple(args.paths))
            and args.k in nodeid
            and eval(args.m or "True", {}, defaultdict(bool, dict.fromkeys(names, True)))
            for nodeid, names in marks.items()
        )

    assert unresolved(r"pytest ((?:[^`\n|]|\n(?!\n))*tests/[^`\n|]*)`", selects) == []


@pytest.mark.parametrize(
    "name", ["burstline.servers.host.model_overlay.endless_copy", "research.serving_points"]
)
def test_what_was_once_named_and_gone_is_noticed(name: str) -> None:
    assert not module_exists(name)
