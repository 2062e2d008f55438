"""The one error of this package, and its files, none of which is long or deep."""

import re
import tomllib
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 1 << 22
MOST_DOTTED: Final = 10_000
"""Of a word of TOML in which dots join names: reading one takes its length squared."""


class RooflineError(ValueError):
    """The user asked what cannot be: what was wrong, the number, the limit, and what to try."""


def read_small(path: Path) -> str:
    """The text of a config.json or a device's file; RooflineError where it is none."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise RooflineError(
            f"{path} has over {MOST_BYTES >> 20} MB; expected a config.json or a device's TOML"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RooflineError(f"{path} is not text: {error}") from None


def parse_toml(data: str | bytes, path: object) -> dict[str, Any]:
    """The document; RooflineError where it is no TOML, or too deep."""
    try:
        text = data if isinstance(data, str) else data.decode()
        if any(len(word) > MOST_DOTTED and "." in word for word in re.split(r"[\s\"']+", text)):
            raise ValueError(f"expected names of at most {MOST_DOTTED:,} characters")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deeply; a number of thousands of digits
        raise RooflineError(f"{path} is not TOML: {error}") from None
