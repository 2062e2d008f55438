"""What runs of the product say of themselves on a machine that others share."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Final

from burstline.measure.record.verdict import State

UNSURE: Final = frozenset({State.CLIENT_BOUND, State.DISTURBED, State.COLD})
"""The verdicts by which a run says that the machine, not the server, may have made its times."""


class Undecided(AssertionError):
    """A test of times that the machine was too busy for."""


def unsure(folder: Path | None, but: Collection[str] = ()) -> str | None:
    """The first run below a folder that says it cannot judge times, and why; None if each run can.

    `but`: verdicts that the test means to get.
    """
    for path in sorted(folder.rglob("summary.json")) if folder else ():
        verdict = json.loads(path.read_text("utf-8")).get("verdict") or {}
        if verdict.get("state") in UNSURE - set(but):
            return f"{path.parent.name} is {verdict['state']}"
        if any(each["code"] == "stolen-cpu" for each in verdict.get("warnings", ())):
            return f"{path.parent.name} had CPU time stolen"
    return None


def done(code: int, folder: Path) -> bool:
    """Whether a command ended with 0, or with 4 because a run below `folder` says the machine was busy."""
    return code == 0 or (code == 4 and unsure(folder) is not None)
