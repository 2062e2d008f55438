"""Synthetic prompts: exactly the asked number of tokens, uniformly random, never a special id.

A prompt is made of segments. A segment is a key and a length, its ids are a function of seed, key and
position alone: two prompts share a prefix exactly as far as their segments have the same keys, and any prompt
can be drawn by itself, so that a plan of a million requests holds none of them in memory.

Every stream of randomness has a name and a generator of its own, so that adding one moves no other.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burstline.workloads.model_files import read_json
from burstline.workloads.request import GREEDY, Request, RequestKind, Sampling, WorkloadError


def rng(seed: int, name: str) -> np.random.Generator:
    """The generator of the stream `name` under `seed`; seed 0 is a seed like any other."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


N_SALT_TOK = 8
OF_GROUP: Final = 1 << 62
"""Added to a group's number, the key of a prefix that the group shares; a private segment has its index."""
OF_HASH: Final = 1 << 61
"""Added to the number of a trace's block hash, counted by first use."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The token ids that prompts are drawn from, ascending."""

    ids: NDArray[np.uint32]


def vocabulary_from_tokenizer(tokenizer: dict[str, Any], source: str) -> Vocabulary:
    """Every id of a parsed `tokenizer.json` but those of added and special tokens."""
    pieces = tokenizer.get("model", {}).get("vocab", {})
    # BPE and WordPiece map pieces to ids, Unigram lists [piece, score] in the order of ids.
    ids = set(pieces.values()) if isinstance(pieces, dict) else set(range(len(pieces)))
    ids -= {token["id"] for token in tokenizer.get("added_tokens", [])}
    if not ids:
        raise WorkloadError(f"{source} lists no ordinary tokens; expected a Hugging Face tokenizer.json")
    return Vocabulary(np.array(sorted(ids), dtype=np.uint32))


