"""Takes secrets out of what is about to be written down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

REMOVED: Final = "(removed)"

_SECRET_NAME: Final = re.compile(
    r"api[_-]?key|secret|passw(or)?d|authorization|credential|((hf|hub|auth|access|bearer|api)[_-]?|^)token$",
    re.IGNORECASE,
)
_BEARER: Final = re.compile(r"\b(Bearer|Basic) [\w.~+/=-]+", re.IGNORECASE)
_URL_USER: Final = re.compile(r"(\w+://)[^/@\s]+@")


def without_secrets(value: Any) -> Any:
    """The JSON value with every key, token and password replaced by "(removed)".

    Names decide (`api_key`, `HF_TOKEN`, `--api-key VALUE`, `--api-key=VALUE`), and forms (`Bearer ...`,
    `https://user:password@host`).
    """
    if isinstance(value, Mapping):
        return {k: REMOVED if _names_secret(k) and v else without_secrets(v) for k, v in value.items()}
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return _clean_argv(value)
    return value


def _clean_argv(items: Sequence[Any]) -> list[Any]:
    hidden = False
    cleaned: list[Any] = []
    for item in items:
        cleaned.append(REMOVED if hidden else without_secrets(item))
        hidden = isinstance(item, str) and item.startswith("-") and "=" not in item and _names_secret(item)
    return cleaned


def _clean(text: str) -> str:
    name, equals, _ = text.partition("=")
    if equals and re.fullmatch(r"[\w.-]+", name) and _names_secret(name):
        return f"{name}={REMOVED}"
    return _URL_USER.sub(rf"\1{REMOVED}@", _BEARER.sub(rf"\1 {REMOVED}", text))


def _names_secret(name: Any) -> bool:
    return _SECRET_NAME.search(str(name).lstrip("-")) is not None
