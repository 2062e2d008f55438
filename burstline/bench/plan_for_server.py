"""The plan for a known server: token ids if it accepts them, otherwise text of the same lengths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub as hub
import numpy as np
from huggingface_hub import constants

from burstline.bench.server_session import Say, Site
from burstline.machine.catalogue import cached_config
from burstline.servers.host.ready import send
from burstline.servers.messages import EngineError
from burstline.servers.openai import tokenize_call, tokens_in
from burstline.wording import counted
from burstline.workloads.data_sets import Server
from burstline.workloads.load import Load
from burstline.workloads.model_files import TOKENIZER_FILE, local_tokenizer, read_tokenizer
from burstline.workloads.plan import BLOCK_TOK, Plan
from burstline.workloads.prompts import ASSUMED, Vocabulary, vocabulary_from_size, vocabulary_of_folder
from burstline.workloads.request import Request, RequestKind, WorkloadError
from burstline.workloads.text_prompts import Words, make_texts, words_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBES_TOK = (64, 96)
"""Two lengths: what a server adds to both alike, a chat template say, is known; anything else is not."""
ASK_TIMEOUT_S = 120.0
HUB_TIMEOUT_S = 5.0
"""How long the Hugging Face Hub may take to say whether it has a file."""


def plan_for(load: Load, site: Site, model: str | None, say: Say) -> tuple[Plan, Server]:
    """Every request of the run, and what of the server it was planned for."""
    server = server_for(load, site, model, say)
    plan = load.plan(server)
    for reason, n in plan.dropped.items():
        say(f"{counted(n, 'row')} left out: {reason}")
    _check_taken(plan, site, say)  # as it is sent: engines that take text only have no words for ids
    return plan, server


def server_for(load: Load, site: Site, model: str | None, say: Say) -> Server:
    """What this load's planning needs to know of the server, which is asked for what it does not say."""
    tokenizer, takes_ids = load.spec.tokenizer, site.capabilities.token_id_prompts
    if load.has_sessions and not site.engine.returns_ids:
        takes_ids = False  # a conversation of ids goes on with the ids of the reply
    vocabulary = vocabulary_for(tokenizer, load.spec.vocab_size, model, site) if takes_ids else ASSUMED
    counter = None
    try:
        counter = tokenizer_for(tokenizer, model, site) if load.needs_text or not takes_ids else None
    except WorkloadError:
        if tokenizer is not None or site.engine.speaks != "chat" or not load.is_all_chats:
            raise
        say("No tokenizer is known: only the server counts; rows without output_tokens get --output-tokens")
    words = None if takes_ids or counter is None else words_of(counter)
    n_extra_tok = 0 if words is None else _extra_tokens(site, words, say, tokenizer)
    template = None
    if load.needs_text and counter is not None:
        from burstline.workloads.chat import template_of  # here: it takes jinja2

        places = [folder for folder in (tokenizer, Path(model) if model else None) if folder is not None]
        template = next(filter(None, map(template_of, places)), None)
    return Server(
        vocabulary,
        counter,
        template,
        words,
        takes_ids,
        speaks_chat=site.engine.speaks == "chat",
        forces_length=site.capabilities.forced_output_length,
        n_extra_tok=n_extra_tok,
        block_tok=site.identity.kv_block_tok or BLOCK_TOK,
        max_tok=site.identity.max_model_len,
    )


_PATHS = {RequestKind.EMBED: "/embeddings", RequestKind.RERANK: "/rerank"}


def _check_taken(plan: Plan, site: Site, say: Say) -> None:
    """WorkloadError where this engine's dialect has no words for the plan's requests."""
    request = plan.requests[0]
    path = site.engine.encode(request, site.target).path
    wanted = _PATHS.get(request.kind, "/chat/completions" if request.messages else None)
    if wanted is not None and not path.endswith(wanted):
        raise WorkloadError(f"{site.engine.title} is used through {path}; this load needs {wanted}")
    flag = site.engine.one_sampling_unless
    if request.sampling.temperature > 0 and flag and not (site.launch and flag in site.launch.argv):
        greedy = f"{site.engine.title} samples all requests as its first, the greedy one for readiness"
        if site.launch:
            raise WorkloadError(f"--temperature {request.sampling.temperature:g}: {greedy}; add -- {flag}")
        say(f"{greedy}, unless it was started with {flag}")


def tokenizer_for(folder: Path | None, model: str | None, site: Site) -> Tokenizer:
    """The tokenizer by which prompts are measured: the folder's, the model's, the Hub's."""
    tokenizer = local_tokenizer(folder, model)
    if tokenizer is None and folder is None and model is None:
        tokenizer = site.engine.tokenizer(site.identity)
        if tokenizer is None:  # some servers name their model by its folder
            tokenizer = local_tokenizer(local_folder(site.identity.model or site.target.model), None)
    if tokenizer is not None:
        return tokenizer

    name = model or site.target.model
    why = f"{folder} has no tokenizer.json"
    if folder is None:
        try:
            return _from_hub(name)
        except Exception as error:  # whatever the Hub's client makes of being offline
            why = str(error).splitlines()[0]
    raise WorkloadError(
        f"text prompts need the model's tokenizer: pass --tokenizer DIR with its tokenizer.json ({why})"
    )


