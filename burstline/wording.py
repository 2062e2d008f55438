"""Counted nouns, times and shares, and what to write instead of an unknown word or another tool's flag."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path


@cache
def others() -> dict[str, dict[str, str]]:
    """Ours by the `flags`, `values` (patterns of both) and `commands` of other tools."""
    tables = tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text("utf-8"))
    return tables | {"flags": {one: ours for ours, names in tables["flags"].items() for one in names.split()}}


def counted(n: float, noun: str) -> str:
    """`1 request`, `1,000 requests`, `2 replies`."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n:,.0f} {noun if n == 1 else several}"


def time_text(seconds: float) -> str:
    """`136 ms`, `1.26 s`: three digits at most."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def took(share: float, by_process: Mapping[str, float] | None) -> str:
    """`: python (pid 7) 48%`, who took most of this share of a machine; "" where that was not looked at."""
    if by_process is None:
        return ""
    most = [f"{name} {by_process[name]:.0%}" for name in sorted(by_process, key=lambda n: -by_process[n])[:3]]
    unseen = "processes that are small, have ended or run in another container or virtual machine"
    return f": {', '.join(most + [unseen] * (sum(by_process.values()) < share / 2))}"


def of_others(flag: str, value: object) -> str:
    """What another tool's flag with this value is here; "" where no value matters, or it is ours."""
    said = f"{flag} {value}"
    fits = ((re.fullmatch(pattern, said), ours) for pattern, ours in others()["values"].items())
    return next((_told(said, fit.expand(ours)) for fit, ours in fits if fit), "")


def _told(word: str, ours: str) -> str:
    return f"{word} is {ours} here" if ours.startswith("-") else f"{word} is not needed: {ours}"


def hint(word: str, known: Iterable[str]) -> str:
    """`did you mean --rate?`; for other words than flags all that are known, where none is near."""
    known, is_flag = list(known), word.startswith("-")
    ours = others()["flags"].get(word.lstrip("-").replace("_", "-"), "")
    shown = ours if is_flag else ours.partition(" ")[0].lstrip("-").replace("-", "_")
    if ours and shown.partition(" ")[0] in known:
        return f"{word} is {shown} here"
    if ours and not ours.startswith("--"):
        return _told(word, ours)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not is_flag and len(word) > 2:
        near = [each for each in known if word in each][:3] or near
    if near or is_flag:
        return f"did you mean {' or '.join(near)}?" if near else ""
    return f"expected one of: {', '.join(known)}"
