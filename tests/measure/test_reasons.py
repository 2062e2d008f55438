"""Each reason stands once in `reasons.toml`, and who gives it fills in all that its words name."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import burstline.measure

MEASURE = Path(burstline.measure.__file__).parent
SOURCES = [path.read_text("utf-8") for path in MEASURE.rglob("*.py")]
TREES = [ast.parse(source) for source in SOURCES]
WORDS = tomllib.loads((MEASURE / "record/reasons.toml").read_text("utf-8"))
SHARED = WORDS.pop("shared")
BY_ROWS = ("code", "number.reason")
"""What names a reason that stands in a table of several."""


def values(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """What is assigned to a name below a node."""
    for each in ast.walk(node):
        match each:
            case ast.Assign(targets=[ast.Name(id=own)], value=value) if own == name:
                yield value
            case ast.AnnAssign(target=ast.Name(id=own), value=ast.expr() as value) if own == name:
                yield value


def names(node: ast.expr, within: ast.AST) -> set[str]:
    """The names that an argument may be."""
    match node:
        case ast.Constant(value=str() as name):
            return {name}
        case ast.IfExp(body=body, orelse=other):
            return names(body, within) | names(other, within)
        case ast.Name(id=name):
            places = [within] if name.islower() else TREES
            return {each for place in places for value in values(place, name) for each in names(value, place)}
    return set()


def filled_in(call: ast.Call, within: ast.AST) -> set[str]:
    keys = {keyword.arg for keyword in call.keywords if keyword.arg}
    for keyword in call.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Name):
            for value in values(within, keyword.value.id):
                assert isinstance(value, ast.Dict)
                keys |= {key.value for key in value.keys if isinstance(key, ast.Constant)}
    return keys


def given() -> Iterator[tuple[str, ast.Call, ast.AST]]:
    for tree in TREES:
        for function in ast.walk(tree):
            for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "Reason.of":
                    for name in (found := names(call.args[0], function)):
                        yield name, call, function
                    assert found or ast.unparse(call.args[0]) in BY_ROWS, ast.unparse(call)


def named_in(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def test_each_reason_is_given_somewhere() -> None:
    words = {word for source in SOURCES for word in re.findall(r"\"([a-z0-9.-]+)\"", source)}
    assert WORDS.keys() - words == set()


def test_who_gives_a_reason_fills_in_all_that_its_words_name() -> None:
    calls = list(given())
    assert len(calls) > 40
    for name, call, function in calls:
        needed = set().union(*map(named_in, WORDS[name].values())) - SHARED.keys()
        assert needed <= filled_in(call, function), name


def test_what_reasons_share_is_used_by_several() -> None:
    texts = [text for words in WORDS.values() for text in words.values()]
    for name in SHARED:
        assert sum(name in named_in(text) for text in texts) > 1, name
