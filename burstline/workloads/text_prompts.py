"""Text prompts, for servers that accept no token ids, with an exact length in the model's tokens.

Words that are one token each are strung together and counted; where a tokenizer cannot be hit that way, the
end of the text is searched until the count is exact. Every prompt begins with words that the salt chose, so
that no prefix cache can serve it: cutting an overlong text to size, as servers offer, would cut off those.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from burstline.workloads.plan import Plan, fingerprint
from burstline.workloads.prompts import rng
from burstline.workloads.request import Request, WorkloadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

N_SALT_WORDS = 8
MAX_WORDS = 4096
ENOUGH_WORDS = 64
"""With fewer words than these, prompts would be too much alike."""
N_PASSES = 3
"""How often all texts are counted and resized by whole words, before those left are searched one by one."""
MAX_ROUNDS = 40
"""How often a text's end is searched for an exact count before we give up."""
N_VARIANTS = 12

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_KINDS = (
    re.compile(r"[a-z]{2,12}"),
    re.compile(r"[^\W\d_]{2,12}"),
    re.compile(r"[^\W_]+"),
    re.compile(r"\S+"),
)
"""What makes a good word, best first: plain ASCII, letters of any script, digits too, anything visible."""


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """What text prompts are made of: words of one tokenizer that cost `cost_tok` tokens each after a space.

    Those in `first` cost as much where no space stands before them: what a chat template puts there does not
    change the count, unless the tokenizer has pieces that reach across words.
    """

    tokenizer: "Tokenizer"
    words: tuple[str, ...]
    first: tuple[str, ...]
    cost_tok: int
    sha256: str

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, with the special ones that the tokenizer adds by itself."""
        return [len(encoding.ids) for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=True)]


def words_of(tokenizer: "Tokenizer") -> Words:
    """The words to make prompts of; WorkloadError where the tokenizer yields too few."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    candidates = _candidates(tokenizer)
    if len(candidates) < 2:
        raise WorkloadError("the tokenizer's pieces make no words; expected at least two that can be read")
    anchor = candidates[0]
    probe = Words(tokenizer, (), (), 1, digest)
    pair = probe.count([f"{anchor} {anchor}"])[0]
    costs = np.array(probe.count([f"{anchor} {word} {anchor}" for word in candidates])) - pair
    for cost_tok in sorted({int(cost) for cost in costs if cost > 0}):
        fitting = tuple(word for word, cost in zip(candidates, costs, strict=True) if cost == cost_tok)
        if len(fitting) >= min(ENOUGH_WORDS, len(candidates) // 4):
            return Words(tokenizer, fitting, _first(probe, fitting, cost_tok) or fitting, cost_tok, digest)
    raise WorkloadError("no words of this tokenizer have a constant number of tokens: use another one")


def as_text(plan: Plan, words: Words, salt: str, n_extra_tok: int = 0) -> Plan:
    """The plan with text for prompts: each exactly as long as planned, by this tokenizer, salt included.

    `n_extra_tok` is what the server adds to what the tokenizer counts (a chat template, say). The hash is
    that of the plan and the tokenizer: like every plan's, it leaves the salt out.
    """
    requests = _as_texts(plan.requests, words, plan.seed, salt, n_extra_tok)
    stages = tuple(
        replace(stage, requests=_as_texts(stage.requests, words, plan.seed, salt, n_extra_tok))
        for stage in plan.stages
    )
    digest = hashlib.sha256(f"{plan.sha256} as text by {words.sha256}".encode()).hexdigest()
    contents = fingerprint(requests, plan.due_ns)
    return replace(plan, requests=requests, sha256=digest, contents_sha256=contents, stages=stages)


def as_chat(plan: Plan) -> Plan:
    """The plan with each turn of a session as a message of its user, for chat endpoints."""
    requests = tuple(
        replace(r, prompt_text=None, messages=json.dumps([{"role": "user", "content": r.prompt_text}]))
        if r.turn is not None and r.prompt_text is not None
        else r
        for r in plan.requests
    )
    return replace(plan, requests=requests, contents_sha256=fingerprint(requests, plan.due_ns))


def _as_texts(
    requests: Sequence[Request], words: Words, seed: int, salt: str, n_extra_tok: int
) -> tuple[Request, ...]:
    """Drawn prompts as text. Equal ids become equal words, so that what shares a prefix still shares it."""
    asked = [r for r in requests if r.prompt_ids is not None]
    # A later turn of a session is what it adds to the conversation.
    targets = [
        len(r.prompt_ids or ()) if r.turn and r.turn.after else r.n_prompt_tok - n_extra_tok for r in asked
    ]
    families = [r.index if r.family is None else r.family for r in asked]
    texts = make_texts(targets, words, seed, salt, families, [r.prompt_ids or () for r in asked])
    made = {r.index: text for r, text in zip(asked, texts, strict=True)}
    pairs = ((r, made.get(r.index)) for r in requests)
    return tuple(r if text is None else replace(r, prompt_ids=None, prompt_text=text) for r, text in pairs)


def make_texts(
    n_toks: Sequence[int],
    words: Words,
    seed: int,
    salt: str,
    families: Sequence[int | str],
    prompts: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """One text per count of tokens, each beginning with words that the salt chose for its family.

    The words after those are drawn, or follow the ids of `prompts`, a word for each.
    Raises WorkloadError where a count is too small to hold a word, or cannot be hit.
    """
    n_special = words.count([""])[0]
    draw = rng(seed, "text prompts")
    given = [None] * len(n_toks) if prompts is None else prompts
    strings = [
        _strung(n_tok, n_special, words, draw if ids is None else ids, salt, family)
        for n_tok, family, ids in zip(n_toks, families, given, strict=True)
    ]
    searches = [rng(seed, f"text prompt {k} {family} {salt}") for k, family in enumerate(families)]
    wrong = list(range(len(strings)))
    for _ in range(N_PASSES):  # together, for counting many texts at once costs less
        counts = words.count([" ".join(strings[i]) for i in wrong])
        gaps = [(i, n_toks[i] - count) for i, count in zip(wrong, counts, strict=True)]
        wrong = [i for i, gap in gaps if gap]
        for i, gap in gaps:
            strings[i] = _resized(strings[i], gap, words, searches[i])
    texts = [" ".join(string) for string in strings]
    for i, count in zip(wrong, words.count([texts[i] for i in wrong]), strict=True):
        if count != n_toks[i]:
            texts[i] = _made_exact(texts[i], n_toks[i] - count, words, searches[i])
    return texts


def _first(probe: Words, fitting: Sequence[str], cost_tok: int) -> tuple[str, ...]:
    """Those that cost as much at the beginning of a text and of a line as after a space."""
    kept = list(fitting)
    for before in ("", "\n"):
        nothing = probe.count([before])[0]
        counts = probe.count([before + word for word in kept])
        kept = [word for word, count in zip(kept, counts, strict=True) if count - nothing == cost_tok]
    return tuple(kept)


def _candidates(tokenizer: "Tokenizer") -> list[str]:
    """Words that are pieces of the vocabulary, none twice, of the best kind that there are enough of."""
    ids = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    texts = {text.strip() for text in tokenizer.decode_batch([[i] for i in ids])}
    found: list[str] = []
    for kind in _KINDS:
        found = sorted(text for text in texts if kind.fullmatch(text) and "\ufffd" not in text)
        if len(found) >= 4 * ENOUGH_WORDS:
            break
    return found[:: -(-len(found) // MAX_WORDS) or 1]


def _strung(
    n_tok: int,
    n_special: int,
    words: Words,
    source: np.random.Generator | Sequence[int],
    salt: str,
    family: int | str,
) -> list[str]:
    """About as many words as make the count: the salt's first, then drawn ones, or one for each id."""
    n_words = (n_tok - n_special) // words.cost_tok
    if n_tok - n_special < 1:
        raise WorkloadError(
            f"a prompt of {n_tok} tokens: {n_special} of them are special, added by the server itself; "
            f"expected at least {n_special + 1}"
        )
    if isinstance(source, np.random.Generator):
        body = source.integers(0, len(words.words), max(n_words, 1))
    else:
        body = np.asarray(source, dtype=np.int64)[: max(n_words, 1)] % len(words.words)
    digest = hashlib.sha256(f"{salt}/{family}".encode()).digest()
    n_salt = min(N_SALT_WORDS, len(body))
    body[:n_salt] = np.frombuffer(digest, dtype="<u4")[:n_salt] % len(words.words)
    first = words.first[int.from_bytes(digest[-4:], "little") % len(words.first)]
    return [first, *(words.words[i] for i in body[1:])]


def _resized(string: list[str], gap: int, words: Words, search: np.random.Generator) -> list[str]:
    """The string with as many more or fewer words at its end as should close the gap."""
    n_words = gap // words.cost_tok
    if n_words < 0:
        return string[: max(1, len(string) + n_words)]
    return [*string, *(words.words[i] for i in search.integers(0, len(words.words), n_words))]


def _made_exact(text: str, gap: int, words: Words, search: np.random.Generator) -> str:
    """The text with an end that makes its count exact; `gap` is how many tokens it lacks."""
    n_tok = words.count([text])[0] + gap
    for _ in range(MAX_ROUNDS):
        variants = [_varied(text, gap, words, search) for _ in range(N_VARIANTS)]
        gaps = [n_tok - count for count in words.count(variants)]
        best = min(range(N_VARIANTS), key=lambda i: abs(gaps[i]))
        if abs(gaps[best]) < abs(gap) or abs(gap) <= 2:  # near the end, also sideways
            text, gap = variants[best], gaps[best]
        if gap == 0:
            return text
    raise WorkloadError(
        f"no text of exactly {n_tok} tokens was found for this tokenizer, the nearest has {n_tok - gap}; "
        "try another --prompt-tokens"
    )


def _varied(text: str, gap: int, words: Words, search: np.random.Generator) -> str:
    """The text with another end: longer where tokens lack, shorter where there are too many."""
    n_words = abs(gap) // words.cost_tok
    drawn = [words.words[i] for i in search.integers(0, len(words.words), n_words + 1)]
    letters = "".join(_LETTERS[i] for i in search.integers(0, len(_LETTERS), int(search.integers(1, 4))))
    parts = text.split(" ")
    if gap > 0:
        longer = ([text, *drawn[:n_words]], [text, *drawn], [text + letters], [text, letters])
        return " ".join(longer[int(search.integers(len(longer)))])
    kept = parts[: max(1, len(parts) - max(1, n_words))]
    fewer = (
        kept,
        [*kept[:-1], drawn[0]],
        [text[: -int(search.integers(1, 4))] or drawn[0]],
        [*kept, letters],
    )
    return " ".join(fewer[int(search.integers(len(fewer)))]).rstrip() or drawn[0]