def vocabulary_from_size(n_ids: int) -> Vocabulary:
    """The middle of a vocabulary of which only the size is known.

    Special ids stand at the low end (Llama-2, Gemma, OPT: control tokens and bytes) or at the high end
    (Llama-3, Qwen, GPT-2); between an eighth and seven eighths no known tokenizer has one.
    """
    if n_ids < 16:
        raise WorkloadError(
            f"a vocabulary of {n_ids} ids is too small for synthetic prompts; expected 16 or more"
        )
    return Vocabulary(np.arange(n_ids // 8, n_ids * 7 // 8, dtype=np.uint32))


def vocabulary_of_folder(folder: Path) -> Vocabulary | None:
    """The ordinary ids of a model or tokenizer folder, None where it has neither tokenizer.json nor a size.

    Ids beyond the model's own `vocab_size` are left out: some tokenizers have more pieces than embeddings.
    """
    if not folder.is_dir():
        return None  # a name, or a file of weights
    size = read_json(folder / "config.json").get("vocab_size")
    tokenizer = read_json(folder / "tokenizer.json")
    if tokenizer:
        vocabulary = vocabulary_from_tokenizer(tokenizer, str(folder / "tokenizer.json"))
        if size is None:
            return vocabulary
        return Vocabulary(vocabulary.ids[vocabulary.ids < size].astype(np.uint32))
    return vocabulary_from_size(size) if size else None


ASSUMED: Final = vocabulary_from_size(32_000)
"""For plans that are never sent as ids."""
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_BATCH_TOK: Final = 1 << 14
"""Ids drawn per call: enough to amortise NumPy's overhead, few enough for the cache."""


class Stream:
    """Random ids by key and position: SplitMix64 (Steele, Lea, Flood 2014), a counter through a mixer.

    Unlike a generator of NumPy's it has no state to set up, which would cost more than a prompt.
    """

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._base = np.frombuffer(digest, "<u8", 1).astype(np.uint64)

    def ids(self, keys: ArrayLike, n_tok: ArrayLike, vocabulary: Vocabulary) -> NDArray[np.uint32]:
        """The first `n_tok` ids of each segment of `keys`, end to end, each uniform over the vocabulary."""
        segments = np.array(keys, dtype=np.int64, ndmin=1).astype(np.uint64)
        sizes = np.array(n_tok, dtype=np.int64, ndmin=1)
        begins = (np.cumsum(sizes) - sizes).astype(np.uint64)
        states = _mixed(self._base ^ _mixed(segments * _STEP)) - begins * _STEP
        x = np.arange(1, int(sizes.sum()) + 1, dtype=np.uint64) * _STEP
        x += np.repeat(states, sizes)
        # The upper 32 bits times the size: no division, and a bias below 2^-32 x size.
        picks = ((_mixed(x) >> np.uint64(32)) * np.uint64(len(vocabulary.ids))) >> np.uint64(32)
        return vocabulary.ids[picks.astype(np.int64)]


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What prompts are made of: those of request i are `starts[i] : starts[i + 1]` of `keys` and `n_tok`."""

    starts: NDArray[np.int64]
    keys: NDArray[np.int64]
    n_tok: NDArray[np.int64]

    def of(self, rows: NDArray[np.int64]) -> "Segments":
        """Those of some requests, in the order of `rows`."""
        n_each = self.starts[rows + 1] - self.starts[rows]
        starts = np.concatenate([[0], np.cumsum(n_each)])
        used = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], n_each)
        return Segments(starts, self.keys[used], self.n_tok[used])

    @property
    def families(self) -> NDArray[np.int64]:
        """The key that each request begins with."""
        return self.keys[self.starts[:-1]]


_ALL: Final[NDArray[np.int64]] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRequests(Sequence[Request]):
    """Synthetic requests, made when they are looked at: `rows` of the columns, in this order, or all.

    `numbers` are the indices in the plan. `segments` is None where every prompt is one private segment. A
    slice is a view.
    """

    numbers: NDArray[np.int64]
    n_prompt_tok: NDArray[np.int64]
    n_output_tok: NDArray[np.int64]
    vocabulary: Vocabulary
    seed: int
    segments: Segments | None = None
    ignore_eos: bool = True
    sampling: Sampling = GREEDY
    kind: RequestKind = RequestKind.GENERATE
    stage: str | None = None
    rows: NDArray[np.int64] = field(default_factory=lambda: _ALL)

    def __post_init__(self) -> None:
        if self.rows is _ALL:
            object.__setattr__(self, "rows", np.arange(len(self.numbers), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, item: int) -> Request: ...
    @overload
    def __getitem__(self, item: slice | NDArray[np.int64]) -> "DrawnRequests": ...
    def __getitem__(self, item: int | slice | NDArray[np.int64]) -> "Request | DrawnRequests":
        if isinstance(item, slice | np.ndarray):
            return replace(self, rows=self.rows[item])
        return next(self._made(self.rows[[item]], Stream(self.seed, "prompts")))

    def __iter__(self) -> Iterator[Request]:
        stream = Stream(self.seed, "prompts")
        batch = np.cumsum(self.column("n_prompt_tok")) // _BATCH_TOK
        for rows in np.split(self.rows, np.flatnonzero(np.diff(batch)) + 1):
            yield from self._made(rows, stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> NDArray[np.int64]:
        """`numbers` (the indices), `n_prompt_tok` or `n_output_tok` of every request, without making one."""
        values: NDArray[np.int64] = getattr(self, name)
        return values[self.rows]

    @property
    def n_tok(self) -> int:
        return int(self.column("n_prompt_tok").sum())

    def sha256(self) -> bytes:
        """Of what the prompts are drawn from."""
        drawn_by = f"splitmix64/{self.seed}/{self.ignore_eos}/{self.sampling}/{self.kind}"
        digest = hashlib.sha256(drawn_by.encode())
        digest.update(self.vocabulary.ids.tobytes())
        for name in ("numbers", "n_prompt_tok", "n_output_tok"):
            digest.update(self.column(name).tobytes())
        if self.segments is not None:
            starts = self.segments.starts
            for row in self.rows.tolist():
                part = slice(int(starts[row]), int(starts[row + 1]))
                digest.update(self.segments.keys[part].tobytes())
                digest.update(self.segments.n_tok[part].tobytes())
        return digest.digest()

    def _made(self, rows: NDArray[np.int64], stream: Stream) -> Iterator[Request]:
        """The requests of some rows, whose prompts are drawn at once."""
        n_prompt_tok = self.n_prompt_tok[rows]
        keys, sizes = self.numbers[rows], n_prompt_tok
        families: list[int | None] = [None] * len(rows)
        if self.segments is not None:
            segments = self.segments.of(rows)
            keys, sizes, families = segments.keys, segments.n_tok, segments.families.tolist()
        ids = stream.ids(keys, sizes, self.vocabulary).tobytes()
        begin = 0
        columns = (self.numbers[rows], n_prompt_tok, self.n_output_tok[rows])
        for index, n_tok, n_output_tok, family in zip(*(c.tolist() for c in columns), families, strict=True):
            end = begin + 4 * n_tok
            yield Request(
                index,
                array("I", ids[begin:end]),
                None,
                n_tok,
                n_output_tok,
                self.ignore_eos,
                self.sampling,
                self.kind,
                family,
                stage=self.stage,
            )
            begin = end


def salted(request: Request, salt: str, vocabulary: Vocabulary) -> Request:
    """The request with its first 8 ids overwritten by ids derived from `salt` and its family.

    The same salt gives the same bytes; another salt shares no prefix with any earlier run, so that no prefix
    cache can serve a repeat. Text prompts carry their salt in the text and are returned as they are, and so
    are verbatim prompts and the later turns of a session, which begin with an earlier turn's prompt.
    """
    later = request.turn is not None and bool(request.turn.after)
    if request.prompt_ids is None or request.verbatim or later:
        return request
    family = request.index if request.family is None else request.family
    digest = hashlib.sha256(f"{salt}/{family}".encode()).digest()
    picks = np.frombuffer(digest, dtype="<u4")[:N_SALT_TOK] % len(vocabulary.ids)
    ids = array("I", request.prompt_ids)
    n = min(N_SALT_TOK, len(ids))
    ids[:n] = array("I", vocabulary.ids[picks].astype(np.uint32).tobytes())[:n]
    return replace(request, prompt_ids=ids)
