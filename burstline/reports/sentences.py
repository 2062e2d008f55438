"""What verdicts, limits and findings are called: each sentence once, by its code, in `sentences.toml`.

`{name}` in a template stands for a value that the caller fills in: `say("open.noise", n=5)`.
"""

from collections.abc import Mapping
from typing import Any, Final

from burstline.errors import tables_beside

_TABLES: Final[Mapping[str, Mapping[str, Any]]] = tables_beside(__file__, "sentences.toml")

UNPROVEN: Final[Mapping[str, str]] = {"interrupted": "INTERRUPTED", "too-short": "TOO SHORT"}
"""What stands in place of VALID, by the code of the warning that takes it away."""
SWEEP: Final = "SWEEP"
REPEATS: Final = "REPEATS"
STATES: Final[Mapping[str, tuple[str, str, str]]] = {k: tuple(v) for k, v in _TABLES["states"].items()}
"""A run's verdict: its tone, its mark and what it means."""
COMPARED: Final = {**STATES, **{k: tuple(v) for k, v in _TABLES["compared"].items()}}
"""The same for a comparison's state."""
MEANT_BY: Final[Mapping[str, str]] = _TABLES["meant_by"]
"""What a state means in this run, by the code of the reason for it."""
SENTENCES: Final[Mapping[str, str]] = _TABLES["sentences"]
LIMITS: Final[Mapping[str, str]] = _TABLES["limits"]
"""What limited a run, in two or three words."""
SET_BY: Final[Mapping[str, str]] = _TABLES["set_by"]
GATE: Final[Mapping[str, tuple[str, str, str, str, str]]] = {k: tuple(v) for k, v in _TABLES["gate"].items()}
SEARCH: Final[Mapping[str, tuple[str, str, str, str]]] = {k: tuple(v) for k, v in _TABLES["search"].items()}
NEXT: Final[Mapping[str, str]] = _TABLES["next"]
"""What to try after a valid run, by what limited it."""
GROUPS: Final[Mapping[str, str]] = _TABLES["groups"]
FORECAST: Final[Mapping[str, str]] = _TABLES["forecast"]
OF_A_RUN: Final[Mapping[str, str]] = _TABLES["of_a_run"]


def say(code: str, **values: object) -> str:
    return SENTENCES[code].format(**values)


def say_next(advice: str) -> str:
    return f"Next: {uncapitalised(advice)}" if advice else ""


def uncapitalised(sentence: str) -> str:
    return f"{sentence[:1].lower()}{sentence[1:]}"
