"""Telemetry: what was sampled beside a run, as rows in a file that survives its writer."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One sampled value. `at_ns` is on the monotonic clock, absolute until it is rebased to a run's start.

    Names carry their unit; those in `_s` are counters of seconds since the watcher began (CPU time, stolen
    time, waiting), unless they say otherwise. `value` is None where the source had nothing to say, and
    `note` tells why.
    """

    at_ns: int
    source: str
    name: str
    value: float | None
    note: str | None = None


def rows_of(source: str, values: Mapping[str, float], at_ns: int | None = None) -> list[Row]:
    """The values of one source at one moment, now unless `at_ns` is given."""
    at_ns = time.monotonic_ns() if at_ns is None else at_ns
    return [Row(at_ns, source, name, value) for name, value in values.items()]


def missing(source: str, why: str, name: str = "*") -> Row:
    """The row that says a source, or one value of it, is missing."""
    return Row(time.monotonic_ns(), source, name, None, why)


def as_lines(rows: Iterable[Row]) -> bytes:
    """The rows as JSON lists, one a line: to be appended in one write."""
    return "".join(json.dumps(astuple(row)) + "\n" for row in rows).encode()


def load_telemetry(path: Path) -> list[Row]:
    """All rows that were written, in the order of writing; a last line that a kill cut off is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [Row(*json.loads(line)) for line in whole.splitlines()]
