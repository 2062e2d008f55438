"""Rows of a file, whatever its format, each with its number: an error names its row, in one line.

JSON lines, JSON lists, text, CSV (all also as .gz or .zst), Parquet, and what the `datasets` library loads.
"""

import csv
import gzip
import importlib.util
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
import zstandard

from burstline.workloads.request import WorkloadError

Row = Mapping[str, Any]
Rows = Iterator[tuple[int, Row]]

MAX_LINE: Final = 64 << 20
"""Bytes of one line; a longer one is no row but a file of another kind."""
MAX_FIELD: Final = 8 << 20
MAX_COLUMNS: Final = 10_000
"""Characters of a value, and values of a row, of a CSV."""
MOST_TIMES: Final = 50
SMALL: Final = 16 << 20
"""What is packed may unpack to so many times its size, or to so many bytes; text does to ten times."""
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
TOO_DENSE: Final = f"it unpacks to over {MOST_TIMES} times its size; expected at most that, unpack it first"
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
_BATCH: Final = 32
_PIECE: Final = 1 << 16
_BETWEEN: Final = re.compile(r"\A\s*\[\s*|[\s,]*")


def read_rows(source: str, what: str, split: str | None = None) -> Rows:
    """Every row of a file, a folder or a dataset's name, with its number from 1; `what` is the flag.

    Raises WorkloadError, naming the row, where something cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_dir() or not path.exists():
        return _of_library(source, path, what, split)
    if split is not None:
        raise WorkloadError(f"{what} {source},split={split}: a file has no splits; drop split={split}")
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    kind = suffixes[-1].lower() if suffixes else ""
    with _opened(path, what) as file:
        head = file.read(64)
    if head.startswith(_PARQUET) or kind == ".parquet":
        return _parquet(path, what)
    if kind == ".csv":
        return csv_rows(path, what)
    if kind in (".json", ".jsonl", ".ndjson"):
        is_list = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        return _json_list(path, what) if is_list else _json_lines(path, what)
    if kind in ("", ".txt", ".text", ".md"):
        return ((number, {"prompt": text}) for number, text in lines(path, what))
    raise WorkloadError(f"{what} {source}: format {kind!r}; expected .jsonl, .json, .txt, .csv or .parquet")


def names_in(row: Iterable[object]) -> str:
    """The names of a row's columns for a message: on one line and not long, whatever a file calls them."""
    return f"{' '.join(', '.join(map(str, row)).split()) or 'none':.300}"


def number_in(value: Any) -> float:
    """The number that a row's value is; NaN where it is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _check_packing(path: Path, what: str) -> None:
    """WorkloadError where a file unpacks to far more than one of its size holds."""
    is_dense = False
    with suppress(WorkloadError), _opened(path, what) as file:  # what reads its rows says where it ends
        if not isinstance(getattr(file, "raw", None), io.FileIO):
            most = max(SMALL, MOST_TIMES * path.stat().st_size)
            is_dense = all(file.read(1 << 20) for _ in range(1 + (most >> 20)))
    if is_dense:
        raise WorkloadError(f"{what} {path} cannot be read: {TOO_DENSE}")


@contextmanager
def _opened(path: Path, what: str, row: Callable[[], int] = lambda: 1) -> Iterator[BinaryIO]:
    """What is in the file, unpacked; errors of decompressors and readers as one line that names the row."""
    try:
        file: Any = path.open("rb")
        magic = file.peek(4)[:4]
    except OSError as error:
        raise WorkloadError(f"{what} {path} cannot be read: {error.strerror}") from None
    try:
        with file:
            if magic.startswith(_GZIP):
                yield gzip.GzipFile(fileobj=file)  # type: ignore[misc]
            elif magic == _ZSTD:
                yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))
            else:
                yield file
    except EOFError:
        raise WorkloadError(f"{what} {path} row {row()}: the compressed file ends here; it was cut") from None
    except (zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise WorkloadError(f"{what} {path} row {row()}: cannot be decompressed: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{what} {path} row {row()}: cannot be read: {error}") from None


def lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Every line that is not blank, as text, with its number."""
    return ((number, line) for number, text in _texts(path, what, MAX_LINE) if (line := text.strip()))


def _texts(path: Path, what: str, most: int) -> Iterator[tuple[int, str]]:
    number = 0
    _check_packing(path, what)
    with _opened(path, what, lambda: number + 1) as file:
        while line := file.readline(most + 1):
            number += 1
            where = f"{what} {path} row {number}"
            if len(line) > most:
                raise WorkloadError(f"{where} is longer than {most >> 20} MB; expected a row a line")
            if number == 1 and line.startswith(_UTF16):
                raise WorkloadError(f"{where}: the text is UTF-16; expected UTF-8, convert it")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                why = f"byte {error.start + 1} is not UTF-8; is this a binary file?"
                raise WorkloadError(f"{where}: {why}") from None
            if "\0" in text:
                raise WorkloadError(f"{where} holds a zero byte; is this a binary file?")
            yield number, text
    if not number:
        raise WorkloadError(f"{what} {path} row 1: the file is empty; expected at least one row")


