"""Recorded loads: arrival time, length and shared prefixes of each request, in the formats of `traces.toml`.

Prompts are synthesised to the recorded lengths; equal hashes become equal tokens.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.lengths import MAX_TOK
from burstline.workloads.prompts import OF_HASH, DrawnRequests, Segments, Vocabulary
from burstline.workloads.request import WorkloadError
from burstline.workloads.rows import Row, names_in, number_in, read_rows


@dataclass(frozen=True, slots=True)
class _Format:
    """One format: its columns, how its times are written, what else it has."""

    title: str
    time: str
    prompt: str
    output: str
    unit_s: float | None = None  # None: a date
    block_tok: int = 0
    sign: str | None = None


_FORMATS: Final = tuple(
    _Format(title, **row)
    for title, row in tomllib.loads(Path(__file__).with_name("traces.toml").read_text("utf-8")).items()
)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded load. `at_s` ascends from the trace's own first request; `dropped` counts rows by reason.

    `hashes` are the keys of the blocks of all prompts in a row, those of request i being
    `starts[i] : starts[i + 1]`, each of `block_tok[i]` tokens but the last.
    """

    title: str
    at_s: NDArray[np.float64]
    n_prompt_tok: NDArray[np.int64]
    n_output_tok: NDArray[np.int64]
    hashes: NDArray[np.int64]
    starts: NDArray[np.int64]
    block_tok: NDArray[np.int64]
    dropped: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.at_s)

    def window(self, begin_s: float, end_s: float, n: int | None = None) -> "Trace":
        """The first n requests of [begin_s, end_s), with times counted from `begin_s`."""
        low, high = np.searchsorted(self.at_s, [begin_s, end_s])
        high = high if n is None else min(high, low + n)
        if low >= high:
            what = f"window={begin_s:g}..{end_s:g}: the trace has no request there"
            raise WorkloadError(f"--trace: {what}; it lasts {self.at_s[-1]:g} s")
        part = slice(int(low), int(high))
        starts = self.starts[int(low) : int(high) + 1]
        at_s, block_tok = self.at_s[part] - begin_s, self.block_tok[part]
        n_prompt, n_output = self.n_prompt_tok[part], self.n_output_tok[part]
        return Trace(self.title, at_s, n_prompt, n_output, self.hashes, starts, block_tok, self.dropped)

    def requests(self, vocabulary: Vocabulary, seed: int) -> DrawnRequests:
        """A request for each, with prompts of the recorded lengths and prefixes."""
        index = np.arange(len(self), dtype=np.int64)
        lengths = (self.n_prompt_tok, self.n_output_tok)
        return DrawnRequests(index, *lengths, vocabulary, seed, self._segments())

    def _segments(self) -> Segments | None:
        """Blocks by hash, then what no hash covers; None where no request has a hash."""
        if self.starts[-1] == self.starts[0]:
            return None
        n_blocks, ends = np.diff(self.starts), self.starts[1:] - self.starts[0]
        rest = self.n_prompt_tok - n_blocks * self.block_tok  # below 0: of the last block only a part
        sizes = np.repeat(self.block_tok, n_blocks)
        sizes[ends[n_blocks > 0] - 1] += np.minimum(rest, 0)[n_blocks > 0]
        own, hashes = rest > 0, self.hashes[self.starts[0] : self.starts[-1]]
        keys = np.insert(hashes, ends[own], np.flatnonzero(own))
        starts = np.concatenate([[0], np.cumsum(n_blocks + own)])
        return Segments(starts, keys, np.insert(sizes, ends[own], rest[own]))


