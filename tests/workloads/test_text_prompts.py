from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Shape, make_plan
from burstline.workloads.prompts import vocabulary_from_size
from burstline.workloads.request import WorkloadError
from burstline.workloads.text_prompts import Words, as_text, make_texts, words_of


@cache
def made_up_text() -> list[str]:
    draw = np.random.Generator(np.random.PCG64(5))
    syllables = [c + v + e for c in "bcdfghklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    lines = []
    for _ in range(300):
        words = ["".join(draw.choice(syllables, draw.integers(1, 4))) for _ in range(8)]
        end = draw.choice([".", "!", ", 42", " \u00e9t\u00e9", " \u4f60\u597d"])
        lines.append(" ".join(words).capitalize() + end)
    return lines


def with_bos(tokenizer: Tokenizer, bos: str = "<s>") -> Tokenizer:
    bos_id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bos_id)]
    )
    return tokenizer


def byte_bpe(*, prefix_space: bool = False, regex: bool = True, vocab: int = 3000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=regex)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(made_up_text(), trainer)
    return tokenizer


def llama3_like() -> Tokenizer:
    split = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
    tokenizer = byte_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return with_bos(tokenizer)


def llama2_like() -> Tokenizer:
    """SentencePiece's BPE as transformers converts it: spaces become a mark, nothing is split beforehand."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(made_up_text(), trainer)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_bos(tokenizer)


def unigram(*, bos: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=2000, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(made_up_text(), trainer)
    return with_bos(tokenizer) if bos else tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    trainer = trainers.WordPieceTrainer(vocab_size=2500, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(made_up_text(), trainer)
    ends = [("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def characters() -> Tokenizer:
    """Every character a token, spaces too: no word is one token."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!? "
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def truncating() -> Tokenizer:
    tokenizer = with_bos(byte_bpe())
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=256)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_bpe,
    "byte-level BPE with BOS": lambda: with_bos(byte_bpe()),
    "byte-level BPE with a leading space": lambda: byte_bpe(prefix_space=True),
    "byte-level BPE across words": lambda: byte_bpe(regex=False),
    "byte-level BPE of few merges": lambda: byte_bpe(vocab=300),
    "like Llama 3's": llama3_like,
    "like Llama 2's": llama2_like,
    "unigram": lambda: unigram(bos=False),
    "unigram with BOS": lambda: unigram(bos=True),
    "WordPiece with two specials": wordpiece,
    "characters": characters,
    "one that truncates and pads": truncating,
}


@cache
def words_for(name: str) -> Words:
    return words_of(TOKENIZERS[name]())


@pytest.fixture(scope="module")
def llama() -> Words:
    return words_for("like Llama 2's")


def lengths_of(words: Words, texts: list[str]) -> list[int]:
    return [len(words.tokenizer.encode(text).ids) for text in texts]


def test_every_text_has_exactly_the_planned_tokens_and_begins_as_the_salt_says(llama: Words) -> None:
    vocabulary = vocabulary_from_size(3000)
    plan = make_plan(Shape(Lengths(16, 300), Lengths(8, 8)), [0.0] * 40, vocabulary, seed=3)
    one, two = as_text(plan, llama, "5eed"), as_text(plan, llama, "feed")
    assert one == as_text(plan, llama, "5eed")
    for texts in (one, two):
        assert lengths_of(llama, [r.prompt_text or "" for r in texts.requests]) == [
            r.n_prompt_tok for r in plan.requests
        ]
    assert one.sha256 == two.sha256 != plan.sha256
    assert list(one.due_ns) == list(plan.due_ns)
    heads = {(r.prompt_text or "")[:8] for plan in (one, two) for r in plan.requests}
    assert len(heads) > 70
    tails = [(r.prompt_text or "").split(" ")[10:-4] for r in (one.requests[0], two.requests[0])]
    assert tails[0] == tails[1] != []


def test_what_the_server_adds_is_left_out_of_the_text(llama: Words) -> None:
    vocabulary = vocabulary_from_size(3000)
    plan = make_plan(Shape(Lengths(50, 50), Lengths(8, 8)), [0.0] * 3, vocabulary, seed=3)
    texts = [r.prompt_text or "" for r in as_text(plan, llama, "0", n_extra_tok=7).requests]
    assert lengths_of(llama, texts) == [43, 43, 43]


def test_a_prompt_that_has_no_room_for_a_word_is_refused(llama: Words) -> None:
    assert lengths_of(llama, make_texts([2], llama, 0, "0", [0])) == [2]
    with pytest.raises(WorkloadError, match=r"1 of them are special.*expected at least 2"):
        make_texts([1], llama, 0, "0", [0])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_short_and_long_texts_are_exact_for_every_kind_of_tokenizer(name: str) -> None:
    words = words_for(name)
    n_special = words.count([""])[0]
    n_toks = [n_special + 1 + n for n in (*range(30), 100, 257, 512)]
    texts = make_texts(n_toks, words, 1, "5eed", range(len(n_toks)))
    assert lengths_of(words, texts) == n_toks
    assert len(set(texts[20:])) == len(texts[20:])


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"byte-level BPE across words"}))
def test_what_a_chat_template_puts_around_a_text_adds_the_same_to_every_one(name: str) -> None:
    words = words_for(name)
    texts = make_texts([40] * 20, words, 1, "5eed", range(20))
    for before, after in (("user: ", "\n"), ("user\n", "\nbot:"), ("[INST] ", " [/INST]")):
        assert len(set(lengths_of(words, [before + text + after for text in texts]))) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ten_thousand_texts_are_all_exact(name: str) -> None:
    words, n = words_for(name), 10_000
    draw = np.random.Generator(np.random.PCG64(9))
    n_toks = (words.count([""])[0] + draw.integers(1, 200, n)).tolist()
    texts = make_texts(n_toks, words, 2, "5eed", range(n))
    assert lengths_of(words, texts) == n_toks
