"""The plan for a server that is there: token ids where it takes them, text of the same lengths elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub as hub
from huggingface_hub import constants

from burstline.bench.load_options import Load
from burstline.bench.server_session import Site
from burstline.bench.vocabulary import ASSUMED, vocabulary_for
from burstline.servers.host.ready import send
from burstline.servers.identity import Identity
from burstline.workloads.data_sets import Materials
from burstline.workloads.plan import PRIMING, Plan
from burstline.workloads.prefixes import BLOCK_TOK, expected_hit_fraction
from burstline.workloads.prompts import Vocabulary
from burstline.workloads.request import Request, RequestKind, WorkloadError
from burstline.workloads.text_prompts import Words, as_chat, as_text, make_texts, words_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBES_TOK = (64, 96)
"""Two lengths: what a server adds to both alike, a chat template say, is known; anything else is not."""
ASK_TIMEOUT_S = 120.0
HUB_TIMEOUT_S = 5.0
"""How long the Hugging Face Hub may take to say whether it has a file."""
TOKENIZER_FILE = "tokenizer.json"

Say = Callable[[str], None]


def plan_for(load: Load, site: Site, model: str | None, say: Say) -> tuple[Plan, Vocabulary, float | None]:
    """Every request of the run, the vocabulary that prompts of ids were drawn from, and the share of the
    prompts' tokens that a cache could serve (None where replies decide it)."""
    tokenizer, takes_ids = load.spec.tokenizer, site.capabilities.token_id_prompts
    if load.has_sessions and not site.engine.returns_ids:
        takes_ids = False  # a conversation of ids goes on with the ids of the reply
    vocabulary = vocabulary_for(tokenizer, load.spec.vocab_size, model, site) if takes_ids else ASSUMED
    counter = tokenizer_for(tokenizer, model, site) if load.work.needs_text or not takes_ids else None
    words = None if takes_ids or counter is None else words_of(counter)
    n_extra_tok = 0 if words is None else _extra_tokens(site, words, say)
    materials = None
    if load.work.needs_text and counter is not None:
        materials = _materials(counter, site, tokenizer, model, n_extra_tok, takes_ids=takes_ids)
    plan = load.plan(vocabulary, materials, site.identity)
    for reason, n in plan.dropped.items():
        say(f"{n:,} rows left out: {reason}")
    if words is not None:
        plan = as_text(plan, words, load.spec.salt, n_extra_tok)
    if load.has_sessions and site.engine.speaks == "chat":
        plan = as_chat(plan)
    _check_taken(plan, site)  # as it is sent: engines that take text only have no words for ids
    return plan, vocabulary, _expected_cached(plan, load, site.identity, counter)


_PATHS = {RequestKind.EMBED: "/embeddings", RequestKind.RERANK: "/rerank"}


def _check_taken(plan: Plan, site: Site) -> None:
    """WorkloadError where this engine's dialect has no words for the plan's requests."""
    request = plan.requests[0]
    path = site.engine.encode(request, site.target).path
    wanted = _PATHS.get(request.kind, "/chat/completions" if request.messages else None)
    if wanted is not None and not path.endswith(wanted):
        raise WorkloadError(f"{site.engine.title} is asked at {path}; this load needs {wanted}")
    if request.turn is not None and "completions" not in path:
        raise WorkloadError(f"{site.engine.title} is asked at {path}; sessions need an OpenAI endpoint")


def _expected_cached(plan: Plan, load: Load, identity: Identity, counter: Tokenizer | None) -> float | None:
    """The share of prompt tokens that a cache without limits could serve; None where replies decide it."""
    if load.has_sessions or load.shape.kind is not RequestKind.GENERATE:
        return None
    if identity.prefix_cache is False:
        return 0.0
    primed = next((stage.requests for stage in plan.stages if stage.name == PRIMING), ())
    block_tok = identity.kv_block_tok or BLOCK_TOK
    return expected_hit_fraction(plan.requests, load.spec.salt, block_tok, primed, counter)


def _materials(
    counter: Tokenizer,
    site: Site,
    folder: Path | None,
    model: str | None,
    n_extra_tok: int,
    *,
    takes_ids: bool,
) -> Materials:
    from burstline.workloads.chat import template_of

    counter.no_truncation()
    counter.no_padding()
    places = [where for where in (folder, Path(model) if model else None) if where is not None]
    return Materials(
        counter,
        next((template for where in places if (template := template_of(where))), None),
        takes_ids,
        site.engine.speaks == "chat",
        n_extra_tok,
        site.identity.max_model_len,
    )


def local_tokenizer(folder: Path | None, model: str | None) -> Tokenizer | None:
    """The folder's tokenizer, else the model's; None where there is no such file."""
    for where in (folder, Path(model) if model else None):
        if where is not None and (where / TOKENIZER_FILE).is_file():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(where / TOKENIZER_FILE))
    return None


def tokenizer_for(folder: Path | None, model: str | None, site: Site) -> Tokenizer:
    """The tokenizer by which prompts are measured: the folder's, the model's, the Hub's."""
    tokenizer = local_tokenizer(folder, model)
    if tokenizer is None and folder is None and model is None:
        tokenizer = site.engine.tokenizer(site.identity)
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
        f"prompts of text need the model's tokenizer to be counted: give --tokenizer DIR with its "
        f"tokenizer.json ({why})"
    )


def _from_hub(name: str) -> Tokenizer:
    """The tokenizer of a repository of the Hugging Face Hub: from the cache, else asked for once.

    The library alone would try again and again for half a minute where there is no way to the Hub.
    """
    from tokenizers import Tokenizer

    path = hub.try_to_load_from_cache(name, TOKENIZER_FILE)
    if not isinstance(path, str):
        if constants.HF_HUB_OFFLINE:
            raise WorkloadError(f"{name} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set")
        url = hub.hf_hub_url(name, TOKENIZER_FILE)
        _within(
            HUB_TIMEOUT_S, lambda: hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S), f"asking for {url}"
        )
        path = hub.hf_hub_download(name, TOKENIZER_FILE, etag_timeout=HUB_TIMEOUT_S)
    return Tokenizer.from_file(path)


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


def _extra_tokens(site: Site, words: Words, say: Say) -> int:
    """What the server counts beyond our count of the same text, alike for two lengths of it."""
    texts = make_texts(PROBES_TOK, words, 0, "probe", range(len(PROBES_TOK)))
    first, second = (_counted(site, text, n) for text, n in zip(texts, PROBES_TOK, strict=True))
    if first is None or second is None:
        say("The server does not report prompt lengths: they rest on the tokenizer alone")
        return 0
    if first - PROBES_TOK[0] != second - PROBES_TOK[1]:
        raise WorkloadError(
            f"texts of {PROBES_TOK[0]} and {PROBES_TOK[1]} tokens count {first} and {second} at the "
            "server: that is not its tokenizer; give --tokenizer DIR"
        )
    return first - PROBES_TOK[0]


def _counted(site: Site, text: str, n_tok: int) -> int | None:
    call = site.engine.encode(Request(0, None, text, n_tok, 1), site.target)
    return site.engine.decode(send(site.target, call, ASK_TIMEOUT_S)).n_prompt_tok
