"""The draws of the oracle have every habit of a stream that docs/method.md names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.oracle.draws import BEATS, FIELDS, ODD_USAGE, Draw, draw

HABITS: dict[str, Callable[[Draw], bool]] = {
    **{f"usage: {usage}": lambda d, usage=usage: d.scripts[0]["usage"] == usage for usage in ODD_USAGE},
    **{
        f"text in {name}": lambda d, name=name: d.scripts[0].get("field") == name
        for name in sorted(set(FIELDS))
    },
    **{f"heartbeat {beat!r}": lambda d, beat=beat: d.scripts[0].get("beat") == beat for beat in BEATS},
    "a role that counts": lambda d: d.scripts[0]["usage"] == "role" and "role_s" in d.scripts[0],
    "an event without text before the first": lambda d: "role_s" in d.scripts[0],
    "several tokens an event": lambda d: d.scripts[0]["tok_per_event"] > 1,
    "no usage at all": lambda d: d.scripts[0]["usage"] == "off",
    "status 201": lambda d: d.scripts[0]["opens"] == 201,
    "a bare list of models": lambda d: d.bare_list,
}


@cache
def drawn() -> list[Draw]:
    return list(map(draw, range(400)))


@pytest.mark.parametrize("has", HABITS.values(), ids=HABITS)
def test_a_habit_of_servers_is_drawn(has: Callable[[Draw], bool]) -> None:
    assert sum(map(has, drawn())) >= 3
