"""The error of the roofline, and the readers of files: ours, and those that users and servers name.

None of theirs is long or deep.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

MOST_TOML: Final = 1 << 18
MOST_DOTTED: Final = 10_000
"""Of TOML, and of a word of it in which dots join names: reading one takes its length squared."""


class RooflineError(ValueError):
    """The user asked what cannot be: what was wrong, the number, the limit, and what to try."""


def tables_beside(module: str, name: str) -> dict[str, Any]:
    """The package's own TOML file of this name, beside the module whose `__file__` is given."""
    return tomllib.loads(Path(module).with_name(name).read_text("utf-8"))


def read_small(path: Path, most_bytes: int, what: str) -> bytes:
    """The file's contents; ValueError where it is longer than any `what`."""
    with path.open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size  # of a device 0, whatever it holds
        if n_bytes <= most_bytes and len(data := file.read(most_bytes + 1)) <= most_bytes:
            return data
    raise ValueError(f"it has over {most_bytes >> 20} MB; expected {what}")


def read_toml(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return parse_toml(file.read(4 * MOST_TOML + 1), path)  # a character has up to four bytes


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
