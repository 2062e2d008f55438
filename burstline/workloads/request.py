"""Requests as the user describes them, independent of engine and clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class WorkloadError(ValueError):
    """The user asked for a workload that cannot be made: what was wrong, expected, and worth trying."""


def not_a_run(path: object, why: str = "no such folder") -> WorkloadError:
    return WorkloadError(f"{path} is not a run: {why}; expected a folder that `burstline run` wrote")


class RequestKind(StrEnum):
    """The kind of a request: generate text, embed, or rank documents."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's place in a session: it is sent `pause_ns` after the turn that it follows has ended.

    `after` is the index of that one in the plan, alone; empty for a turn that opens a session.
    """

    session: int
    number: int
    after: tuple[int, ...] = ()
    pause_ns: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One thing a user wants generated.

    `prompt_ids` is the exact prompt wherever the API takes token ids (an `array('I')`: a list of ints costs
    nine times the memory); `prompt_text` is set where it does not, `messages` (a JSON list) for a chat.
    `n_prompt_tok` is what the server must count, 0 where only the server can count it (images). With
    `ignore_eos` exactly `n_output_tok` tokens are wanted, otherwise at most that many.

    Requests of one `family` begin with the same tokens and get the same salt; None: alone in its family.
    `verbatim` prompts are sent without a salt. A later turn of a session holds what that turn adds to the
    conversation; its `n_prompt_tok` counts the whole. `documents` are what a rerank request orders. `stage`
    names what a request outside the measurement is for ("warm-up 1", "priming"); None: it is measured.
    """

    index: int
    prompt_ids: Sequence[int] | None
    prompt_text: str | None
    n_prompt_tok: int
    n_output_tok: int
    ignore_eos: bool = True
    sampling: Sampling = GREEDY
    kind: RequestKind = RequestKind.GENERATE
    family: int | None = None
    verbatim: bool = False
    messages: str | None = None
    documents: tuple[str, ...] = ()
    turn: Turn | None = None
    stage: str | None = None
