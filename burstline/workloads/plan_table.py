"""The plan as an Arrow table, the shape in which a run keeps it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from burstline.workloads.plan import MOST_IDS, Plan, Stage
from burstline.workloads.prompts import DrawnRequests, Segments, Vocabulary
from burstline.workloads.request import Request, RequestKind, Sampling, Turn

_Get = Callable[[Request], Any]
_COLUMNS: Final[dict[str, tuple[pa.DataType, _Get]]] = {
    "index": (pa.int64(), lambda r: r.index),
    "n_prompt_tok": (pa.int64(), lambda r: r.n_prompt_tok),
    "n_output_tok": (pa.int64(), lambda r: r.n_output_tok),
    "ignore_eos": (pa.bool_(), lambda r: r.ignore_eos),
    "temperature": (pa.float64(), lambda r: r.sampling.temperature),
    "top_p": (pa.float64(), lambda r: r.sampling.top_p),
    "sampling_seed": (pa.int64(), lambda r: r.sampling.seed),
    "prompt_text": (pa.string(), lambda r: r.prompt_text),
    "kind": (pa.string(), lambda r: str(r.kind)),
    "stage": (pa.string(), lambda r: r.stage),
    "family": (pa.int64(), lambda r: r.family),
    "verbatim": (pa.bool_(), lambda r: r.verbatim),
    "messages": (pa.string(), lambda r: r.messages),
    "documents": (pa.list_(pa.string()), lambda r: list(r.documents) or None),
    "session": (pa.int64(), lambda r: r.turn and r.turn.session),
    "turn": (pa.int64(), lambda r: r.turn and r.turn.number),
    "after": (pa.list_(pa.int64()), lambda r: r.turn and list(r.turn.after)),
    "pause_ns": (pa.int64(), lambda r: r.turn and r.turn.pause_ns),
}
"""Of each request: the column's type, and its value."""
PLAN: Final = pa.schema(
    {
        "due_ns": pa.int64(),
        **{name: kind for name, (kind, _) in _COLUMNS.items()},
        "segment_keys": pa.list_(pa.int64()),
        "segment_tok": pa.list_(pa.int64()),
        "prompt_ids": pa.list_(pa.uint32()),
    }
)
WITHOUT_PROMPTS: Final = ["due_ns", *_COLUMNS]
_N_OF_PART = 1000


def plan_tables(plan: Plan, n_at_once: int = 10_000) -> Iterator[pa.Table]:
    """The plan's requests, then those of its stages, `n_at_once` rows a table.

    Its seed, its hash and what drawn prompts are drawn from stand in the schema's metadata.
    """
    schema = PLAN.with_metadata(_metadata(plan))
    with_ids = not _is_drawn(plan)
    parts = [(plan.requests, plan.due_ns), *((stage.requests, stage.due_ns) for stage in plan.stages)]
    empty = True
    for requests, due_ns in parts:
        for start in range(0, len(requests), n_at_once):
            part = requests[start : start + n_at_once]
            due = np.frombuffer(due_ns, dtype=np.int64)[start : start + n_at_once]
            empty = False
            if isinstance(part, DrawnRequests) and not with_ids:
                yield _drawn_table(part, due, schema)
            else:
                yield _table(part, due, schema)
    if empty:
        yield schema.empty_table()


def plan_of_table(table: pa.Table) -> Plan:
    """The plan back, byte for byte."""
    metadata = table.schema.metadata
    drawn = json.loads(metadata.get(b"drawn", b"null"))
    parts: list[Stage] = []
    begin = 0
    for name, same in groupby(table.column("stage").to_pylist()):
        n = len(list(same))
        rows = table.slice(begin, n)
        due_ns = array("q", rows.column("due_ns").to_numpy().tobytes())
        requests = _drawn_back(rows, drawn, name) if drawn else tuple(_made(rows, _prompt_ids(rows)))
        parts.append(Stage(name or "", requests, due_ns))
        begin += n
    main = parts.pop(0) if parts and not parts[0].name else Stage("", (), array("q"))
    return Plan(
        main.requests,
        main.due_ns,
        int(metadata[b"seed"]),
        metadata[b"sha256"].decode(),
        tuple(parts),
        contents_sha256=metadata[b"contents"].decode() if b"contents" in metadata else None,
    )


