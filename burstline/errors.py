"""The one error of this package, and its files, none of which is long or deep."""

import re
import tomllib
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 32 << 20
MOST_TOML: Final = 1 << 18
MOST_DOTTED: Final = 10_000
"""Of a file, of TOML, and of a word of it in which dots join names: reading one takes its length squared."""


class RooflineError(ValueError):
    """The user asked what cannot be: what was wrong, the number, the limit, and what to try."""


def read_small(path: Path) -> bytes:
    """The contents of a config.json or a TOML file; RooflineError where it is longer than any."""
    with path.open("rb") as file:
        if len(data := file.read(MOST_BYTES + 1)) <= MOST_BYTES:
            return data
    raise RooflineError(f"{path} has over {MOST_BYTES >> 20} MB; expected a config.json or a TOML file")


def parse_toml(data: str | bytes, path: object) -> dict[str, Any]:
    """The document; RooflineError where it is no TOML, or too long or deep."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        words = re.split(r"[\s\"']+", text)
        if len(text) > MOST_TOML or any(len(word) > MOST_DOTTED and "." in word for word in words):
            raise ValueError(f"expected at most {MOST_TOML:,} characters, and {MOST_DOTTED:,} in a name")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deeply; a number of thousands of digits
        raise RooflineError(f"{path} is not TOML: {error}") from None
