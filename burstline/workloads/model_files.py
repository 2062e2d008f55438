"""The files of a model's folder: each is read whole, and none is longer than any model's."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from burstline.errors import read_small
from burstline.workloads.request import WorkloadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE: Final = "tokenizer.json"

MOST_BYTES: Final = 64 << 20  # twice the longest tokenizer.json that is known


def read_text(path: Path) -> str | None:
    """The file's text, None where there is no such file; WorkloadError for anything else."""
    try:
        return read_small(path, MOST_BYTES, "a file of a model's folder").decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object, empty where there is no such file; WorkloadError for anything else."""
    text = read_text(path)
    try:
        parsed = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise WorkloadError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed


def local_tokenizer(folder: Path | None, model: str | None) -> "Tokenizer | None":
    """The folder's tokenizer, else the model's; None where there is no such file."""
    for where in (folder, Path(model) if model else None):
        if where is not None and (where / TOKENIZER_FILE).is_file():
            return read_tokenizer(where / TOKENIZER_FILE)
    return None


def read_tokenizer(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(read_text(path) or "")
    except Exception as error:  # the library has no type of its own
        raise WorkloadError(f"{path} is no tokenizer: {str(error)[:300]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
