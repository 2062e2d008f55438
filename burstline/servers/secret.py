"""Secrets that the user gives are known by where they stand, and learned for where others repeat them."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from burstline.servers import redact
from burstline.servers.redact import REMOVED, URL_LOGIN, names_secret, secrets_in

_WORDS: Final = re.compile(r"[A-Z]?[a-z]+(?:[_ -][A-Za-z]+)*")
"""What reads as words is no secret of its own where it is only a part of one."""
_INNOCENT: Final = re.compile(r"(?i:accept(-encoding|-language)?|cache-control|content-type|user-agent)")


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that nothing shows, and that is known from now on; `reveal` it to a server or a child alone."""

    _text: str = field(repr=False)

    def __post_init__(self) -> None:
        redact.learn(self._text)

    def reveal(self) -> str:
        return self._text


def learn_from(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Learn every secret that the command line or the environment names as one, commands within it too."""
    found = [value for name, value in environ.items() if names_secret(name) and name not in ("PWD", "OLDPWD")]
    found += [secret for value in environ.values() for secret in secrets_in(value, (URL_LOGIN,))]
    _shown(argv, found)
    redact.learn(*found)


def without_secrets(value: Any) -> Any:
    """The JSON value with every key, token and password replaced by "(removed)", its text printable.

    Names decide (of `--header 'NAME: VALUE'` all but innocent ones), forms (`Bearer ...`, `http://user:password@host`)
    and values that were learned. A list may be a command; a text in it may be one, too, or JSON.
    """
    return _shown(value, [])


def _shown(value: Any, found: list[str], *, hidden: bool = False) -> Any:
    """The JSON value as it may be shown; secrets in it, such as each text that is `hidden`, go to `found`."""
    shown = value
    if isinstance(value, Mapping):
        shown = {k: _shown(each, found, hidden=hidden or names_secret(k)) for k, each in value.items()}
    elif isinstance(value, str):
        found += [value] if hidden else []
        shown = redact.printable(redact.redacted(value))
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        shown = [_shown(each, found, hidden=True) for each in value] if hidden else list(_words(value, found))
    return REMOVED if hidden and value else shown


def _words(items: Iterable[Any], found: list[str]) -> Iterator[Any]:
    """Each word of a command as it may be shown; an item may be any JSON value."""
    option = ""
    for item in items:
        word = item if isinstance(item, str) else ""
        before = "" if names_secret(option) else re.match(r"(?:--?[\w-]+=)?", word)[0]  # type: ignore[index]
        flag, value = before[:-1] or option, word[len(before) :]
        name, colon, content = value.partition(":")
        if names_secret(flag):
            found.append(value)
            yield before + REMOVED
        elif flag in ("--header", "-H") and colon and not _INNOCENT.fullmatch(name.strip()):
            found += _of_header(name.strip(), content.strip())
            yield f"{before}{redact.printable(name)}: {REMOVED}"
        else:
            yield before + _within(value, found) if word else _shown(item, found)
        option = word if word.startswith("-") and not before else ""


def _within(text: str, found: list[str]) -> str:
    """A text as it may be shown: JSON and a command are read as what they are."""
    found += secrets_in(text)
    shown, is_json = text, text.startswith(("{", "["))
    with suppress(ValueError, RecursionError):  # it is neither
        if is_json or " -" in text:
            value = json.loads(text) if is_json else shlex.split(text)
            if (clean := _shown(value, found)) != value:
                shown = json.dumps(clean) if is_json else shlex.join(clean)
    return redact.printable(redact.redacted(shown))


def _of_header(name: str, value: str) -> Iterator[str]:
    """A header that each request carries, and each part of it that may be quoted alone."""
    first, *more = re.findall(r"(?=(?:^|[\s;,=])([^\s;,]+))", value) or [value]
    if first.lower() == "basic" and more:
        with suppress(ValueError):
            more += base64.b64decode(more[0], validate=True).decode(errors="replace").split(":", 1)
    yield from (value, *(part for part in (first, *more) if not _WORDS.fullmatch(part)))
    if names_secret(name) and len(more) == 1:  # the first is the scheme
        yield more[0]
