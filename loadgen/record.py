"""The spine: one row per planned request, also for those that failed or were never sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. HTTP errors are `http_<code>`, kept in `Record.outcome` as plain text."""

    OK = "ok"
    SHORT = "short"
    CLAMPED = "clamped"
    EMPTY = "empty"
    ERROR_EVENT = "error_event"
    TIMEOUT = "timeout"
    CONNECT = "connect"
    RESET = "reset"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    CANCELLED = "cancelled"
    NOT_SENT = "not_sent"


@dataclass(frozen=True, slots=True)
class Record:
    """One planned request and what became of it.

    Times are ns from the run's start, None where it never happened. `token_ns[i]` is when the event carrying
    `token_n[i]` generated tokens arrived (the kernel's stamp where there is one, ours otherwise), ascending;
    `read_lag_ns[i]` is how much later our code had it, -1 where the kernel gave no stamp. `answer_ns` is the
    first token that is not reasoning. `prompt_source` and `output_source` name who counted: "ids", "usage",
    "tokenize", "tokenizer", "events"; None where nobody did.
    """

    index: int
    outcome: str
    due_ns: int
    dispatched_ns: int | None
    connected_ns: int | None
    sent_ns: int | None
    headers_ns: int | None
    closed_ns: int | None
    answer_ns: int | None
    token_ns: Sequence[int]
    token_n: Sequence[int]
    read_lag_ns: Sequence[int]
    planned_prompt_tok: int
    planned_output_tok: int
    prompt_tok: int | None
    prompt_source: str | None
    output_tok: int | None
    output_source: str | None
    cached_tok: int | None
    finish_reason: str | None
    http_status: int | None
    n_events: int
    n_reads: int
    error: str | None
