"""What a load consists of, whatever its source: synthetic requests, rows of data, a trace, sessions.

Every kind of work answers the same questions before a server is there (how many, how long, when due) and
becomes a plan once it is known what the server takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.arrivals import Arrivals
from burstline.workloads.data_sets import DataSet, Item, Materials, data_requests
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Plan, Shape, due_ns_of, make_plan, plan_of
from burstline.workloads.prefixes import BLOCK_TOK
from burstline.workloads.prompts import DrawnRequests, Vocabulary
from burstline.workloads.request import RequestKind, WorkloadError
from burstline.workloads.seeds import rng
from burstline.workloads.sessions import SessionShape, drawn_sessions, written_sessions
from burstline.workloads.traces import Trace


@dataclass(frozen=True, slots=True)
class Server:
    """What planning needs to know of the server: which ids it takes, and the size of its cache blocks.

    `materials` are needed for text alone, `max_tok` bounds prompt and output together.
    """

    vocabulary: Vocabulary
    materials: Materials | None = None
    block_tok: int = BLOCK_TOK
    max_tok: int | None = None


class Work(Protocol):
    """`shape` is what the requests are like, also where that is only their range; `title` and `name` say what
    one of them is, for people and for folders; `needs_text` that a tokenizer must count it."""

    @property
    def shape(self) -> Shape: ...
    @property
    def title(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def needs_text(self) -> bool: ...
    def plan(self, arrivals: Arrivals, server: Server, seed: int) -> Plan:
        """The plan, rows that did not fit counted in it."""
        ...


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts of the asked lengths."""

    shape: Shape
    needs_text: bool = False

    @property
    def title(self) -> str:
        if self.shape.kind is RequestKind.EMBED:
            return f"embeddings of {self.shape.prompt_tok} tokens"
        text = f"{self.shape.prompt_tok} → {self.shape.output_tok} tokens"
        return f"{text}, {self.shape.sharing}" if self.shape.sharing else text

    @property
    def name(self) -> str:
        if self.shape.kind is RequestKind.EMBED:
            return f"{self.shape.prompt_tok}-embed"
        return f"{self.shape.prompt_tok}-{self.shape.output_tok}"

    def plan(self, arrivals: Arrivals, server: Server, seed: int) -> Plan:
        due_s = arrivals.due_s(rng(seed, "arrivals"))
        plan = make_plan(self.shape, due_s, server.vocabulary, seed, server.block_tok)
        longest = _longest(plan)
        if server.max_tok is not None and longest > server.max_tok:
            raise WorkloadError(
                f"--prompt-tokens {self.shape.prompt_tok} and --output-tokens {self.shape.output_tok} make "
                f"{longest} tokens, but the model's limit is {server.max_tok}; ask for fewer, or raise "
                "its limit"
            )
        return plan


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace: lengths, times and prefixes as recorded, prompts synthetic."""

    trace: Trace
    speed: float = 1.0
    needs_text: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(_range(self.trace.n_prompt_tok), _range(self.trace.n_output_tok))

    @property
    def title(self) -> str:
        speed = f" at {self.speed:g} times its speed" if self.speed != 1 else ""
        return f"{self.trace.title} trace{speed}"

    @property
    def name(self) -> str:
        return f"{self.trace.title.lower()}-trace"

    def plan(self, arrivals: Arrivals, server: Server, seed: int) -> Plan:
        trace, dropped = self.trace, dict(self.trace.dropped)
        due_s = arrivals.due_s(rng(seed, "arrivals"))
        requests = trace.requests(server.vocabulary, seed)
        if server.max_tok is not None:
            fits = trace.n_prompt_tok + trace.n_output_tok <= server.max_tok
            if not fits.any():
                raise WorkloadError(f"--trace: no request fits the model's limit of {server.max_tok} tokens")
            if not fits.all():
                dropped[f"longer than the model's limit of {server.max_tok:,} tokens"] = int((~fits).sum())
                requests = replace(requests, rows=np.flatnonzero(fits), numbers=np.cumsum(fits) - 1)
                due_s = due_s[fits]
        return replace(plan_of(requests, due_ns_of(due_s), seed), dropped=dropped)


@dataclass(frozen=True, slots=True)
class Written:
    """Rows of a data set, in the order in which they are used; of `n_wanted` at most so many.

    `timed`: each is due at its own time.
    """

    data: DataSet
    items: tuple[Item, ...]
    n_wanted: int | None
    output_tok: Lengths
    kind: RequestKind = RequestKind.GENERATE
    timed: bool = False
    needs_text: bool = True

    @property
    def shape(self) -> Shape:
        return _shape_of(self.items, self.output_tok)

    @property
    def title(self) -> str:
        return f"rows of {self.name}"

    @property
    def name(self) -> str:
        return self.data.source.rstrip("/").rsplit("/", 1)[-1]

    def plan(self, arrivals: Arrivals, server: Server, seed: int) -> Plan:
        assert server.materials is not None
        materials = replace(server.materials, kind=self.kind, output_tok=self.output_tok)
        requests, used, dropped = data_requests(self.items, materials, self.n_wanted, seed)
        _check_enough(self.data, len(requests), self.n_wanted, dropped)
        due_s = arrivals.due_s(rng(seed, "arrivals"))[: len(requests)]
        if self.timed:
            at_s = np.array([item.at_s for item in used], dtype=np.float64)
            due_s = at_s - at_s[0]
        total = Counter(self.data.dropped) + dropped
        return replace(plan_of(tuple(requests), due_ns_of(due_s), seed), dropped=total)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations of several turns: synthetic ones, or those in a data set."""

    session: SessionShape
    data: DataSet | None = None
    items: tuple[Item, ...] = ()
    n_wanted: int | None = None

    @property
    def needs_text(self) -> bool:
        return self.data is not None

    @property
    def shape(self) -> Shape:
        if self.items:
            return _shape_of(self.items, self.session.output_tok)
        return Shape(self.session.prompt_tok, self.session.output_tok)

    @property
    def title(self) -> str:
        return f"sessions of {self.session if self.data is None else self.data.source.rsplit('/', 1)[-1]}"

    @property
    def name(self) -> str:
        return "sessions" if self.data is None else f"sessions-{self.data.source.rsplit('/', 1)[-1]}"

    def plan(self, arrivals: Arrivals, server: Server, seed: int) -> Plan:
        due_s = arrivals.due_s(rng(seed, "arrivals"))
        if self.data is None:
            requests, of, dropped = drawn_sessions(
                self.session, len(due_s), server.vocabulary, seed, server.max_tok
            )
        else:
            assert server.materials is not None
            materials = replace(server.materials, output_tok=self.session.output_tok)
            requests, of, dropped = written_sessions(
                self.items, materials, self.n_wanted, self.session.think_ms, seed
            )
            _check_enough(self.data, int(of.max()) + 1, self.n_wanted, dropped)
            dropped = Counter(self.data.dropped) + dropped
        return replace(plan_of(requests, due_ns_of(due_s[of]), seed), dropped=dropped)


