"""A whole command in this process: it need not import what is imported, and `without_page` holds for it."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from burstline import cli


def burstline(*words: object, cache: Path | None = None) -> tuple[int, str]:
    """The exit code of `burstline WORDS`, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        if cache is not None:
            patch.setenv("XDG_CACHE_HOME", str(cache))
        code = cli.main(list(map(str, words)))
    return code, out.getvalue() + err.getvalue()


def ran(out: Path, *words: object) -> tuple[int, str]:
    """`burstline run` into this folder, with a cache of its own."""
    return burstline("run", "--out", out, *words, cache=out.with_name("cache"))
