"""Records: one row per planned request, also for those that failed or were never sent."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, Final, Self

from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Capture
from burstline.servers.messages import WITH_TOKENS, EngineError, Event, HttpReply, Kind, Reply, ServerTimes
from burstline.servers.redact import words_of_server
from burstline.servers.replies import DONE, understood
from burstline.workloads.request import Request

Decode = Callable[[HttpReply], Reply]
Counts = Sequence[tuple[str, int]]
"""Who counted a reply's text again, most trusted first, and how many tokens they found."""


class Outcome(StrEnum):
    """How a request ended. HTTP errors are `http_<code>`, kept in `Record.outcome` as plain text.

    `ok` is HTTP 200 without an error, with a terminal event and exactly the asked tokens (at most the asked
    where the model was free to stop, any number of a server whose lengths are its own).
    The rest: `short` a stop although end-of-text was to be ignored; `clamped` the server cut the output or
    the prompt by itself; `long` more tokens than asked; `empty` no token at all; `error_event` an error
    inside the reply, or one that makes no sense; `refused` the server says that it has too many requests;
    `aborted` it says that it gave up; `truncated` the reply stops before its end; `too_large` it grew past
    any planned reply, and the client hung up; `timeout`, `connect`, `reset` the wire failed; `cancelled` we
    gave up; `abandoned` the client hung up in the middle, as planned; `not_sent` it never left; `driver_lost`
    its load driver, or the machine it ran on, was lost.
    """

    words: str
    """What follows a count of such requests, "" of those that succeeded."""

    OK = "ok", ""
    SHORT = "short", "stopped early"
    CLAMPED = "clamped", "got cut by the server"
    LONG = "long", "got more tokens than requested"
    EMPTY = "empty", "got no token"
    ERROR_EVENT = "error_event", "failed inside the reply"
    REFUSED = "refused", "refused: overloaded"
    TIMEOUT = "timeout", "timed out"
    CONNECT = "connect", "could not connect"
    RESET = "reset", "lost the connection"
    TRUNCATED = "truncated", "ended early"
    ABORTED = "aborted", "got stopped by the server"
    TOO_LARGE = "too_large", "longer than any requested"
    CANCELLED = "cancelled", "got stopped by Burstline"
    NOT_SENT = "not_sent", "never sent"
    DRIVER_LOST = "driver_lost", "lost with their load driver"
    PREDECESSOR = "predecessor", "not sent, as an earlier turn failed"
    NO_IDS = "no_ids", "not sent, as the reply before has no token ids (try --endpoint chat)"
    ABANDONED = "abandoned", "hung up, as planned"

    def __new__(cls, value: str, words: str) -> Self:
        outcome = str.__new__(cls, value)
        outcome._value_, outcome.words = value, words
        return outcome


STOPPED: Final = frozenset({"stop", "eos", "eos_token", "stop_sequence", "word", "repetition", "end_turn"})
"""Finish reasons by which a model ends on its own, in the words of every engine."""
NO_FAILURES: Final = frozenset({"planned", "ok", Outcome.ABANDONED.value})
"""Among counts by outcome: what is no failure."""
OVERLOADED: Final = frozenset({Outcome.REFUSED.value, "http_429", "http_503"})
"""Outcomes by which a server says that it has too many requests, as it does when its queue is full."""
CUT_OFF: Final = frozenset({Outcome.CANCELLED.value, Outcome.NOT_SENT.value, Outcome.PREDECESSOR.value})
"""Outcomes of requests that an interrupted run did not complete; they are no failures of the server."""
GAVE_UP: Final = frozenset({"abort", "aborted", "error", "cancelled"})
"""Finish reasons by which a server gives up."""
RECOUNTS: Final = ("tokenize", "tokenizer")
"""Who may count a reply's text again, most trusted first: the server's own endpoint, a local tokenizer."""
MOST_TIMES: Final = 16
MOST_MORE_TOK: Final = 16_384
"""Counts above 16x the planned tokens plus 16,384 are rejected."""
NO_TEXT: Final = "no-text"
"""The split of a reply whose tokens the server counted and sent no text of: when each came is not known."""
HUNG_UP: Final = "hung_up"
"""A capture's failure where the client had all planned tokens and ended a stream that would go on."""


