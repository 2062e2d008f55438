"""How a report is shown on standard output: within a terminal's width, with its verdicts in colour."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final

from burstline.reports.blocks import Banner, Block
from burstline.reports.formats.text import text
from burstline.servers.redact import printable, without_known

SHADES: Final = {"good": "32", "warn": "33", "bad": "31"}
"""The colour of a verdict, by its tone."""


def show(blocks: Sequence[Block]) -> None:
    """Print blocks; what is no terminal gets lines of 120 letters at most, as logs show, and no colour."""
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 120
    shown = text(blocks, width, getattr(sys.stdout, "signs", None))
    if not sys.stdout.isatty():
        print(shown, flush=True)  # a page may take seconds more
        return
    shown = "\n" + printable(without_known(shown))
    if "NO_COLOR" not in os.environ:
        for banner in (block for block in blocks if isinstance(block, Banner)):
            state = f"{banner.name}{banner.state}:"
            shown = shown.replace(f"\n{state}", f"\n\033[1;{SHADES[banner.tone]}m{state}\033[0m", 1)
    print(shown[1:], file=getattr(sys.stdout, "raw", sys.stdout))