class PlannedRequests(Sequence[Request]):
    """The requests of a table, for judging replies: empty `prompt_ids` stand for ids, None for other prompts.

    They are made some at a time when they are looked at: of a long plan most may never have been sent.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._part = lru_cache(64)(self._of_part)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, k: Any) -> Any:
        return self._part(k // _N_OF_PART)[k % _N_OF_PART]

    def _of_part(self, part: int) -> list[Request]:
        table = self.table.slice(part * _N_OF_PART, _N_OF_PART)
        texts, chats = (table.column(name).is_valid().to_pylist() for name in ("prompt_text", "messages"))
        return list(_made(table, (None if any(one) else () for one in zip(texts, chats, strict=True))))


def _is_drawn(plan: Plan) -> bool:
    return isinstance(plan.requests, DrawnRequests) and plan.requests.n_tok > MOST_IDS


def _metadata(plan: Plan) -> dict[str, str]:
    metadata = {"seed": str(plan.seed), "sha256": plan.sha256}
    if plan.contents_sha256 is not None:
        metadata["contents"] = plan.contents_sha256
    requests = plan.requests
    if isinstance(requests, DrawnRequests) and _is_drawn(plan):
        ids = requests.vocabulary.ids.astype(np.int64)
        breaks = np.flatnonzero(np.diff(ids) != 1)
        begins, ends = ids[np.concatenate([[0], breaks + 1])], ids[np.concatenate([breaks, [len(ids) - 1]])]
        vocabulary = np.stack([begins, ends], axis=1).tolist()
        metadata["drawn"] = json.dumps({"seed": requests.seed, "vocabulary": vocabulary})
    return metadata


def _table(requests: Sequence[Request], due_ns: NDArray[np.int64], schema: pa.Schema) -> pa.Table:
    requests = list(requests)
    columns = {name: [of(r) for r in requests] for name, (_, of) in _COLUMNS.items()}
    return _arrow({**columns, "due_ns": due_ns, "prompt_ids": _id_lists(requests)}, len(requests), schema)


def _arrow(columns: Mapping[str, Any], n: int, schema: pa.Schema) -> pa.Table:
    """A table of arrays, lists and single values; what is not given is null."""
    arrays = []
    for field in PLAN:
        value = columns.get(field.name)
        if value is None or isinstance(value, str | int | float):
            value = [value] * n
        arrays.append(value if isinstance(value, pa.Array) else pa.array(value, field.type))
    return pa.table(arrays, schema=schema)


def _drawn_table(requests: DrawnRequests, due_ns: NDArray[np.int64], schema: pa.Schema) -> pa.Table:
    """Rows of drawn requests whose prompts are not made: but for the numbers they are all like the first."""
    first = requests[0]
    columns = {name: of(first) for name, (_, of) in _COLUMNS.items()}
    columns |= {"due_ns": due_ns, "index": requests.column("numbers")}
    columns |= {name: requests.column(name) for name in ("n_prompt_tok", "n_output_tok")}
    if requests.segments is not None:
        segments = requests.segments.of(requests.rows)
        starts = pa.array(segments.starts, pa.int32())
        columns["segment_keys"] = pa.ListArray.from_arrays(starts, pa.array(segments.keys))
        columns["segment_tok"] = pa.ListArray.from_arrays(starts, pa.array(segments.n_tok))
        columns["family"] = segments.families
    return _arrow(columns, len(requests), schema)


def _drawn_back(rows: pa.Table, drawn: dict[str, Any], stage: str | None) -> DrawnRequests:
    ranges = [np.arange(a, b + 1, dtype=np.uint32) for a, b in drawn["vocabulary"]]
    vocabulary = Vocabulary(np.concatenate(ranges))
    segments = None
    if len(rows) and rows.column("segment_keys").null_count == 0:
        keys, n_tok = (rows.column(name).combine_chunks() for name in ("segment_keys", "segment_tok"))
        sizes = keys.value_lengths().to_numpy()
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        segments = Segments(starts, keys.flatten().to_numpy(), n_tok.flatten().to_numpy())
    first = rows.slice(0, 1).to_pylist()[0]
    return DrawnRequests(
        rows.column("index").to_numpy(),
        rows.column("n_prompt_tok").to_numpy(),
        rows.column("n_output_tok").to_numpy(),
        vocabulary,
        int(drawn["seed"]),
        segments,
        ignore_eos=first["ignore_eos"],
        sampling=Sampling(first["temperature"], first["top_p"], first["sampling_seed"]),
        kind=RequestKind(first["kind"]),
        stage=stage,
    )


def _made(table: pa.Table, prompts: Iterable[Sequence[int] | None]) -> Iterator[Request]:
    for ids, row in zip(prompts, table.select([*_COLUMNS]).to_pylist(), strict=True):
        sampling = Sampling(row.pop("temperature"), row.pop("top_p"), row.pop("sampling_seed"))
        session, number, after, pause_ns = map(row.pop, ("session", "turn", "after", "pause_ns"))
        turn = None if session is None else Turn(session, number, tuple(after), pause_ns)
        row |= {"kind": RequestKind(row["kind"]), "documents": tuple(row["documents"] or ())}
        yield Request(**row, prompt_ids=ids, sampling=sampling, turn=turn)


def _id_lists(requests: Sequence[Request]) -> pa.Array:
    prompts = [np.asarray(() if r.prompt_ids is None else r.prompt_ids, np.uint32) for r in requests]
    ends = np.cumsum([0, *map(len, prompts)], dtype=np.int32)
    values = pa.array(np.concatenate(prompts) if prompts else np.empty(0, np.uint32))
    # A list whose offset is null is null; a mask would say the same, and import pyarrow.compute (50 ms).
    absent = np.array([*(request.prompt_ids is None for request in requests), False])
    return pa.ListArray.from_arrays(pa.array(ends, mask=absent), values)


def _prompt_ids(table: pa.Table) -> Iterator[array[int] | None]:
    lists = table.column("prompt_ids").combine_chunks()
    offsets = lists.offsets.to_numpy()
    values = lists.values.to_numpy()
    for start, end, valid in zip(offsets, offsets[1:], lists.is_valid().to_pylist(), strict=False):
        yield array("I", values[start:end].tobytes()) if valid else None
