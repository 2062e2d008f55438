"""One forward pass: for each request, its new tokens and its context."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from burstline.errors import RooflineError

Ints = npt.NDArray[np.int64]
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass: per request, its new tokens, its context after them, and its logit rows."""

    new_tok: Ints
    context_tok: Ints
    logits: Ints

    @staticmethod
    def of(requests: Iterable[tuple[int, int, int]]) -> "Step":
        """A step of (new tokens, context after the step, rows of logits) for each request."""
        rows = np.array(list(requests), dtype=np.int64).reshape(-1, 3)
        if (
            len(rows) == 0
            or (rows[:, 0] < 1).any()
            or (rows[:, 1] < rows[:, 0]).any()
            or (rows[:, 2] < 0).any()
        ):
            raise RooflineError(
                "a step needs requests, each with a new token or more and a context that holds them;"
                f" got {rows.tolist()}"
            )
        return Step(rows[:, 0], rows[:, 1], rows[:, 2])

    @staticmethod
    def prefill(batch: int, n_prompt_tok: int, n_cached_tok: int = 0) -> "Step":
        """Whole prompts (or chunks after `n_cached_tok` of them); logits for the last token of each."""
        return Step.of([(n_prompt_tok, n_cached_tok + n_prompt_tok, 1)] * batch)

    @staticmethod
    def decode(batch: int, n_context_tok: int) -> "Step":
        """One new token for each of `batch` requests, `n_context_tok` with it."""
        return Step.of([(1, n_context_tok, 1)] * batch)

    @property
    def n_requests(self) -> int:
        return len(self.new_tok)

    @property
    def n_tok(self) -> int:
        """New tokens of all requests: the rows of every product but the LM head's."""
        return int(self.new_tok.sum())

    @property
    def n_logits(self) -> int:
        return int(self.logits.sum())

    def phases(self) -> list[tuple[Phase, "Step"]]:
        """The prefill part and the decode part, where there are any.

        A request decodes when it adds one token, or several that all want logits over a cached context
        (a draft under verification).
        """
        decode = (self.new_tok == 1) | ((self.logits == self.new_tok) & (self.context_tok > self.new_tok))
        parts: list[tuple[Phase, Step]] = []
        if not decode.all():
            parts.append(("prefill", self._where(~decode)))
        if decode.any():
            parts.append(("decode", self._where(decode)))
        return parts

    @property
    def phase(self) -> Phase:
        """Prefill where it computes any prompt."""
        return "prefill" if any(phase == "prefill" for phase, _ in self.phases()) else "decode"

    def _where(self, mask: npt.NDArray[np.bool_]) -> "Step":
        return Step(self.new_tok[mask], self.context_tok[mask], self.logits[mask])

    def keys_seen(self, window: int | None = None, chunk: int | None = None) -> int:
        """How many (query, key) pairs a causal mask leaves: sum of qc - q(q-1)/2.

        Fewer with a window, or where each chunk of positions sees itself only.
        """
        q, c = self.new_tok, self.context_tok
        if chunk is not None:
            return int((_below(c, chunk) - _below(c - q, chunk)).sum())
        if window is None:
            return int((q * c - q * (q - 1) // 2).sum())
        before = c - q
        growing = np.clip(window - before, 0, q)  # queries that do not fill the window yet
        return int((growing * before + growing * (growing + 1) // 2 + (q - growing) * window).sum())

    def keys_full(self, window: int | None = None) -> int:
        """(Query, key) pairs of the whole rectangle over the keys that must be read."""
        return int((self.new_tok * self._keys(window)).sum())

    def keys_read(self, window: int | None = None, chunk: int | None = None) -> int:
        """Distinct keys that must be read, over all requests."""
        if chunk is not None:
            before = self.context_tok - self.new_tok
            return int((self.context_tok - before // chunk * chunk).sum())
        return int(self._keys(window).sum())

    def _keys(self, window: int | None) -> Ints:
        return self.context_tok if window is None else np.minimum(self.context_tok, window - 1 + self.new_tok)


def _below(n_tok: Ints, chunk: int) -> Ints:
    """(Query, key) pairs of the first `n_tok` positions, each seeing its chunk up to itself."""
    whole, rest = n_tok // chunk, n_tok % chunk
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