def _json_lines(path: Path, what: str) -> Rows:
    for number, text in lines(path, what):
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            hint = "; JSON has no NaN" if re.search(r"\bNaN\b|\bInfinity\b", text) else ""
            raise WorkloadError(f"{what} {path} row {number} is not JSON: {error}{hint}") from None
        yield number, _object(row, number, path, what)


def _json_list(path: Path, what: str) -> Rows:
    """The rows of one JSON list: a part of it is in memory, twice as much where that holds no whole row."""
    number, at, text, find = 0, 0, "", json.JSONDecoder().raw_decode
    _check_packing(path, what)
    with _opened(path, what, lambda: number + 1) as file:
        parts = io.TextIOWrapper(file, "utf-8-sig")
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it may be empty
            if text[at : at + 1] == "]":
                break
            try:
                row = orjson.loads(text[at : (end := find(text, at)[1])])
            except (ValueError, RecursionError) as error:
                part = parts.read(max(_PIECE, len(text) - at)) if len(text) - at <= MAX_LINE else ""
                if not part:
                    raise WorkloadError(f"{what} {path} row {number + 1} is not JSON: {error}") from None
                text, at = text[at:] + part, 0
                continue
            number, at = number + 1, end
            yield number, _object(row, number, path, what)
    if not number:
        raise WorkloadError(f"{what} {path} row 1: the list is empty; expected at least one row")


def _object(row: Any, number: int, path: Path, what: str) -> Row:
    if not isinstance(row, dict):
        raise WorkloadError(f"{what} {path} row {number} is of type {type(row).__name__}; expected an object")
    return row


def csv_rows(path: Path, what: str) -> Rows:
    """A CSV with a header, which is row 1; every value is text, its reader knows what it should be.

    Not by pyarrow: one of its threads that still reads ahead aborts a command that ends.
    """
    csv.field_size_limit(MAX_FIELD)
    rows, number = csv.DictReader((text for _, text in _texts(path, what, MAX_FIELD)), strict=True), 2
    try:
        for row in rows:
            if None in row or None in row.values() or len(row) > MAX_COLUMNS:
                raise csv.Error(f"expected as many values as columns, at most {MAX_COLUMNS:,}")
            yield number, {name: value or None for name, value in row.items()}
            number += 1
    except csv.Error as error:
        raise WorkloadError(f"{what} {path} row {number} is not CSV: {error}") from None


def _parquet(path: Path, what: str) -> Rows:
    from pyarrow import ArrowException, parquet

    number, n_bytes, most = 0, 0, max(SMALL, MOST_TIMES * path.stat().st_size)
    try:
        with parquet.ParquetFile(path) as file:
            if sum(file.metadata.row_group(k).total_byte_size for k in range(file.num_row_groups)) > most:
                raise OSError(TOO_DENSE)
            for batch in file.iter_batches(_BATCH):
                for values in zip(*batch.columns, strict=True):
                    row = {name: each.as_py() for name, each in zip(batch.schema.names, values, strict=True)}
                    n_bytes += sum(len(each) for each in row.values() if isinstance(each, str))
                    if n_bytes > most:
                        raise OSError(TOO_DENSE)
                    number += 1
                    yield number, row
    except (ArrowException, OSError) as error:
        why = str(error).splitlines()[0]
        raise WorkloadError(f"{what} {path} row {number + 1} cannot be read as Parquet: {why}") from None
    if not number:
        raise WorkloadError(f"{what} {path} row 1: the table is empty; expected at least one row")


def _of_library(source: str, path: Path, what: str, split: str | None) -> Rows:
    """A dataset that the `datasets` library has on disk, in its cache, or gets from its hub."""
    if not path.exists() and (path.suffix or source.startswith((".", "/", "~"))):
        raise WorkloadError(f"{what} {source}: no such file; expected a file, a folder or a dataset's name")
    if importlib.util.find_spec("datasets") is None:
        kind = "a folder" if path.is_dir() else "a dataset's name"
        why = "which needs the datasets library: pip install datasets"
        raise WorkloadError(f"{what} {source} is {kind}, {why}")
    import datasets

    datasets.disable_progress_bars()
    try:
        if path.is_dir() and any(path.glob("*dataset*.json")):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(source)
    except Exception as error:  # whatever the library makes of a missing name or network
        raise WorkloadError(f"{what} {source} cannot be loaded: {str(error).splitlines()[0]}") from None
    if isinstance(loaded, Mapping):
        if split is None and len(loaded) > 1:
            raise WorkloadError(
                f"{what} {source} has splits {', '.join(loaded)}: name one, e.g. --data "
                f"{source},split={next(iter(loaded))}"
            )
        name = split or next(iter(loaded))
        if name not in loaded:
            raise WorkloadError(f"--data: split={name}: {source} has {', '.join(loaded)}")
        loaded = loaded[name]
    return ((number, row) for number, row in enumerate(loaded, 1))
