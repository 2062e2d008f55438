"""Reads what a server reports: JSON at its paths, gauges in Prometheus text, lines of its log."""

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import orjson

from burstline.servers.messages import Get
from burstline.servers.replies import loads

MIB, GIB = 2**20, 2**30


def json_at(get: Get, path: str) -> dict[str, Any]:
    """The JSON object at a path; empty where the server has none there. A bare list becomes its `data`."""
    reply = get(path)
    answer = loads(reply.body) if reply.ok else None
    return {"data": answer} if isinstance(answer, list) else answer if isinstance(answer, dict) else {}


def first_model(models: object) -> dict[str, Any]:
    """The first of the models that `/v1/models` lists, with its `id`; empty where it lists none."""
    listed = (models.get("data") or models.get("models")) if isinstance(models, dict) else None
    model = listed[0] if isinstance(listed, list) and listed else None
    if isinstance(model, str):
        return {"id": model}
    return {"id": model.get("name") or model.get("model")} | model if isinstance(model, dict) else {}


def owned_by(owner: str) -> bytes:
    """The pattern of a `/v1/models` whose models are `owned_by` this engine."""
    return rb'"owned_by": ?"%b"' % re.escape(owner).encode()


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOG_PREFIX = re.compile(
    r"^(?:\([\w -]+ pid=\d+\) )?(?:\[[^\]]*\] ?)*(?:(?:DEBUG|INFO|WARNING|WARN|ERROR)\b[: ]*)?"
    r"(?:\d[\d-]* [\d:.,]+ )?(?:\[[^\]]*\]:? ?)?(?:\d+(?:\.\d{2,3}){3} [DIWE] )?"
)


def log_message(line: str, most: int = 120) -> str:
    """The message of a log line: that of a JSON line, else the line without level and time.

    Cut at whole words where it is long.
    """
    text = _ANSI.sub("", line)
    _, message = json_line(text) or ("", _LOG_PREFIX.sub("", text))
    return textwrap.shorten(message, most, placeholder=" ...")


def json_line(line: str) -> tuple[str, str] | None:
    """Level and message of a line of a JSON log; None for any other line."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return "", line
    fields = row.get("fields")
    return str(row.get("level")), str((fields if isinstance(fields, dict) else row).get("message") or line)


def flag(word: str | None) -> bool | None:
    """On or off as engines log it; None for any other word."""
    return {"true": True, "1": True, "false": False, "0": False}.get((word or "").lower())


def number(text: str | None) -> int | None:
    """The whole number in a text; None for any other text."""
    return int(text) if text and text.isdecimal() else None


def logged(log: str, pattern: str) -> str | None:
    """The group of the pattern's first match in a log."""
    return found[1] if (found := re.search(pattern, log)) else None


def logged_bytes(log: str, pattern: str, unit_bytes: int) -> int | None:
    """Bytes out of lines that every rank or device logs for its own share, summed; None where none does."""
    shares = re.findall(pattern, log)
    return round(sum(map(float, shares)) * unit_bytes) if shares else None


def opposite(flag: object) -> bool | None:
    """Whether a thing is on whose off-switch has this value; None where the value is unknown."""
    return not flag if isinstance(flag, bool) else None


def option_of(arguments: Sequence[str], *names: str) -> bool:
    """Whether the user gave one of these flags: the adapter then adds none of its own."""
    return any(argument.partition("=")[0] in names for argument in arguments)


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """The value of one of these flags, `--flag value` or `--flag=value`; the last counts, as for engines."""
    value = None
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, has_value, rest = argument.partition("=")
        if name in names:
            value = rest if has_value else following
    return value
