"""A prefix cache that holds nothing but the memory of what was asked: it finds out unsalted prompts."""

from dataclasses import dataclass, field

from servers.truth.ask import Prompt

BLOCK_TOK = 16


@dataclass(slots=True)
class PrefixCache:
    """Remembers every whole block of 16 tokens (or words of a text) with all that stood before it.

    Like a real one (vLLM hashes blocks so) it never serves a whole prompt: some of it stays to be computed.
    """

    _seen: set[int] = field(default_factory=set)

    def reset(self) -> None:
        self._seen.clear()

    def look_up(self, prompt: Prompt) -> int:
        """How many of the prompt's first tokens were seen before, a multiple of 16; then remembers it all."""
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        n_cached_tok = 0
        hit = True
        chain = 0
        for begin in range(0, len(tokens) - BLOCK_TOK, BLOCK_TOK):
            chain = hash((chain, tuple(tokens[begin : begin + BLOCK_TOK])))
            hit = hit and chain in self._seen
            n_cached_tok += BLOCK_TOK * hit
            self._seen.add(chain)
        return n_cached_tok