def failed(counts: Mapping[str, int], *, interrupted: bool = False) -> dict[str, int]:
    """The failures among `counts` of requests by outcome; what an interruption cut off is none."""
    no_failures = NO_FAILURES | CUT_OFF if interrupted else NO_FAILURES
    return {kind: n for kind, n in counts.items() if n and kind not in no_failures}


def lost_a_part(counts: Mapping[str, int]) -> bool:
    """Whether streams broke and all refusals are "unavailable": a worker was lost, and no queue was full."""
    refusals = {kind for kind in OVERLOADED if counts.get(kind)}
    broke = map(counts.get, (Outcome.RESET, Outcome.TRUNCATED, Outcome.ERROR_EVENT))
    return refusals == {"http_503"} and any(broke)


def in_words(counts: Mapping[str, int]) -> str:
    """Counts by outcome, e.g. `3 timeout, 1 never sent, 2 got HTTP 500`."""
    return ", ".join(f"{n:,} {outcome_words(kind)}" for kind, n in counts.items())


def outcome_words(kind: str) -> str:
    words = {outcome.value: outcome.words for outcome in Outcome}
    return words.get(kind) or kind.replace("http_", "got HTTP ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One planned request and what became of it.

    Times are ns from the run's start, None where it never happened. `token_ns[i]` is when the event carrying
    `token_n[i]` generated tokens arrived (the kernel's stamp where there is one, ours otherwise), ascending;
    `read_lag_ns[i]` is how much later our code had it, -1 where the kernel gave no stamp;
    `read_error_ns[i]` by how much it may have arrived before its stamp, -1 where not recorded. `answer_ns` is
    the first token that is not reasoning, `first_event_ns` the first event of any kind.

    `prompt_source` and `output_source` name who counted: "ids" token ids that came back, "usage" the server's
    own total, "events" the events' own counts, "tokenize" the server's tokenizer, asked about the text after
    the load, "tokenizer" a local one; None without a count. `token_n` sums up to less than `output_tok` where
    the server counted reasoning that it did not show.
    `error` of one that is `ok` says what cut the reply behind its finish reason: neither its end mark nor the
    end of its HTTP body came, though the client awaited it for longer than any token. `beyond_tok` is how
    many tokens came after all that were asked for, of a server that goes on; they count nowhere else.
    `output_gap_tok` is what the next most trusted count says more, None where there is only one. `split` says
    how `token_n` is known: "counted" by the server, "one-each"
    from as many events as tokens, "spread" evenly as the server did not say, "no-text" all at the reply's
    end where it sent none of their text, "unknown" (each 1, a placeholder) where not even the total is known.
    `server_queue_s`, `server_prefill_s` and `server_first_token_s` are the server's own times of this request
    (see `burstline.servers.messages.ServerTimes`), None where it does not report them.
    """

    index: int
    outcome: str
    due_ns: int
    dispatched_ns: int | None
    connected_ns: int | None
    sent_ns: int | None
    headers_ns: int | None = None
    closed_ns: int | None
    answer_ns: int | None = None
    token_ns: Sequence[int] = ()
    token_n: Sequence[int] = ()
    read_lag_ns: Sequence[int] = ()
    read_error_ns: Sequence[int] = ()
    planned_prompt_tok: int
    planned_output_tok: int
    prompt_tok: int | None = None
    prompt_source: str | None = None
    output_tok: int | None = None
    output_source: str | None = None
    output_gap_tok: int | None = None
    split: str | None = None
    cached_tok: int | None = None
    finish_reason: str | None = None
    http_status: int | None = None
    n_events: int = 0
    n_reads: int
    error: str | None
    beyond_tok: int | None = None
    server_queue_s: float | None = None
    server_prefill_s: float | None = None
    server_first_token_s: float | None = None
    first_event_ns: int | None = None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The events of a reply that carry tokens: where each ends in the body, how many it carries, who says so.

    `answer` is the index of the first that is not reasoning.
    """

    ends: Sequence[int] = ()
    n: Sequence[int] = ()
    answer: int | None = None
    total: int | None = None
    source: str | None = None
    gap: int | None = None
    split: str | None = None
    beyond: int | None = None

    @property
    def generated(self) -> int | None:
        """The server's own total: text that was tokenized again may be a token off and decides no outcome."""
        return None if self.source in RECOUNTS else self.total

    def cut_to(self, n_tok: int) -> Self:
        """The first `n_tok` tokens, with how many came `beyond` them; unchanged where fewer came."""
        came = list(accumulate(self.n))
        if not came or came[-1] < n_tok or self.split == "unknown":
            return self
        k = bisect_left(came, n_tok)
        n = [*self.n[:k], self.n[k] - (came[k] - n_tok)]
        beyond = max(came[-1], self.total or 0) - n_tok
        ends = self.ends[: k + 1]
        return replace(self, ends=ends, n=n, total=n_tok, source="events", gap=None, beyond=beyond)


def record_of(request: Request, capture: Capture, decode: Decode, recounts: Counts = ()) -> Record:
    """The record of a request, from its capture; `decode` is its engine's.

    `recounts` are asked only where the server itself did not count. Never raises on what a server sent: a
    reply that cannot be read is an `error_event` that says why, and its bytes stay in the capture.
    """
    try:
        parsed = http1.parse(capture.reads)
    except EngineError as error:
        return Record(**_of_capture(request, capture, Outcome.ERROR_EVENT, str(error)))
    if parsed is None:
        return Record(**_of_capture(request, capture, capture.failure or Outcome.TRUNCATED, capture.detail))
    http, arrivals = parsed
    reply = _plausible(request, understood(decode, http))
    tokens = _tokens(reply, recounts, request.n_output_tok)
    if reply.overshoots or capture.failure == HUNG_UP:
        tokens = tokens.cut_to(request.n_output_tok)
    first_ns, token_ns, lag_ns, error_ns = _stamps(http.body, arrivals, tokens.ends)
    outcome = _outcome(request, capture.failure, http, reply, tokens)
    why = capture.detail if outcome == Outcome.TOO_LARGE else reply.error or capture.detail
    if outcome == Outcome.OK:
        is_whole = capture.failure in (None, HUNG_UP) or http.body.rstrip().endswith(DONE)
        if capture.failure in (Outcome.TIMEOUT, Outcome.CANCELLED):  # ours, and its end may not be overdue
            slowest_ns = max((after - before for before, after in pairwise(token_ns)), default=0)
            is_whole |= (capture.closed_ns or 0) <= max(token_ns, default=0) + slowest_ns
        why = None if is_whole else capture.detail or capture.failure
    times = reply.times or ServerTimes()
    return Record(
        **_of_capture(request, capture, outcome, why),
        headers_ns=arrivals.headers_ns,
        answer_ns=None if tokens.answer is None else token_ns[tokens.answer],
        token_ns=token_ns,
        token_n=tokens.n,
        read_lag_ns=lag_ns,
        read_error_ns=error_ns,
        prompt_tok=reply.n_prompt_tok,
        prompt_source=None if reply.n_prompt_tok is None else "usage",
        output_tok=tokens.total,
        output_source=tokens.source,
        output_gap_tok=tokens.gap,
        split=tokens.split,
        cached_tok=reply.n_cached_tok,
        finish_reason=reply.finish_reason,
        http_status=http.status,
        n_events=len(reply.events),
        beyond_tok=tokens.beyond,
        server_queue_s=times.queue_s,
        server_prefill_s=times.prefill_s,
        server_first_token_s=times.first_token_s,
        first_event_ns=first_ns,
    )


def _stamps(
    body: bytes, arrivals: http1.Arrivals, ends: Sequence[int]
) -> tuple[int | None, list[int], list[int], list[int]]:
    """When the first event of any kind came, and `http1.stamps` of those that carry tokens."""
    at = 0 if body.startswith(b"data:") else body.find(b"\ndata:") + 1 or len(body)
    first = body.find(b"\n", at) + 1
    if not first or (ends and first > ends[0]):  # no stream of events: its first token is all that came
        at_ns, lag_ns, error_ns = http1.stamps(arrivals, ends)
        return (at_ns[0] if ends else None), at_ns, lag_ns, error_ns
    at_ns, lag_ns, error_ns = http1.stamps(arrivals, [first, *ends])
    return at_ns[0], at_ns[1:], lag_ns[1:], error_ns[1:]


def _plausible(request: Request, reply: Reply) -> Reply:
    """The reply; with an error, and without its counts, where they are of another order than the request's.

    A chat template or another tokenizer makes a prompt longer, and a text may be cached whole; neither makes
    512 tokens a billion, which one such record would make of the run's throughput.
    """
    limits = (
        ("prompt", reply.n_prompt_tok, request.n_prompt_tok),
        ("cached", reply.n_cached_tok, request.n_prompt_tok),
        ("generated", reply.n_output_usage, request.n_output_tok),
    )
    for what, n, asked in limits:
        if n is not None and n > MOST_TIMES * asked + MOST_MORE_TOK:
            why = f"invalid reply: {n:,} {what} tokens, where {asked:,} were asked for"
            return replace(
                reply, n_prompt_tok=None, n_cached_tok=None, n_output_usage=None, error=reply.error or why
            )
    return reply


def record_without_capture(request: Request, *, sent: bool) -> Record:
    """The record of a request that was not sent, or of which a run that was ended by force left nothing."""
    capture = Capture(request.index, 0, None, None, None, None, ())
    if not sent:
        return Record(**_of_capture(request, capture, Outcome.NOT_SENT, None))
    why = "the run left no capture of this request"
    return Record(**_of_capture(request, capture, Outcome.CANCELLED, why))


def _of_capture(request: Request, capture: Capture, outcome: str, error: str | None) -> dict[str, Any]:
    """The fields of a record that are known without the reply."""
    return {
        "index": request.index,
        "outcome": str(outcome),
        "due_ns": capture.due_ns,
        "dispatched_ns": capture.dispatched_ns,
        "connected_ns": capture.connected_ns,
        "sent_ns": capture.sent_ns,
        "closed_ns": capture.closed_ns,
        "planned_prompt_tok": request.n_prompt_tok,
        "planned_output_tok": request.n_output_tok,
        "n_reads": len(capture.reads),
        "error": None if error is None else words_of_server(error),
    }


def _outcome(request: Request, failure: str | None, http: HttpReply, reply: Reply, tokens: _Tokens) -> str:
    """How the request ended; the first thing that is wrong names it.

    A wire that fails after the reply's own end took nothing from the user and does not count.
    """
    if reply.overloaded:
        return Outcome.REFUSED
    if not http.ok:
        return f"http_{http.status}"
    if failure == Outcome.TOO_LARGE:
        return failure  # whatever the part that was kept looks like
    if tokens.beyond is not None:
        return Outcome.OK  # all that was asked for came, whatever became of the rest
    only_unknown = bool(reply.events) and all(event.kind is Kind.UNKNOWN for event in reply.events)
    if reply.error is not None and (failure is None or not only_unknown):
        return Outcome.ERROR_EVENT
    if failure is not None and not reply.terminated:
        return failure
    if reply.finish_reason in GAVE_UP:
        return Outcome.ABORTED
    if not tokens.n:
        return Outcome.EMPTY if http.complete or reply.terminated else Outcome.TRUNCATED
    if not reply.terminated and not (http.complete and tokens.generated == request.n_output_tok):
        return Outcome.TRUNCATED  # some gateways drop both ends, but not the count
    return _length_outcome(request, reply, tokens)


def _length_outcome(request: Request, reply: Reply, tokens: _Tokens) -> str:
    # A prompt sent as text may be tokenized otherwise than planned; one sent as ids can only be cut.
    sent_ids = request.prompt_ids is not None
    if sent_ids and reply.n_prompt_tok is not None and reply.n_prompt_tok < request.n_prompt_tok:
        return Outcome.CLAMPED
    if reply.own_length:
        return Outcome.OK
    stopped = reply.finish_reason in STOPPED
    n_output_tok = tokens.generated
    if n_output_tok is None:
        came = max(tokens.total or 0, len(tokens.n))
        if len(tokens.n) > request.n_output_tok:  # each event with text has a token or more
            return Outcome.LONG
        return Outcome.SHORT if stopped and request.ignore_eos and came < request.n_output_tok else Outcome.OK
    if n_output_tok >= request.n_output_tok:
        return Outcome.OK if n_output_tok == request.n_output_tok else Outcome.LONG
    if stopped or reply.finish_reason is None:
        return Outcome.SHORT if request.ignore_eos else Outcome.OK
    return Outcome.CLAMPED


def _tokens(reply: Reply, recounts: Counts, n_asked: int) -> _Tokens:
    """Which events carry how many tokens.

    Token ids are trusted before usage, usage before events, events before text that was tokenized again. Such
    text is never more than was asked, and exactly that where the server stopped for the length.
    """
    events = [event for event in reply.events if event.kind in WITH_TOKENS]
    if has_no_text := not events and bool(reply.n_output_usage):
        ends = [event for event in reply.events if event.kind in (Kind.FINISH, Kind.EMPTY)]
        events = [replace((ends or reply.events)[-1], n_tok=None)]  # all had come by then
    counts = [event.n_tok for event in events]
    known = [n for n in counts if n is not None]
    by_events = sum(known) if events and len(known) == len(counts) else None
    totals = (("ids", reply.n_output_ids), ("usage", reply.n_output_usage), ("events", by_events), *recounts)
    known_totals = [(source, n) for source, n in totals if n is not None]
    source, total = known_totals[0] if known_totals else (None, None)
    gap = known_totals[1][1] - known_totals[0][1] if len(known_totals) > 1 else None
    if source in RECOUNTS and total is not None and len(events) <= n_asked:
        total = n_asked if reply.finish_reason == "length" and 2 * total >= n_asked else min(total, n_asked)
    shown = total if total is None or has_no_text else total - _n_hidden(reply, events, total)
    if (silent := _silent_tokens(reply, events, shown)) is not None:
        events, counts = silent, [None] * len(silent)
    split, n = _split(counts, known, shown)
    split = NO_TEXT if has_no_text else split
    if 0 in n:
        events = [event for event, k in zip(events, n, strict=True) if k]
        n = [k for k in n if k]
    answer = next((i for i, event in enumerate(events) if event.kind in (Kind.ANSWER, Kind.TOOL)), None)
    return _Tokens([event.end for event in events], n, answer, total, source, gap, split if n else None)


def _n_hidden(reply: Reply, spoken: Sequence[Event], total: int) -> int:
    """How many tokens before the first text the server says are hidden, or sent an empty event for."""
    if not spoken or any(event.n_tok is not None for event in spoken):
        return 0
    if reply.n_reasoning_tok and all(event.kind is not Kind.REASONING for event in spoken):
        return min(reply.n_reasoning_tok, total - 1)
    empty = [event for event in reply.events if event.kind is Kind.EMPTY]
    return sum(e.end < spoken[0].end for e in empty) if len(spoken) + len(empty) == total else 0


def _silent_tokens(reply: Reply, spoken: Sequence[Event], total: int | None) -> list[Event] | None:
    """The events with those that have no text, where the server's total says that each is one token.

    Bytes of an incomplete character are such tokens. None otherwise, and before the first text: some servers
    open a stream with an empty event, and that must not open TTFT.
    """
    if not spoken or total is None or any(event.n_tok is not None for event in spoken):
        return None
    first = spoken[0].end
    events = [e for e in reply.events if e.kind in (*WITH_TOKENS, Kind.EMPTY) and e.end >= first]
    return events if len(spoken) < total == len(events) else None


def _split(counts: list[int | None], known: list[int], total: int | None) -> tuple[str, list[int]]:
    """Shares out what is left of `total` among the events that did not say; no chunk is taken for a token."""
    n_unknown = len(counts) - len(known)
    if not n_unknown:
        return "counted", known
    if total is None:
        return "unknown", [1 if n is None else n for n in counts]
    left = max(total - sum(known), 0)
    if left == n_unknown:
        return "one-each", [1 if n is None else n for n in counts]
    # Rounded up, so that the first event has a token: something did arrive with it.
    edges = [-(-left * k // n_unknown) for k in range(n_unknown + 1)]
    shares = iter([b - a for a, b in pairwise(edges)])
    return "spread", [next(shares) if n is None else n for n in counts]
