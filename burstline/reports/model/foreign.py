"""Results of other load generators: numbers to read beside ours, whose error and work nothing shows."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from burstline.errors import read_small, tables_beside
from burstline.measure.verdict.certificate import Printed, statistic
from burstline.workloads.request import WorkloadError
from burstline.workloads.rows import names_in

_NAME: Final = re.compile(
    r"(?P<time>(?:ttft|ttfb|tpot|itl|e2e)\.(?:mean|min|max|p\d\d?(?:\.\d+)?))"
    r"|(?P<rate>throughput\.(?:(?:output|input|total|steady|peak)_tok|requests|goodput)_per_s)"
    r"|(?P<share>error_rate|acceptance)|(?P<count>ok|failed|total)"
)
_SCALES: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 1 / 60, "%": 0.01}
_UNITS: Final = {"time": ("ms", "s", "us", "ns"), "rate": ("min",), "share": ("%",), "count": ()}
"""Of each kind of number; the first of a time is what it has where no unit is given."""
_STATS: Final = (
    *(("p50", its) for its in ("p50", "median", "med", "50%")),
    *((f"p{p}", its) for p in (90, 99) for its in (f"p{p}", f"p({p})", f"{p}%")),
    *(("mean", its) for its in ("mean", "average", "avg")),
)
"""Our name of a statistic and each that tools have for it."""

MOST_BYTES: Final = 256 << 20
"""The longest result that is read: `vllm bench serve` writes each gap between tokens, in 20 bytes."""
TOOLS: Final[Mapping[str, Any]] = tables_beside(__file__, "tools.toml")
"""The rows of `tools.toml` by the tool's name."""


def foreign_results(path: Path) -> list[Printed]:
    """Every result in a file; WorkloadError where no known tool wrote it, or it lacks what that writes."""
    document = _json_of(path)
    documents = document if isinstance(document, list) else [document]  # SGLang appends a line for each run
    for tool, row in TOOLS.items():
        if documents and all(_at(each, row["has"], None) is not None for each in documents):
            with suppress(TypeError):  # its loads are no list
                key = row.get("each")
                parts = [part for each in documents for part in (_at(each, key) if key else [each])]
                version = f" {_at(documents[0], row['has'])}" if row["has"].endswith("version") else ""
                names = [f" {k}" for k in range(1, len(parts) + 1)] if len(parts) > 1 else [""]
                return [_result(*each, tool + version, row, path) for each in zip(names, parts, strict=True)]
    raise WorkloadError(
        f"{path} is no run and no result that is known; expected a run's folder, or the JSON file of "
        f"{', '.join(TOOLS)}"
    )


def _result(number: str, document: Any, tool: str, row: Mapping[str, Any], path: Path) -> Printed:
    values: dict[str, float] = dict(row.get("unless", {}))
    for word in row["reads"]:
        for stat, its in _STATS if "*" in word else _STATS[:1]:
            reading, _, place = word.replace("*", stat, 1).replace("*", its).partition("=")
            with suppress(WorkloadError):  # it does not say that
                values[reading] = read_number(reading, place, document, path.parent)
    weighed = "" if "tpot.mean" in values else ", which counts once for each gap"
    defines = {key: how.replace("{weighed}", weighed) for key, how in row["defines"].items()}
    if values.get("mismatched"):
        defines["besides"] += f" The server counted other tokens in {values['mismatched']:,.0f} replies."
    of_server = values.get("server_tok")
    if of_server and of_server != (own := values.get("own_tok", 0.0)):
        defines["besides"] += f" It counted {own:,.0f} output tokens, the server {of_server:,.0f}."
    name, whole = f"{path.with_suffix('')}{number}", path.name == row.get("file", path.name)
    printed = printed_of(tool, values, defines=defines, name=name, whole=whole)
    if not printed.numbers:
        raise WorkloadError(f"{path} cannot be read as a result of {tool}: it has none of its numbers")
    return printed


def printed_of(tool: str, values: Mapping[str, float], **more: Any) -> Printed:
    """What a tool printed, by these values' names, and `more` of it; a count that is not there is None."""
    counts = (
        values.get(name, values.get("total", math.nan) - values.get(other, math.nan))
        for name, other in (("ok", "failed"), ("failed", "ok"))
    )
    n_ok, n_failed = (None if math.isnan(count) else int(count) for count in counts)
    before = {"time": "metrics.", "rate": "", "share": "share."}
    numbers = {before[kind] + name: v for name, v in values.items() if (kind := _kind(name)) in before}
    return Printed(tool, n_ok, n_failed, numbers, **more)


