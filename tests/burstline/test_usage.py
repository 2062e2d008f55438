"""A slip in a command is told before anything heavy is imported: it should feel instant."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("pyarrow", "scipy", "matplotlib", "pandas", "huggingface_hub.file_download")
SLIPS = (
    "run --requests 0",
    "run --prompt-tokens abc",
    "run --arrival poisson",
    "run --concurrency 4 --rate 3",
    "run --engine nonsense",
    "run --url nonsense",
    "run --url=",
    "run --url ,",
    "run --tokenizer /nonsense",
    "run --max-failures 2",
    "run --requests 0 --url http://127.0.0.1:9",
)


@pytest.mark.parametrize("words", SLIPS)
def test_a_usage_error_imports_nothing_heavy(words: str) -> None:
    program = (
        "import sys; from burstline.cli import main; code = main(sys.argv[1:]);"
        f"sys.exit(99 if sys.modules.keys() & {set(HEAVY)!r} else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
