"""Every way in which options of a run are refused before anything starts: `tests/burstline/refusals.txt`.

Each command stands in the table above the one line that it prints; all end with exit code 2. After a change
of words: `python -m tests.burstline.test_refusals` writes the lines again; review the diff.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest

from burstline.cli import main

TABLE = Path(__file__).parent / "refusals.txt"
FILES = {
    "times.txt": "0\n1e11\n",
    "words.txt": "0\nsoon\n",
    "equal.txt": "1\n1\n1\n",
    "rows.jsonl": '{"prompt": "a"}\n{"prompt": "b"}\n',
    "timed.jsonl": '{"prompt": "a", "timestamp": 1}\n{"prompt": "b"}\n',
    "empty.jsonl": "",
    "named.jsonl": '{"words": "a"}\n',
    "odd.jsonl": '{"prompt": 3}\n',
    "blank.jsonl": '{"prompt": " "}\n',
    "cut.jsonl": '{"prompt": "a"\n',
    "lengths.csv": "prompt_tokens\n512\n0\n",
    "two.csv": "a,b\n1,2\n",
    "trace.csv": "Timestamp,Request tokens,Response tokens\n0,8,8\n5,8,8\n",
    "back.csv": "Timestamp,Request tokens,Response tokens\n5,8,8\n0,8,8\n",
    "none.csv": "Timestamp,Request tokens,Response tokens\n0,0,8\n",
    "head.csv": "Timestamp,Request tokens,Response tokens\n",
    "other.csv": "a,b\n1,2\n",
    "folder/readme": "",
    "tok/config.json": "{}",
}
"""What the commands of the table name, each by itself in an empty folder."""


@contextlib.contextmanager
def among_files() -> Iterator[None]:
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        for name, text in FILES.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def refused(words: str) -> tuple[object, str]:
    """The exit code and what was printed; of argparse the line without the hint to --help."""
    errors, started = io.StringIO(), AssertionError("a run was begun")
    with (
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch("burstline.bench.run.RunDir.create", side_effect=started),
    ):
        try:
            code: object = main(["run", *shlex.split(words)])
        except SystemExit as ended:
            code = ended.code
    lines = [line for line in errors.getvalue().splitlines() if not line.startswith("See `")]
    listed = re.compile(r"(?:[\w.+-]+, ){4,}[\w.+-]+")  # engines: more come, the sentence stays
    chosen = re.compile(r"\(choose from [^)]*\)")  # argparse put the choices in quotes up to Python 3.12
    line = chosen.sub(lambda found: found[0].replace("'", ""), " / ".join(lines))
    return code, listed.sub("...", line)


def commands() -> list[str]:
    return [line[2:] for line in TABLE.read_text("utf-8").splitlines() if line.startswith("$ ")]


def table() -> str:
    rows = []
    with among_files():
        for words in commands():
            code, line = refused(words)
            assert code == 2, (words, code, line)
            rows.append(f"$ {words}\n{line}\n")
    return "\n".join(rows)


@pytest.mark.usefixtures("fresh")
def test_every_refusal_of_options_is_as_it_was_reviewed() -> None:
    assert table() == TABLE.read_text("utf-8")


if __name__ == "__main__":
    TABLE.write_text(table(), "utf-8")
