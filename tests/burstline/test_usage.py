"""A slip in a command is told before anything heavy is imported: it should feel instant."""

from __future__ import annotations

import subprocess
import sys

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


def test_usage_errors_are_one_line_each_and_import_nothing_heavy() -> None:
    program = (
        "import sys; from burstline.cli import main; codes = [main(slip.split()) for slip in sys.argv[1:]];"
        f"print(*codes, *sys.modules.keys() & {set(HEAVY)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program, *SLIPS], capture_output=True, text=True)
    assert done.stdout.split() == ["2"] * len(SLIPS)
    assert done.stderr.count("\n") == len(SLIPS), done.stderr