def parse_reads(given: Sequence[str]) -> dict[str, str]:
    """`ttft.p50=x.json#results.ttft.median:ms` as the place by the number's name."""
    reads = {}
    for word in given:
        name, _, place = word.partition("=")
        kind = _kind(name)
        where, unit = _split(place)
        if kind is None or not where or where.endswith("#"):
            raise WorkloadError(
                f"--reads {word!r}: expected NAME=[FILE#]PLACE[:UNIT], with a NAME such as ttft.p50, "
                "itl.mean, e2e.p99.9, ok, failed, error_rate or throughput.output_tok_per_s, and a "
                "PLACE such as results.ttft.median"
            )
        if unit in _SCALES and unit not in _UNITS[kind]:
            units = ", ".join(_UNITS[kind]) or "none"
            raise WorkloadError(f"--reads {word!r}: {name} has no unit {unit}; expected {units}")
        reads[name] = place
    return reads


def read_number(name: str, place: str, document: Any, folder: Path) -> float:
    """The number at a place of the document, or of the file in the folder that the place names.

    Of a list it is the mean, the least, the most or the percentile that `name` says. Seconds, a second, or
    a share. WorkloadError says what is there instead.
    """
    where, unit = _split(place)
    file, _, inner = where.rpartition("#")
    if file:
        paths = sorted(folder.rglob(file))
        if len(paths) != 1:
            raise WorkloadError(f"{len(paths)} files are called {file}; expected one")
        document = _json_of(paths[0])
        if document is None:
            raise WorkloadError(f"{file} is no JSON file")
    value = _at(document, inner)
    if isinstance(value, str) and (match := re.fullmatch(r"([-+.\deE]+) *(\D*)", value.strip())):
        value, unit = match[1], match[2] or unit
    kind = _kind(name)
    if isinstance(value, list) and kind == "time":
        numbers = np.array([each for each in value if isinstance(each, int | float)], dtype=float)
        if name.startswith("tpot"):
            numbers = numbers[numbers > 0]  # a request of one token has none
        value = statistic(numbers, name.partition(".")[2]) if len(numbers) else math.nan
    with suppress(TypeError, ValueError, ZeroDivisionError):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            if unit.startswith("/"):
                return number / float(_at(document, unit[1:]))
            unit = str(_at(document, unit[1:])) if unit.startswith("@") else unit
            return number * (_SCALES[unit] if unit in _SCALES else _SCALES["ms"] if kind == "time" else 1.0)
    keys = f"; it has {names_in(value)}" if isinstance(value, dict) else ""
    raise WorkloadError(f"{inner} is no number but {type(value).__name__} ({value!r:.40}){keys}")


def _kind(name: str) -> str | None:
    return match.lastgroup if (match := _NAME.fullmatch(name)) else None


def _split(place: str) -> tuple[str, str]:
    where, _, unit = place.rpartition(":")
    return (where, unit) if where and (unit in _SCALES or unit[:1] in ("/", "@")) else (place, "")


def _at(document: Any, place: str, *default: None) -> Any:
    """What lies at a dotted place: a key, which may have dots itself (`p99.9`), an index of a list, the row
    of a list that holds this value, or this key of all its rows."""
    value, keys = document, place.removeprefix("$.").split(".")
    while keys:
        key, n = keys[0], 1
        if isinstance(value, dict):
            if key == "percentiles" and value.get("count") == 0:
                raise WorkloadError(f"{place} is of nothing: its count is 0")
            if key not in value and isinstance(value.get("values"), dict):
                value = value["values"]  # k6's handleSummary
            n = next((n for n in range(len(keys), 0, -1) if ".".join(keys[:n]) in value), 1)
            key = ".".join(keys[:n])
        elif isinstance(value, list) and key.isdigit():
            value = dict(enumerate(value))
            key = int(key)  # type: ignore[assignment]
        elif isinstance(value, list):
            rows = [row for row in value if isinstance(row, dict)]
            held = next((row for row in rows if key in row.values()), None)
            value = {key: held or [row[key] for row in rows if key in row]} if rows else {}
        if not isinstance(value, dict) or key not in value:
            if default:
                return default[0]
            there = f"; it has {names_in(value)}" if isinstance(value, dict) else ""
            raise WorkloadError(f"there is no {'.'.join(keys)} of {place}{there}")
        value, keys = value[key], keys[n:]
    return value


def _json_of(path: Path) -> Any:
    """A JSON file, or the list of what its lines hold; None where it is neither."""
    try:
        data = read_small(path, MOST_BYTES, "the result of one run")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise WorkloadError(f"{path} cannot be read: {why}") from None
    with suppress(ValueError, RecursionError):
        return json.loads(data)  # SGLang writes Infinity, which only this takes
    with suppress(ValueError, RecursionError):
        return [json.loads(line) for line in data.splitlines() if line.strip()]
    return None