def _from_hub(name: str) -> Tokenizer:
    """The tokenizer of a repository of the Hugging Face Hub: from the cache, else asked for once.

    The library alone would try again and again for half a minute where there is no way to the Hub.
    """
    path = hub.try_to_load_from_cache(name, TOKENIZER_FILE)
    if not isinstance(path, str):
        if constants.HF_HUB_OFFLINE:
            raise WorkloadError(f"{name} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set")
        url = hub.hf_hub_url(name, TOKENIZER_FILE)
        _within(
            HUB_TIMEOUT_S, lambda: hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S), f"asking for {url}"
        )
        path = hub.hf_hub_download(name, TOKENIZER_FILE, etag_timeout=HUB_TIMEOUT_S)
    return read_tokenizer(Path(path))


def _within(limit_s: float, ask: Callable[[], object], what: str) -> None:
    """Call it and raise what it raises; TimeoutError where it has not come back in time.

    In a thread, for looking up a host's name takes no timeout. One that is late does not hold up the exit.
    """
    answer: Future[object] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="with a time limit", daemon=True).start()
    try:
        answer.result(limit_s)
    except FutureTimeoutError:
        raise TimeoutError(f"{what}: no answer within {limit_s:g} s") from None


def _extra_tokens(site: Site, words: Words, say: Say, given: Path | None) -> int:
    """Tokens that the server adds to a text, equal for two lengths. `given` is the user's tokenizer."""
    texts = make_texts(PROBES_TOK, words, 0, "probe", range(len(PROBES_TOK)))
    short, long = PROBES_TOK
    asked = (Request(0, None, text, n, 1) for text, n in zip(texts, PROBES_TOK, strict=True))
    calls = (site.engine.encode(each, site.target) for each in asked)
    replies = (site.engine.decode(send(site.target, call, ASK_TIMEOUT_S)) for call in calls)
    first, second = (reply.n_prompt_tok for reply in replies)
    if first is None or second is None:
        say("The server does not report prompt lengths: they come from the tokenizer only")
        return 0
    if first - short != second - long:
        counts = f"the server counts {first} and {second} tokens in texts of {short} and {long}"
        if given is None:
            raise WorkloadError(f"{counts}: it uses another tokenizer; pass --tokenizer DIR")
        say(f"{counts}: only by {given} are prompts as long as asked")
        return 0
    return first - short


# Which token ids prompts may be drawn from: only ids that are known to be in the server's vocabulary.

LEAST_IDS = 64
"""Fewer different ids make prompts that are no longer random."""
N_WORDS_A_TEXT = 400
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def vocabulary_for(
    tokenizer: Path | None, vocab_size: int | None, model: str | None, site: Site
) -> Vocabulary:
    """The user's word first, then the model's folder, the server's own size, its folder, its tokenizer."""
    if vocab_size is not None:
        return vocabulary_from_size(vocab_size)
    if tokenizer is not None:
        if (vocabulary := vocabulary_of_folder(tokenizer)) is None:
            raise WorkloadError(f"--tokenizer {tokenizer}: expected a folder with tokenizer.json")
        return vocabulary
    if model is not None and (vocabulary := vocabulary_of_folder(Path(model))) is not None:
        return vocabulary
    if site.identity.vocab_size is not None:
        return vocabulary_from_size(site.identity.vocab_size)
    folder = local_folder(site.identity.model) if site.identity.model else None
    if folder is not None and (vocabulary := vocabulary_of_folder(folder)) is not None:
        return vocabulary
    return _vocabulary_by_tokenizing(site)


def _vocabulary_by_tokenizing(site: Site) -> Vocabulary:
    """The ids that the server's own tokenizer makes of some text: a sample, but each of them is valid."""
    ids: set[int] = set()
    with suppress(EngineError):  # it has no such endpoint, and closes the connection
        for text in _texts() if site.engine.tokenizes else ():
            made = tokens_in(send(site.target, tokenize_call(text, site.target), ASK_TIMEOUT_S))
            if made is None:
                break
            ids |= set(made)
    # The lowest ids are control tokens and bytes in many vocabularies; a tokenizer may add one to each text.
    ordinary = sorted(token_id for token_id in ids if token_id > 2)
    if len(ordinary) < LEAST_IDS:
        raise WorkloadError(
            f"the vocabulary of {site.engine.title} at {site.target.url} is unknown: the server does not "
            "report its size, and this machine has no tokenizer of its model; pass --tokenizer DIR or "
            "--vocab-size N"
        )
    return Vocabulary(np.array(ordinary, dtype=np.uint32))


def _texts() -> Sequence[str]:
    """Syllables, words of two of them, and numbers: short texts that break into many different tokens."""
    syllables = [first + vowel + last for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS]
    pairs = [a + b for a, b in zip(syllables, reversed(syllables), strict=True)]
    words = syllables + pairs[::2] + [word.capitalize() for word in syllables[::3]]
    words += [str(n) for n in range(0, 2000, 7)]
    return [" ".join(words[k : k + N_WORDS_A_TEXT]) for k in range(0, len(words), N_WORDS_A_TEXT)]


def local_folder(model: str) -> Path | None:
    """The folder of a model on this machine: a path, or a snapshot in Hugging Face's cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    config = cached_config(model)
    return config.parent if config else None
