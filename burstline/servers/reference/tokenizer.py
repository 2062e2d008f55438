"""Text to token ids and back: a folder's own tokenizer, or one made in memory for the built-in model."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HELD_TOK = 4
"""A UTF-8 character is four bytes at most, so text that stays broken for longer will not mend."""


def load(folder: Path | None, vocab_size: int) -> Tokenizer:
    """The folder's `tokenizer.json`, or the built-in tokenizer where there is none."""
    if folder is not None and (folder / "tokenizer.json").exists():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    return built_in(vocab_size)


def built_in(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids (257 at least): EOS is 0, then come all bytes, then words.

    Any text comes back as it went in, and every id is some text.
    """
    merges = list(islice(_beginnings(), vocab_size - 257))
    words = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _beginnings() -> Iterator[tuple[str, str]]:
    """Endless merges, shortest words first: " "+"a" to " "+"z", then " a"+"a" and so on."""
    words = ["Ġ"]  # how byte-level BPE writes a space
    for word in words:
        for letter in ascii_lowercase:
            yield word, letter
            words.append(word + letter)


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
        if text.endswith("\ufffd") and not last:
            if len(self._ids) > HELD_TOK:  # an end of text between the bytes of a character is no byte of it
                self._ids = [held for held in self._ids if self._tokenizer.decode([held])]
            if len(self._ids) <= HELD_TOK:
                return ""
            # What is broken at the front stays so; behind it a character may have begun.
            text = self._tokenizer.decode(out := self._ids[: -HELD_TOK + 1])
            delta = text[len(self._shown) :]
            self._ids, self._shown = self._ids[len(out) - 1 :], self._tokenizer.decode([out[-1]])
            return delta
        delta = text[len(self._shown) :]
        self._ids, self._shown = [token], self._tokenizer.decode([token])
        return delta
