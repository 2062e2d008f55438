"""A trace of PyTorch's profiler: Chrome JSON, plain or gzip, read event by event in bounded memory.

What each of its steps computed, as its annotation says, and whether the load's records imply it.
"""

import gzip
import json
import re
import sys
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from burstline.dtypes import SHORT
from burstline.errors import RooflineError

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
        raise RooflineError(f"{path} holds {of_process[name]} captures of one process, {name}: name one")
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


def _event(row: dict[str, Any]) -> TraceEvent | None:
    """The parts that count; None for what is no interval of time."""
    if row.get("ph") != "X" or not isinstance(row.get("ts"), int | float):
        return None
    args = row["args"] if isinstance(row.get("args"), dict) else {}
    sizes = [size for size in args.get("Input Dims") or () if isinstance(size, list)]
    dims = tuple(tuple(size) for size in sizes if all(isinstance(n, int) for n in size))
    said = (args.get("Input type") or ()) if dims else ()
    types = [SHORT.get(word.removeprefix("c10::").lower(), word) for word in said if word]
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


_VLLM = re.compile(
    r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)(?:sk(\d+)\w*)?\)"
    r"_generation_(\d+)\((?:sq)?(\d+)(?:sk(\d+)\w*)?\)"
)
_SGLANG = re.compile(r"step\[(EXTEND|DECODE|MIXED) bs=(\d+)(.*)\]")


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of a step: how many, their new tokens, and the sum of their contexts (None: not said)."""

    n_requests: int = 0
    n_tok: int = 0
    context_tok: int | None = None

    def __str__(self) -> str:
        context = "" if self.context_tok is None else f", context {self.context_tok:,}"
        return f"(requests {self.n_requests:,}, tokens {self.n_tok:,}{context})"

    def agrees(self, other: "Group") -> bool:
        """Whether both are the same; contexts only where both are known."""
        contexts = {self.context_tok, other.context_tok} - {None}
        return (self.n_requests, self.n_tok) == (other.n_requests, other.n_tok) and len(contexts) < 2


@dataclass(frozen=True, slots=True)
class SentRequest:
    prompt_tok: int
    output_tok: int


def composition(name: str) -> tuple[Group, Group] | None:
    """Prompts and decodes of a step, as the annotation of vLLM's or SGLang's worker has them; else None."""
    if found := _VLLM.fullmatch(name):
        prompts, tok, context, decodes, more, contexts = (int(n) if n else None for n in found.groups())
        return Group(prompts or 0, tok or 0, context), Group(decodes or 0, more or 0, contexts)
    if not (found := _SGLANG.fullmatch(name)):
        return None
    n, said = int(found[2]), {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", found[3])}
    if found[1] == "DECODE":
        return Group(), Group(n, said.get("g_sq", n), said.get("g_sk"))
    n_decodes = said.get("g", 0)
    entering = Group(said.get("c", n), said.get("toks", said.get("c_sq", 0)), said.get("c_sk"))
    return entering, Group(n_decodes, said.get("g_sq", n_decodes), said.get("g_sk"))


def first_difference(steps: Sequence[tuple[Group, Group]], sent: Sequence[SentRequest]) -> str | None:
    """The first step whose prompts and decodes are not those of the requests sent; None where none is known.

    The requests, in the order of their first tokens, are replayed: each that has its first token decodes one
    more in every step that decodes at all. A prompt is computed in one step, or in chunks by several; what a
    prefix cache had of it is in its context, but in no step.
    """
    if any(decodes.n_tok != decodes.n_requests for _, decodes in steps):
        return None  # speculation: no record says how many of a step's draft tokens were accepted
    waiting = deque((one, one.prompt_tok) for one in sent)  # and its tokens that no step has computed yet
    running: list[tuple[int, int]] = []  # context, and tokens still to be decoded
    for k, (prompts, decodes) in enumerate(steps, start=1):
        if decodes.n_requests:
            due = Group(len(running), len(running), sum(context for context, _ in running))
            if not decodes.agrees(due):
                return f"step {k:,} decodes {decodes}, but by the load's records {due}"
            running = [(context + 1, left - 1) for context, left in running if left > 1]
        if prompts.n_requests:
            entering = [waiting.popleft() for _ in range(min(prompts.n_requests, len(waiting)))]
            due = Group(
                len(entering), sum(left for _, left in entering), sum(e.prompt_tok for e, _ in entering)
            )
            behind_tok = due.n_tok - prompts.n_tok
            if prompts.context_tok is not None:
                behind_tok = sum(e.prompt_tok for e, _ in entering) - prompts.context_tok
            fits = prompts.n_requests == due.n_requests and 0 <= behind_tok < entering[-1][1]
            if not fits or prompts.n_tok > due.n_tok - behind_tok:
                return f"step {k:,} computes prompts {prompts}, but by the load's records {due}"
            if behind_tok:
                waiting.appendleft((entering.pop()[0], behind_tok))
            running += [(e.prompt_tok + 1, e.output_tok - 1) for e, _ in entering if e.output_tok > 1]
    return None
