"""Text to token ids and back: a folder's own tokenizer, or one made in memory for the built-in model."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HELD_TOK = 4
"""A UTF-8 character is four bytes at most, so text that stays broken for longer will not mend."""


def load(folder: Path | None, vocab_size: int) -> Tokenizer:
    """The folder's `tokenizer.json`, or the built-in tokenizer where there is none."""
    if folder is not None and (folder / "tokenizer.json").exists():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    return built_in(vocab_size)


def built_in(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids (257 at least): EOS is 0, then all bytes, then made-up words.

    Any text comes back as it went in, and every id is some text.
    """
    vocab = {"</s>": 0} | {byte: 1 + i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    pairs = _syllable_merges()
    while len(vocab) < vocab_size:
        merges.append(next(pairs))
        vocab["".join(merges[-1])] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _syllable_merges() -> Iterator[tuple[str, str]]:
    """Endless merges, shortest words first: "b"+"a", then " "+"ba", then " ba"+"be" and so on."""
    syllables = [(c, v) for c in "bcdfghjklmnprstvwxyz" for v in "aeiou"]
    yield from syllables
    words = ["Ġ"]  # how byte-level BPE writes a space
    while True:
        longer = [(word, c + v) for word in words for c, v in syllables]
        yield from longer
        words = [word + syllable for word, syllable in longer]


class TextStream:
    """Turns ids that come one by one into text deltas, holding back what is not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last id whose text is out, for its context, then those held back
        self._shown = ""

    def push(self, token: int, *, last: bool) -> str:
        """The text that `token` completes, often ""; all that is held where it is the `last`."""
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) <= HELD_TOK and not last:
            return ""
        delta = text[len(self._shown) :]
        self._ids = [token]
        self._shown = self._tokenizer.decode(self._ids)
        return delta