def read_trace(source: str) -> Trace:
    """The trace in a file; WorkloadError, naming the row, where it is none of the formats above."""
    rows = read_rows(source, "--trace")
    first = next(rows, None)
    if first is None:
        raise WorkloadError(f"--trace {source} row 1: there is only a header; expected at least one row")
    form, number = _format_of(first[1], source, first[0]), first[0]
    kept: list[tuple[int, Any, int, int, list[int], int]] = []
    numbered: dict[int | str, int] = {}
    dropped: Counter[str] = Counter()
    for number, row in chain([first], rows):
        where = f"--trace {source} row {number}"
        n_prompt, n_output = _count(row, form.prompt, where), _count(row, form.output, where)
        if not n_prompt or not n_output:
            dropped["no prompt tokens" if not n_prompt else "no output tokens (a failed request)"] += 1
            continue
        blocks, size = _hashes(row, form, n_prompt, where)
        keys = [OF_HASH + numbered.setdefault(block, len(numbered)) for block in blocks]
        kept.append((number, _time(row, form, where), n_prompt, n_output, keys, size))
    if not kept:
        raise WorkloadError(f"--trace {source} row {number}: no row has both prompt and output tokens")
    numbers, times, prompt_tok, output_tok, hashes, block_tok = zip(*kept, strict=True)
    at_s = _ascending(_seconds(times, numbers, form, source), numbers, source)
    ends = np.cumsum([0, *map(len, hashes)], dtype=np.int64)
    flat = np.array(list(chain.from_iterable(hashes)), dtype=np.int64)
    n_prompts, n_outputs, sizes = (np.array(each, np.int64) for each in (prompt_tok, output_tok, block_tok))
    return Trace(form.title, at_s - at_s[0], n_prompts, n_outputs, flat, ends, sizes, dict(dropped))


def _format_of(row: Row, source: str, number: int) -> _Format:
    for form in _FORMATS:
        if all(name in row for name in (form.time, form.prompt, form.output, form.sign or form.time)):
            return form
    known = "; ".join(f"{form.title}: {form.time}, {form.prompt}, {form.output}" for form in _FORMATS)
    raise WorkloadError(
        f"--trace {source} row {number} has columns {names_in(row)}; expected those of {known}"
    )


def _count(row: Row, name: str, where: str) -> int:
    value, number = row.get(name), number_in(row.get(name))
    if not number.is_integer() or not 0 <= number <= MAX_TOK:
        raise WorkloadError(f"{where}: {name} is {value!r:.60}; expected a whole number of tokens")
    return int(number)


def _time(row: Row, form: _Format, where: str) -> Any:
    value = row.get(form.time)
    if form.unit_s is None:
        return value
    number = number_in(value)
    if not 0 <= number < math.inf:
        raise WorkloadError(f"{where}: {form.time} is {value!r:.60}; expected a number, no time before 0")
    return number * form.unit_s


def _seconds(times: Sequence[Any], numbers: Sequence[int], form: _Format, source: str) -> NDArray[np.float64]:
    if form.unit_s is not None:
        return np.array(times, dtype=np.float64)
    import pandas as pd  # here: half a second that only dates need

    parsed = pd.to_datetime(pd.Series(times), format="ISO8601", utc=True, errors="coerce")
    if parsed.isna().any():
        bad = int(parsed.isna().to_numpy().argmax())
        what = f"{form.time} is {times[bad]!r:.60}; expected a date and time (ISO 8601)"
        raise WorkloadError(f"--trace {source} row {numbers[bad]}: {what}")
    since = parsed - parsed.iloc[0]
    return np.asarray(since.dt.total_seconds(), dtype=np.float64)


def _ascending(at_s: NDArray[np.float64], numbers: Sequence[int], source: str) -> NDArray[np.float64]:
    back = np.flatnonzero(np.diff(at_s) < 0)
    if len(back):
        k = int(back[0])
        raise WorkloadError(
            f"--trace {source} row {numbers[k + 1]} is {at_s[k] - at_s[k + 1]:g} s earlier than row "
            f"{numbers[k]}; expected ascending times, sort the file"
        )
    return at_s


def _hashes(row: Row, form: _Format, n_prompt_tok: int, where: str) -> tuple[list[int | str], int]:
    """The hashes of the prompt's blocks, and how many tokens a block has."""
    block_tok, given = form.block_tok, row.get("hash_ids")
    if not block_tok or given is None:
        return [], max(block_tok, 1)
    if row.get("block_tokens") is not None:
        block_tok = _count(row, "block_tokens", where)
    if not isinstance(given, list) or any(type(k) not in (int, str) for k in given) or not block_tok:
        raise WorkloadError(
            f"{where}: hash_ids is {str(given)[:60]!r}; expected a list of whole numbers (64 bits) or texts"
        )
    most = -(-n_prompt_tok // block_tok)
    if len(given) > most:
        raise WorkloadError(
            f"{where}: {len(given)} hash_ids of {block_tok} tokens for a prompt of {n_prompt_tok}; "
            f"expected at most {most}"
        )
    return given, block_tok
