"""The requests of a load, whatever its source: synthetic requests, rows of data, a trace, sessions.

Sessions are conversations: turns that follow each other's live replies, with think times. What a turn adds,
how long its reply is and how long the user thinks are planned; the replies are the server's own and come into
the next prompt as they are. A turn names the turns that must have ended before it.

Every kind of work answers the same questions before a server is there (how many, how long, when due) and
becomes a plan once it is known what the server takes.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.arrivals import Arrivals
from burstline.workloads.data_sets import DataSet, Item, Server, as_plain_text, data_requests, prompted
from burstline.workloads.due_times import due_times
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Plan, Shape, make_plan, plan_of
from burstline.workloads.prompts import DrawnRequests, Stream, Vocabulary, rng
from burstline.workloads.request import Request, RequestKind, Turn, WorkloadError
from burstline.workloads.traces import Trace

NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Sessions in numbers. The first turn brings `prompt_tok` tokens, each later one `turn_tok`.

    Between a reply's end and the next turn the user thinks for `think_ms`.
    """

    turns: Lengths
    prompt_tok: Lengths
    turn_tok: Lengths
    output_tok: Lengths
    think_ms: Lengths

    @property
    def longest_tok(self) -> int:
        """The most tokens that a session may come to."""
        n = self.turns.high
        return self.prompt_tok.high + (n - 1) * self.turn_tok.high + n * self.output_tok.high

    def __str__(self) -> str:
        return f"{self.turns} turns, {self.prompt_tok} + {self.turn_tok} → {self.output_tok} tokens"


def drawn_sessions(
    shape: SessionShape, n: int, vocabulary: Vocabulary, seed: int, max_tok: int | None = None
) -> tuple[tuple[Request, ...], NDArray[np.int64], Counter[str]]:
    """The turns of n synthetic sessions, the session of each, and what was cut off, by reason.

    Turns of one session stand together, each after those that it follows.
    """
    n_turns = shape.turns.draw(n, rng(seed, "turns"))
    n_all = int(n_turns.sum())
    pause_ns = shape.think_ms.draw(n_all, rng(seed, "think times")) * NS_PER_MS
    prompt_tok = shape.prompt_tok.draw(n_all, rng(seed, "prompt lengths"))
    turn_tok = shape.turn_tok.draw(n_all, rng(seed, "turn lengths"))
    output_tok = shape.output_tok.draw(n_all, rng(seed, "output lengths"))
    stream, requests, dropped = Stream(seed, "prompts"), list[Request](), Counter[str]()
    at = 0
    for session, n_own in enumerate(n_turns.tolist()):
        first, total = len(requests), 0
        for number in range(n_own):
            k, index = at + number, first + number
            n_new, n_output = int(turn_tok[k] if number else prompt_tok[session]), int(output_tok[k])
            before = total + requests[-1].n_output_tok if number else 0
            if max_tok is not None and before + n_new + n_output > max_tok:
                dropped[f"turns beyond the model's limit of {max_tok:,} tokens"] += n_own - number
                break
            total = before + n_new
            after, pause = ((index - 1,), int(pause_ns[k])) if number else ((), 0)
            turn = Turn(session, number, after, pause)
            ids = array("I", stream.ids(index, n_new, vocabulary).tobytes())
            requests.append(Request(index, ids, None, total, n_output, turn=turn))
        at += n_own
    return tuple(requests), _sessions(requests, max_tok), dropped


def _sessions(requests: Sequence[Request], max_tok: int | None) -> NDArray[np.int64]:
    if not requests:
        raise WorkloadError(f"no session's first turn fits the model's limit of {max_tok} tokens")
    return np.array([r.turn.session for r in requests if r.turn], dtype=np.int64)


def written_sessions(
    items: Sequence[Item], server: Server, n: int | None, shape: SessionShape, seed: int
) -> tuple[tuple[Request, ...], NDArray[np.int64], Counter[str]]:
    """Sessions out of rows: those with one `session` are its turns; a chat of several turns is one itself."""
    requests, dropped, session = list[Request](), Counter[str](), 0
    think = rng(seed, "think times")
    # Rows of one session stand together.
    for _, rows in groupby(items, lambda item: item.row if item.session is None else item.session):
        if session == n:
            break
        turns = [turn for item in rows for turn in _turns_of(item)]
        if server.template is None and not server.speaks_chat:
            turns = [as_plain_text(item) for item in turns]
        first, n_context = len(requests), 0
        for number, item in enumerate(turns):
            ids = None
            if item.prompt is not None:
                ids = server.ids_of([item.prompt], whole=number == 0)[0]
            n_reply = len(server.ids_of([item.reply or ""])[0])
            n_output = item.output_tok or n_reply or int(shape.output_tok.draw(1, think)[0])
            n_context += len(ids or ())
            if server.max_tok is not None and n_context + n_output > server.max_tok:
                n_left = len(turns) - number
                dropped[f"turns beyond the model's limit of {server.max_tok:,} tokens"] += n_left
                break
            pause_ms = shape.think_ms.draw(1, think)[0] if item.pause_s is None else item.pause_s * 1e3
            after = (first + number - 1,) if number else ()
            turn = Turn(session, number, after, round(pause_ms * NS_PER_MS) if number else 0)
            request = Request(first + number, None, None, n_context, n_output, verbatim=True, turn=turn)
            if ids is None:  # only the server can count it
                request = replace(request, n_prompt_tok=0)
            requests.append(prompted(request, item, ids, server))
            n_context += n_output
        session += len(requests) > first
    return tuple(requests), _sessions(requests, server.max_tok), dropped


