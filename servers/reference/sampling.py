"""The next token of every sequence: greedy, or drawn from the softmax under temperature and top-p."""

from collections.abc import Collection
from collections.abc import Sequence as Rows

import numpy as np

from servers.reference.scheduler import Sequence
from servers.reference.weights import Array


def choose(logits: Array, sequences: Rows[Sequence], eos_ids: Collection[int]) -> list[int]:
    """One id a row of `logits` (sequences, vocabulary); overwrites it where `min_tokens` forbids EOS."""
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.n_output < sequence.min_tokens:
            row[list(eos_ids)] = -np.inf
    chosen: list[int] = logits.argmax(axis=1).tolist()
    for i, sequence in enumerate(sequences):
        how = sequence.sampling
        if how.temperature > 0 and sequence.rng is not None:
            chosen[i] = draw(logits[i], how.temperature, how.top_p, sequence.rng.random())
    return chosen


def draw(logits: Array, temperature: float, top_p: float, u: float) -> int:
    """The id that `u`, uniform in [0, 1), falls on; top-p keeps the fewest likeliest ids that reach it."""
    weight = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = np.argsort(-weight, kind="stable") if top_p < 1 else np.arange(weight.size)
    kept = weight[order].cumsum()
    if top_p < 1:
        kept = kept[: int(np.searchsorted(kept, top_p * kept[-1])) + 1]
    return int(order[min(int(np.searchsorted(kept, u * kept[-1], side="right")), len(kept) - 1)])
