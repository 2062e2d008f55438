"""A trace of PyTorch's profiler: Chrome JSON, plain or gzip, read event by event in bounded memory."""

import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from burstline.errors import RooflineError
from burstline.roofline.profile.composition import composition

MOST_STEPS: Final = 400
"""Of a longer trace only so many steps are kept, the first ones: a step is thousands of events."""
MOST_EVENTS: Final = 2_000_000
"""What so many steps have at most: some hundreds of MB."""
_CHUNK, _LONGEST = 1 << 20, 64 << 20
ENDINGS: Final = (".json", ".json.gz")


class TraceEvent(NamedTuple):
    """What counts of an event: the profiler's category, times in µs, the shapes of its inputs.

    `correlation` joins a launch and its kernels.
    """

    kind: str
    name: str
    thread: str
    begin_us: float
    us: float
    dims: tuple[tuple[int, ...], ...]
    dtype: str
    correlation: int | None

    @property
    def end_us(self) -> float:
        return self.begin_us + self.us


@dataclass(frozen=True, slots=True)
class ProfilerTrace:
    """One rank's events in the first of `n_steps` annotated steps, which are in the order of time."""

    path: Path
    steps: tuple[TraceEvent, ...]
    events: tuple[TraceEvent, ...]
    n_steps: int


def traces_at(path: Path) -> list[ProfilerTrace]:
    """The trace in a file, or those of a folder, one for each rank; RooflineError where there is none."""
    files = trace_files(path) if path.is_dir() else [path]
    if not files:
        raise RooflineError(f"{path} holds no trace: expected files that end with {' or '.join(ENDINGS)}")
    of_process = Counter(re.sub(r"\.\d{9,}\.", ".", file.name) for file in files)
    if name := next((name for name, n in of_process.items() if n > 1), None):
        raise RooflineError(
            f"{path} holds {of_process[name]} captures of one process ({name}): name one file"
        )
    return [_read(file) for file in files]


def trace_files(folder: Path) -> list[Path]:
    """The files in a folder that may be traces, by name."""
    return sorted(path for path in folder.glob("*") if path.name.endswith(ENDINGS))


def _read(path: Path) -> ProfilerTrace:
    """Twice: first for the steps, then for what happened in those that are kept."""
    # The engine marks the same steps on the GPU, in another category.
    steps = [event for row in _rows(path) if row.get("cat") == "user_annotation"
             and composition(str(row.get("name"))) and (event := _event(row))]  # fmt: skip
    steps.sort(key=lambda event: event.begin_us)
    begin_us = steps[0].begin_us if steps else float("-inf")
    end_us = steps[MOST_STEPS].begin_us if len(steps) > MOST_STEPS else float("inf")
    events = []
    for row in _rows(path):
        counts = row.get("cat") in KINDS or str(row.get("name")).startswith(COMPILED)
        event = _event(row) if counts else None
        if event and begin_us <= event.begin_us < end_us:
            events.append(event)
        if len(events) > MOST_EVENTS:
            raise RooflineError(f"{path} has more than {MOST_EVENTS:,} operators; record fewer steps")
    return ProfilerTrace(path, tuple(steps[:MOST_STEPS]), tuple(events), len(steps))


KINDS: Final = frozenset({"cpu_op", "kernel", "cuda_runtime", "cuda_driver"})
COMPILED: Final = "## Call CompiledFxGraph"
"""The annotation of a graph that torch.compile made, whose own kernels are no operators on a CPU."""
_DTYPES: Final = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8"}


def _event(row: dict[str, Any]) -> TraceEvent | None:
    """The parts that count; None for what is no interval of time."""
    if row.get("ph") != "X" or not isinstance(row.get("ts"), int | float):
        return None
    args = row["args"] if isinstance(row.get("args"), dict) else {}
    sizes = [size for size in args.get("Input Dims") or () if isinstance(size, list)]
    dims = tuple(tuple(size) for size in sizes if all(isinstance(n, int) for n in size))
    types = [_DTYPES.get(word, word) for word in args.get("Input type") or () if word] if dims else []
    name, kind = str(row.get("name")), str(row.get("cat"))
    words = sys.intern("cpu_op" if name.startswith(COMPILED) else kind), sys.intern(name)
    times, join = (float(row["ts"]), float(row.get("dur") or 0.0)), args.get("correlation")
    thread = sys.intern(f"{row.get('pid')}/{row.get('tid')}")
    correlation = join if isinstance(join, int) else None
    return TraceEvent(*words, thread, *times, dims, types[0] if types else "", correlation)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Each object of `traceEvents`, a chunk of the file in memory at a time.

    RooflineError, in one line, where the file is no whole trace.
    """
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    text, at, is_begun = "", 0, False
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            file = TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, "utf-8", "replace")
            while len(text) - at <= _LONGEST and (chunk := file.read(_CHUNK)):
                text, at = text[at:] + chunk, 0
                if not is_begun and (found := re.search(r'"traceEvents"\s*:\s*\[', text)):
                    is_begun, at = True, found.end()
                while is_begun:
                    at = cast("re.Match[str]", between.match(text, at)).end()
                    if text[at : at + 1] == "]":
                        return
                    try:
                        row, at = decode(text, at)
                    except json.JSONDecodeError:  # it goes on in the next chunk
                        break
                    if isinstance(row, dict):
                        yield row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RooflineError(f"{path} is cut or damaged ({error}); record it again") from None
    except OSError as error:
        raise RooflineError(f"{path} cannot be read: {error.strerror}; expected a PyTorch trace") from None
    if is_begun:
        raise RooflineError(f"{path} is cut: its events do not end; record it again")
    what = "expected the Chrome JSON that torch.profiler exports"
    raise RooflineError(f"{path} is no trace: it has no traceEvents; {what}")
