"""What each step of a trace computed, as its annotation says, and whether the load's records imply it."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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
    """A request as the client's record has it."""

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
    return (
        Group(said.get("c", n), said.get("toks", said.get("c_sq", 0)), said.get("c_sk")),
        Group(n_decodes, said.get("g_sq", n_decodes), said.get("g_sk")),
    )


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
