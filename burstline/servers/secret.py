"""Secrets that the user gives are known by where they stand, and learned for where others repeat them."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from burstline.servers import redact
from burstline.servers.redact import REMOVED, names_secret, secrets_in

_WORDS: Final = re.compile(r"[A-Z]?[a-z]+(?:[_ -][A-Za-z]+)*")
"""What reads as words is no secret of its own where it is only a part of one."""
_INNOCENT_HEADERS: Final = frozenset(
    {"accept", "accept-encoding", "accept-language", "cache-control", "content-type", "user-agent"}
)
_FLAG: Final = re.compile(r"(?:--?[\w-]+=)?")


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
    folders = ("PWD", "OLDPWD")  # of every shell: they only sound like passwords
    redact.learn(*(value for name, value in environ.items() if names_secret(name) and name not in folders))
    redact.learn(*(secret for value in environ.values() for secret in secrets_in(value, (redact.URL_LOGIN,))))
    redact.learn(*chain.from_iterable(secrets for _, secrets in _words(argv)))


def without_secrets(value: Any) -> Any:
    """The JSON value with every key, token and password replaced by "(removed)", its text printable.

    Names decide (of `--header 'NAME: VALUE'` all but innocent ones), forms (`Bearer ...`, `http://user:password@host`)
    and values that were learned. A list may be a command; a text in it may be one, too, or JSON.
    """
    if isinstance(value, Mapping):
        return {k: REMOVED if names_secret(k) and v else without_secrets(v) for k, v in value.items()}
    if isinstance(value, str):
        return redact.printable(redact.redacted(value))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [shown for shown, _ in _words(value)]
    return value


def _words(items: Iterable[Any]) -> Iterator[tuple[Any, Iterable[str]]]:
    """Each word of a command as it may be shown, and the secrets in it; an item may be any JSON value."""
    option = ""
    for item in items:
        word = item if isinstance(item, str) else ""
        before = "" if names_secret(option) else _FLAG.match(word)[0]  # type: ignore[index]  # it may be empty
        flag, value = before[:-1] or option, word[len(before) :]
        name, colon, content = value.partition(":")
        if names_secret(flag):
            yield before + REMOVED, [value]
        elif flag in ("--header", "-H") and colon and name.strip().lower() not in _INNOCENT_HEADERS:
            yield f"{before}{redact.printable(name)}: {REMOVED}", _of_header(name.strip(), content.strip())
        elif value:
            shown, secrets = _within(value)
            yield before + shown, secrets
        else:
            yield before or without_secrets(item), ()
        option = word if word.startswith("-") and not before else ""


def _within(text: str) -> tuple[str, list[str]]:
    """A text as it may be shown, and the secrets in it: JSON and a command are read as what they are."""
    shown, secrets = text, list(secrets_in(text))
    with suppress(ValueError, RecursionError):  # it is neither
        if text.startswith(("{", "[")):
            value = json.loads(text)
            secrets += _named_in(value)
            shown = text if (clean := without_secrets(value)) == value else json.dumps(clean)
        elif " -" in text:
            words = shlex.split(text)
            secrets += chain.from_iterable(inner for _, inner in _words(words))
            shown = text if (clean := without_secrets(words)) == words else shlex.join(clean)
    return without_secrets(shown), secrets


def _of_header(name: str, value: str) -> Iterator[str]:
    """A header that each request carries, and each part of it that may be quoted alone."""
    first, *more = re.findall(r"(?=(?:^|[\s;,=])([^\s;,]+))", value) or [value]
    if first.lower() == "basic" and more:
        with suppress(ValueError):
            more += base64.b64decode(more[0], validate=True).decode(errors="replace").split(":", 1)
    yield from (value, *(part for part in (first, *more) if not _WORDS.fullmatch(part)))
    if names_secret(name) and len(more) == 1:  # the first is the scheme
        yield more[0]


def _named_in(value: Any, *, named: bool = False) -> Iterator[str]:
    """The texts that JSON names as secrets, at any depth."""
    if isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _named_in(inner, named=named or names_secret(key))
    elif named and isinstance(value, str):
        yield value
