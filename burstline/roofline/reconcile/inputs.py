"""The inputs of a reconciliation of a run with the hardware, and inferred steps for engines without a log.

A continuous-batching engine gives every decoding request one token a step, so the gaps between the tokens of
one long reply are the lengths of its steps (`steps_seen`). A chain of such replies covers the run; what else
arrived around each of its tokens was computed in the same step. Prompt tokens are laid into the latest steps
that have room for them before their request's first token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from burstline.roofline.device.calibration import Calibration
from burstline.roofline.model.ops import Step
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.roofline.predict.simulate import Asked, Limits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepSeen:
    """A step of an engine's log. `op_seconds` go by our op names, of all layers; what was timed together is
    joined by a plus ("rope+kv_write+attention")."""

    step: Step
    seconds: float
    op_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """The measurement: requests as served, from the first arrival to the last token.

    `first_s` and `last_s` are each request's first and last token on the clock of `Asked.due_s`, None where
    they are not known. `steps` None: they are not known either; `logged`: the engine itself wrote them down.
    `assumed` says what the layer above had to guess. `paced`: arrivals of an open loop, not the server,
    decided how long it took, so that time without a step is no loss. `concurrency` is that of a closed loop
    without pauses: a faster server would have been sent the requests sooner.
    """

    requests: Sequence[Asked]
    makespan_s: float
    limits: Limits
    steps: Sequence[StepSeen] | None = None
    logged: bool = True
    first_s: Floats | None = None
    last_s: Floats | None = None
    assumed: tuple[str, ...] = ()
    paced: bool = False
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """Which parts of a set-up are certain: the engine or a person states them. The others are assumptions.

    Where `devices` is False, up to `at_most` may serve the model together (None: any number) and up to
    `one_request` may work on one request. `weights` covers the dtype of the products' inputs too, but on a
    CPU that was measured in one dtype, where `compute` is whether the engine computes in that one.
    """

    devices: bool = True
    weights: bool = True
    compute: bool = True
    kv: bool = True
    speculation: bool = True
    at_most: int | None = None
    one_request: int = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, its devices and their calibration; `calibration` None: ceilings only.

    `draft_tok`: tokens that speculative decoding proposes in each step.
    """

    deployment: Deployment
    calibration: Calibration | None
    known: Known = Known()
    draft_tok: int = 0

    def clock(self) -> Clock:
        return Clock(self.deployment, self.calibration)


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """One reply as it arrived: when it was asked for, and an instant for each of its tokens, ascending.

    `cached_tok` of the prompt were not computed.
    """

    sent_s: float
    prompt_tok: int
    token_s: Floats
    cached_tok: int = 0


def steps_seen(replies: Sequence[Streamed], max_batched_tok: int) -> list[StepSeen]:
    """The steps in the order of time; none of a request's tokens is left out.

    Steps that compute nothing but a part of a prompt while nothing decodes cannot be seen: they are in the
    length of the step that ends with the first token. Work done twice after a preemption is not seen either.
    """
    replies = [reply for reply in replies if len(reply.token_s)]
    if not replies:
        return []
    begin_s, end_s = _steps_of_chain(replies)
    owner = np.concatenate([np.full(len(reply.token_s), i) for i, reply in enumerate(replies)])
    nth = np.concatenate([np.arange(len(reply.token_s)) for reply in replies])
    token_s = np.concatenate([reply.token_s for reply in replies])
    # The step whose end is nearest: the tokens of one step arrive a little before and after each other.
    step = np.searchsorted((end_s[1:] + end_s[:-1]) / 2, token_s).astype(np.int64)
    n_decodes = np.bincount(step[nth > 0], minlength=len(end_s))
    prompts = _prompts(replies, step[nth == 0], begin_s, max_batched_tok - n_decodes)
    return list(_steps(replies, (step, owner, nth), prompts, end_s - begin_s))