def _turns_of(item: Item) -> Iterator[Item]:
    """A chat as one item for each message of its user, with what stands between it and the one before."""
    if not item.messages or item.session is not None:
        yield item
        return
    new: list[Mapping[str, object]] = []
    later = [m["content"] for m in item.messages if m["role"] == "assistant"] + [item.reply]
    replies = iter(later)
    for message in item.messages:
        if message["role"] == "assistant":
            continue
        new.append(message)
        if message["role"] in ("user", "tool"):
            reply = next(replies, None)
            yield replace(item, messages=tuple(new), reply=reply if isinstance(reply, str) else None)
            new = []


@dataclass(frozen=True, slots=True)
class Synthetic:
    shape: Shape

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
        due_s = due_times(arrivals, rng(seed, "arrivals"))
        plan = make_plan(self.shape, due_s, server.vocabulary, seed, server.block_tok)
        assert isinstance(plan.requests, DrawnRequests)
        longest = int((plan.requests.column("n_prompt_tok") + plan.output_tok).max(initial=0))
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

    @property
    def shape(self) -> Shape:
        return Shape(_range(self.trace.n_prompt_tok), _range(self.trace.n_output_tok))

    @property
    def title(self) -> str:
        speed = f" at {self.speed:g} times its speed" if self.speed != 1 else ""
        span_s = float(self.trace.at_s[-1] - self.trace.at_s[0])
        per_s = float(f"{(len(self.trace) - 1) / span_s:.3g}") if span_s else 0.0
        return f"{self.trace.title} trace{f' of {per_s:,g} requests/s' if per_s else ''}{speed}"

    @property
    def name(self) -> str:
        return f"{self.trace.title.lower()}-trace"

    def plan(self, arrivals: Arrivals, server: Server, seed: int) -> Plan:
        trace, dropped = self.trace, dict(self.trace.dropped)
        due_s = due_times(arrivals, rng(seed, "arrivals"))
        requests = trace.requests(server.vocabulary, seed)
        if server.max_tok is not None:
            fits = trace.n_prompt_tok + trace.n_output_tok <= server.max_tok
            if not fits.any():
                raise WorkloadError(f"--trace: no request fits the model's limit of {server.max_tok} tokens")
            if not fits.all():
                dropped[f"longer than the model's limit of {server.max_tok:,} tokens"] = int((~fits).sum())
                requests = replace(requests, rows=np.flatnonzero(fits), numbers=np.cumsum(fits) - 1)
                due_s = due_s[fits]
        return replace(plan_of(requests, due_s, seed), dropped=dropped)


@dataclass(frozen=True, slots=True)
class Written:
    """Rows of a data set, in the order in which they are used; at most `n_wanted` of them.

    `timed`: each is due at its own time.
    """

    data: DataSet
    items: tuple[Item, ...]
    n_wanted: int | None
    output_tok: Lengths
    kind: RequestKind = RequestKind.GENERATE
    timed: bool = False

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
        wanted = self.n_wanted, seed, self.output_tok, self.kind
        requests, used, dropped = data_requests(self.items, server, *wanted)
        _check_enough(self.data, len(requests), self.n_wanted, dropped)
        due_s = due_times(arrivals, rng(seed, "arrivals"))[: len(requests)]
        if self.timed:
            at_s = np.array([item.at_s for item in used], dtype=np.float64)
            due_s = at_s - at_s[0]
        total = Counter(self.data.dropped) + dropped
        return replace(plan_of(tuple(requests), due_s, seed), dropped=total)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations of several turns: synthetic ones, or those in a data set."""

    session: SessionShape
    data: DataSet | None = None
    items: tuple[Item, ...] = ()
    n_wanted: int | None = None

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
        due_s = due_times(arrivals, rng(seed, "arrivals"))
        if self.data is None:
            n, words = len(due_s), server.vocabulary
            requests, of, dropped = drawn_sessions(self.session, n, words, seed, server.max_tok)
        else:
            requests, of, dropped = written_sessions(self.items, server, self.n_wanted, self.session, seed)
            _check_enough(self.data, int(of.max()) + 1, self.n_wanted, dropped)
            dropped = Counter(self.data.dropped) + dropped
        return replace(plan_of(requests, due_s[of], seed), dropped=dropped)


Work = Synthetic | Recorded | Written | Sessions
"""`shape` is what the requests are like, also where that is only their range; `title` and `name` say what one
of them is, for people and for folders; `plan` counts the rows that did not fit."""


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


def _range(values: NDArray[np.int64]) -> Lengths:
    return Lengths(max(1, int(np.min(values))), max(1, int(np.max(values))))