def _check_enough(data: DataSet, n: int, n_wanted: int | None, dropped: Counter[str]) -> None:
    reasons = "; ".join(f"{k:,} {reason}" for reason, k in (Counter(data.dropped) + dropped).items())
    if not n:
        raise WorkloadError(f"--data {data.source}: no row fits: {reasons}")
    if n_wanted is not None and n < n_wanted:
        raise WorkloadError(
            f"--data {data.source}: {n_wanted} asked, but only {n} of {data.n_rows} rows fit"
            f"{f' ({reasons})' if reasons else ''}; lower --requests"
        )


def _shape_of(items: Sequence[Item], output_tok: Lengths) -> Shape:
    """About: a token for every four characters, for the certificate's load alone."""
    sizes = np.array([max(1, len(i.prompt or str(i.messages)) // 4) for i in items], dtype=np.int64)
    outputs = [item.output_tok or len(item.reply or "") // 4 for item in items]
    return Shape(_range(sizes), _range(np.array([n for n in outputs if n] or [output_tok.high], np.int64)))


def _longest(plan: Plan) -> int:
    requests = plan.requests
    assert isinstance(requests, DrawnRequests)
    return int((requests.column("n_prompt_tok") + requests.column("n_output_tok")).max(initial=0))


def _range(values: NDArray[np.int64]) -> Lengths:
    return Lengths(max(1, int(np.min(values))), max(1, int(np.max(values))))