def _steps_of_chain(replies: Sequence[Streamed]) -> tuple[Floats, Floats]:
    """When each step began and ended: the token times of a chain of replies that covers the run.

    Each link is the reply that lasts longest of those that had begun when the last link ended.
    """
    order = sorted(range(len(replies)), key=lambda i: float(replies[i].token_s[0]))
    first = replies[order[0]].token_s[0]
    begin, end = [replies[order[0]].sent_s], [float(first)]
    at, longest, gap_s = 0, order[0], 0.0
    while True:
        while at < len(order) and replies[order[at]].token_s[0] <= end[-1] + gap_s / 2:
            if replies[order[at]].token_s[-1] > replies[longest].token_s[-1]:
                longest = order[at]
            at += 1
        tokens = replies[longest].token_s
        tokens = tokens[tokens > end[-1] + gap_s / 2]
        if len(tokens):
            begin += [end[-1], *tokens[:-1].tolist()]
            end += tokens.tolist()
            gap_s = end[-1] - begin[-1]
        elif at < len(order):  # nothing decoded in between: the engine was idle, or only prefilled
            longest = order[at]
            begin.append(max(end[-1], min(replies[i].sent_s for i in order[at:])))
            end.append(float(replies[longest].token_s[0]))
            gap_s = 0.0
        else:
            return np.array(begin), np.array(end)


def _prompts(
    replies: Sequence[Streamed], finished_in: Ints, begin_s: Floats, room_tok: Ints
) -> dict[int, list[tuple[int, int, int]]]:
    """By step, (request, prompt tokens computed, context after them), from each prompt's end backwards."""
    ends: dict[int, list[int]] = {}
    for i in sorted(range(len(replies)), key=lambda i: float(replies[i].token_s[0])):
        ends.setdefault(int(finished_in[i]), []).append(i)
    found: dict[int, list[tuple[int, int, int]]] = {}
    left: list[tuple[int, int]] = []  # (request, prompt tokens to go), the one that ends first first
    for k in range(len(begin_s) - 1, -1, -1):
        left = [(i, replies[i].prompt_tok) for i in ends.get(k, ())] + left
        room, still = int(room_tok[k]), []
        for i, todo in reversed(left):
            here, cached = replies[i], replies[i].cached_tok
            least = 1 if todo == here.prompt_tok else 0  # its last token is computed where it ends
            most = todo - cached if k == 0 or begin_s[k] <= here.sent_s else max(room, least)
            n_tok = max(min(todo - cached, most), least)
            if n_tok:
                found.setdefault(k, []).append((i, n_tok, todo))
                room -= n_tok
            if todo - n_tok > cached:
                still.append((i, todo - n_tok))
        left = still[::-1]
    return found


def _steps(
    replies: Sequence[Streamed],
    tokens: tuple[Ints, Ints, Ints],
    prompts: dict[int, list[tuple[int, int, int]]],
    seconds: Floats,
) -> Iterator[StepSeen]:
    order = np.lexsort(tokens[::-1])  # by step, then by request, then by token
    step, owner, nth = (column[order][tokens[2][order] > 0] for column in tokens)
    prompt_tok = np.array([reply.prompt_tok for reply in replies], dtype=np.int64)
    bounds = np.searchsorted(step, np.arange(len(seconds) + 1))
    for k, (low, high) in enumerate(pairwise(bounds)):
        # Two tokens of one request may fall to one step; both are kept, so that no work is lost.
        who, at, n_new = np.unique(owner[low:high], return_index=True, return_counts=True)
        context = prompt_tok[who] + nth[low:high][at + n_new - 1]
        i, n_tok, upto = np.array(prompts.get(k, []), dtype=np.int64).reshape(-1, 3).T
        logits = (upto == prompt_tok[i]).astype(np.int64)
        step_k = Step(np.append(n_new, n_tok), np.append(context, upto), np.append(n_new, logits))
        if step_k.n_requests and seconds[k] > 0:
            yield StepSeen(step_k, float(seconds[k]))
