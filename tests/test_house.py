"""What keeps the house in order: no circles of imports, and fewer imports hidden in functions each time.

Imports in functions and under TYPE_CHECKING count: a reader follows them too.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "burstline",
    "burstline/loadgen",
    "burstline/measure",
    "burstline/servers",
    "burstline/workloads",
    "burstline/reports",
    "burstline/roofline",
    "research",
)
MOST_IN_FUNCTIONS = 36
"""Each for a heavy library that is optional or rarely needed, or for the time of a start."""
MOST_LINES, MOST_CLASSES = 49_800, 440
"""Of the product, all of `burstline/`; public classes are those of a module (decision 0021)."""
STILL_BACKWARDS: Set[tuple[str, str]] = set()
"""Folders that import from one that imports from them, the wrong way round: to be cut, never to grow."""

LINKS = {
    **{
        name: f"burstline/{name}"
        for name in ("loadgen", "measure", "reports", "roofline", "servers", "workloads")
    },
    "suites": "burstline/suites/shipped",
}
"""The names at the top level that people open, and where they lead (docs/decisions/0017)."""

UNTIED = frozenset({"burstline.reports", "burstline.servers"})
"""Packages whose own modules count as one folder: a knot cannot hide in them."""


@cache
def trees() -> Mapping[str, ast.Module]:
    """Each module's code, by its name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text("utf-8")
        )
        for package in ("burstline", "research")
        for path in (ROOT / package).rglob("*.py")
    }


@cache
def modules() -> Mapping[str, Set[str]]:
    """The modules of ours that each imports, anywhere in it."""
    imports = {
        name: [node for node in statements(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, tree in trees().items()
    }
    return {
        name: {each for node in nodes for each in named(node, imports)} - {name}
        for name, nodes in imports.items()
    }


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node; expressions, which are most of a tree, are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from statements(child)


def named(node: ast.Import | ast.ImportFrom, known: Container[str]) -> list[str]:
    """The known modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [each for each in inner if each in known] or [node.module or ""] * ((node.module or "") in known)


def in_circles(edges: Mapping[str, Set[str]]) -> list[str]:
    """One circle, as a path that comes back to where it began; empty where there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_what_imports_it() -> None:
    assert in_circles(modules()) == []


def folder(name: str) -> str:
    """`loadgen.wire` of `loadgen.wire.pool`; a module right in a package stands for itself, unless UNTIED."""
    package = next(each for each in reversed(PACKAGES) if name.startswith(each.replace("/", ".")))
    inner = name.split(".")[package.count("/") + 1 :]
    package = package.replace("/", ".")
    return package if package in UNTIED and len(inner) < 2 else ".".join((package, *inner[:1]))


def test_no_folder_imports_from_one_that_imports_from_it() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for name, others in modules().items():
        for other in others:
            pair = folder(name), folder(other)
            if pair[0] != pair[1] and pair not in STILL_BACKWARDS:
                edges[pair[0]].add(pair[1])
    assert in_circles(edges) == []


def test_imports_hidden_in_functions_only_become_fewer() -> None:
    hidden = [
        inner
        for tree in trees().values()
        for node in statements(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in statements(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert len(hidden) <= MOST_IN_FUNCTIONS


def files() -> list[Path]:
    """What git knows of, and what it would take."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines() if os.path.lexists(ROOT / line)]


def test_the_product_does_not_grow() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "burstline").rglob("*.py")]
    assert sum(source.count("\n") for source in sources) <= MOST_LINES
    assert sum(len(re.findall(r"^class [A-Z]", source, re.MULTILINE)) for source in sources) <= MOST_CLASSES


def test_links_lead_into_the_package_and_nothing_else_is_one() -> None:
    links = [path for path in files() if path.is_symlink()]
    assert {str(path.relative_to(ROOT)): str(path.readlink()) for path in links} == LINKS


@pytest.mark.slow
def test_a_copy_without_links_works(tmp_path: Path) -> None:
    """A zip file, Windows or an artefact store makes one; `scripts/check-wheel.sh` builds a wheel of one."""
    for path in files():
        if not path.is_symlink():
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    tests = ("tests/test_documentation.py", "tests/test_containers.py", "tests/burstline/test_suite.py")
    more = ("tests/roofline/test_model.py", "tests/workloads", "tests/measure/test_method.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *more],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
