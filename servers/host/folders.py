"""Model folders with a file or two of our own."""

from collections.abc import Mapping
from pathlib import Path


def linked_copy(folder: Path, to: Path, files: Mapping[str, str]) -> Path:
    """A new folder of links to all that `folder` holds, but for `files`, which get these texts."""
    to.mkdir(parents=True)
    for entry in folder.resolve().iterdir():
        if entry.name not in files:
            (to / entry.name).symlink_to(entry)
    for name, text in files.items():
        (to / name).write_text(text)
    return to.resolve()
