"""The searches of a suite: what each found, and one page over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from burstline.bench.limit import CODES, RESULT
from burstline.console import exit_codes
from burstline.console.terminal import show
from burstline.reports.page.limit_page import LimitResult, limits_blocks, limits_page
from burstline.suites.suite import Slot


def limit_in(folder: Path) -> tuple[str, LimitResult] | None:
    """The place of a finished search's page in the suite's folder, and what it found."""
    for path in folder.glob(f"*/{RESULT}"):
        href = f"{folder.name}/{path.parent.name}/report.html"
        return href, LimitResult.from_json(orjson.loads(path.read_bytes()))
    return None


def report_limits(slots: Sequence[Slot], folder: Path, title: str) -> list[int]:
    """Print what the searches found and write the page over all; the exit code of each."""
    if not slots:
        return []
    found = [(f"{slot.engine.name}, {slot.cell}", limit_in(folder / slot.id)) for slot in slots]
    searches = [(name, *one) for name, one in found if one is not None]
    page = folder / "limits.html"
    page.write_text(limits_page(title, searches, [name for name, one in found if one is None]), "utf-8")
    show(limits_blocks(searches))
    print(f"Limits: {page}")
    return [CODES[one[1].state] if one else exit_codes.INCONCLUSIVE for _, one in found]
