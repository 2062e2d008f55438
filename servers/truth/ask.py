"""What a request wants and what one event of its reply carries, in no engine's words yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servers.truth.script import Script
from workloads.request import WorkloadError

Json = dict[str, Any]
Prompt = Sequence[int] | str


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants. `details` is the dialect's own extra: vLLM's token ids, TGI's final details.

    `n_cached_tok` is what the server's prefix cache holds of the prompt; None where it has no such cache.
    """

    dialect: str
    model: str
    stream: bool
    n_prompt_tok: int
    n_output_tok: int
    details: bool = False
    n_cached_tok: int | None = None


@dataclass(frozen=True, slots=True)
class Portion:
    """The tokens of one event: how many came before it, how many it carries, whether they are the last."""

    before: int
    n: int
    last: bool

    @property
    def after(self) -> int:
        return self.before + self.n

    @property
    def ids(self) -> list[int]:
        return list(range(self.before, self.after))


def n_tok_of(prompt: Prompt) -> int:
    """How many tokens this server counts in a prompt: its ids, or the words of a text."""
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def asked(
    dialect: str, body: Json, model: str, prompt: Any, n_output: Any, details: Any
) -> tuple[Ask, Prompt]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise WorkloadError(f"the prompt is {prompt!r:.80}; expected a text or a list of token ids")
    if not isinstance(n_output, int) or n_output < 1:
        raise WorkloadError(f"the output length is {n_output!r}; expected a positive number")
    stream = bool(body.get("stream", False))
    return Ask(dialect, model, stream, n_tok_of(prompt), n_output, bool(details)), prompt


def finish_reason(script: Script, portion: Portion) -> str | None:
    return script.finish if portion.last else None
