"""What a user wants generated. Knows no engine and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass


class WorkloadError(ValueError):
    """The user asked for a workload that cannot be made: what was wrong, expected, and worth trying."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """One thing a user wants generated.

    `prompt_ids` is the exact prompt wherever the API takes token ids (an `array('I')`: a list of ints costs
    nine times the memory); `prompt_text` is set where it does not. `n_prompt_tok` is what the server must
    count. With `ignore_eos` exactly `n_output_tok` tokens are wanted, otherwise at most that many.
    """

    index: int
    prompt_ids: Sequence[int] | None
    prompt_text: str | None
    n_prompt_tok: int
    n_output_tok: int
    ignore_eos: bool = True
    sampling: Sampling = GREEDY
