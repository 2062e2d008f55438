"""Prompts that people wrote: rows of a file or a dataset as requests, every row that does not fit counted.

A row has a `prompt`, or `messages` of a chat (OpenAI's form, images included, or ShareGPT's `conversations`);
perhaps a `reply` or `output_tokens`, which say how long the output is, a `timestamp` in seconds, a `session`,
`documents` for a rerank request. Columns of other names are mapped by `--data FILE,prompt=question`.
"""

import json
import tomllib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from burstline.workloads.arrivals import MOST_S
from burstline.workloads.lengths import MAX_TOK, Lengths
from burstline.workloads.plan import BLOCK_TOK
from burstline.workloads.prompts import ASSUMED, Vocabulary, rng
from burstline.workloads.request import Request, RequestKind, WorkloadError
from burstline.workloads.rows import Row, names_in, number_in, read_rows
from burstline.workloads.text_prompts import Words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TABLES: Final = tomllib.loads(Path(__file__).with_name("data_sets.toml").read_text("utf-8"))
COLUMNS: Final[Mapping[str, Sequence[str]]] = _TABLES["columns"]
_ROLES: Final[Mapping[str, str]] = _TABLES["roles"]
_N_AT_ONCE: Final = 256

Message = Mapping[str, Any]
Template = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Item:
    """One row: its number, and what it asks for. `at_s` is the row's own time, `pause_s` its think time."""

    row: int
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    reply: str | None = None
    output_tok: int | None = None
    at_s: float | None = None
    session: str | None = None
    pause_s: float | None = None
    documents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """What planning needs to know of the server: which ids it takes, who counts texts, what its limits are.

    `takes_ids`: prompts are sent as token ids, so that the server counts what was planned; else they are made
    of `words`. `speaks_chat`: a chat is sent as its messages, also where no `template` says how long it is.
    `forces_length`: replies can be made as long as asked. `n_extra_tok` is what the server adds to a text,
    `block_tok` the size of its cache blocks; `max_tok` bounds prompt and output together.
    """

    vocabulary: Vocabulary = ASSUMED
    tokenizer: "Tokenizer | None" = None
    template: Template | None = None
    words: Words | None = None
    takes_ids: bool = True
    speaks_chat: bool = False
    forces_length: bool = True
    n_extra_tok: int = 0
    block_tok: int = BLOCK_TOK
    max_tok: int | None = None

    def ids_of(self, texts: Sequence[str], *, whole: bool = False) -> list[list[int]]:
        """The ids of each text, `whole` with those that begin and end it; none without a tokenizer."""
        if self.tokenizer is None:
            return [[] for _ in texts]
        return [each.ids for each in self.tokenizer.encode_batch(texts, add_special_tokens=whole)]


NO_SERVER: Final = Server()
"""For plans that are never sent."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Rows that were read and fit so far; `dropped` counts those that did not, by reason."""

    source: str
    items: tuple[Item, ...]
    n_rows: int
    dropped: Mapping[str, int]

    def sampled(self, seed: int) -> tuple[Item, ...]:
        """The items in the order in which they are used; a sample is the first of them, none twice.

        Rows of one session stay together, in their own order.
        """
        sessions: dict[object, list[Item]] = {}
        for item in self.items:
            key = ("row", item.row) if item.session is None else item.session
            sessions.setdefault(key, []).append(item)
        rows = list(sessions.values())
        return tuple(item for k in rng(seed, "data rows").permutation(len(rows)) for item in rows[k])


def read_data(source: str, columns: Sequence[str] = (), split: str | None = None) -> DataSet:
    names = _mapped(columns)
    items: list[Item] = []
    dropped: Counter[str] = Counter()
    number = 0
    for number, row in read_rows(source, "--data", split):
        where = f"--data {source} row {number}"
        item = _item(row, number, names, where)
        if isinstance(item, str):
            dropped[item] += 1
        else:
            items.append(item)
    if not items:
        why = "; ".join(f"{n:,} {reason}" for reason, n in dropped.items()) or "there are none"
        raise WorkloadError(f"--data {source} row {number}: none of the rows can be used: {why}")
    return DataSet(source, tuple(items), len(items) + dropped.total(), dict(dropped))


def data_requests(
    items: Sequence[Item],
    server: Server,
    n_wanted: int | None,
    seed: int,
    output_tok: Lengths,
    kind: RequestKind = RequestKind.GENERATE,
) -> tuple[list[Request], list[Item], Counter[str]]:
    """Requests out of the first `n_wanted` items that fit (None: all), those items, and what did not fit."""
    if server.template is None and not server.speaks_chat:
        items = [as_plain_text(item) for item in items]
    outputs = rng(seed, "output lengths")
    requests: list[Request] = []
    used: list[Item] = []
    dropped: Counter[str] = Counter()
    for start in range(0, len(items), _N_AT_ONCE):
        part = items[start : start + _N_AT_ONCE]
        drawn = output_tok.draw(len(part), outputs)
        replies = server.ids_of([item.reply or "" for item in part])
        for item, ids, reply, n_drawn in zip(part, _prompts(part, server), replies, drawn, strict=True):
            if len(requests) == n_wanted:
                return requests, used, dropped
            n_output = item.output_tok or len(reply) or int(n_drawn)
            made = _request(len(requests), item, ids, n_output, server, kind)
            if isinstance(made, str):
                dropped[made] += 1
            else:
                requests.append(made)
                used.append(item)
    return requests, used, dropped


def as_plain_text(item: Item) -> Item:
    """A chat of text alone as one prompt, for a model without a chat template; other items as they are."""
    texts = [text for message in item.messages if isinstance(text := message.get("content"), str)]
    if item.prompt is not None or len(texts) < len(item.messages):
        return item
    return replace(item, prompt="\n".join(texts), messages=())


def _prompts(items: Sequence[Item], server: Server) -> list[list[int] | str | None]:
    """The token ids of each prompt; None of a chat that only the server can count, or why there are none."""
    known = [item.prompt for item in items if item.prompt is not None]
    encoded = iter(server.ids_of(known, whole=True))
    return [_chat_ids(item, server) if item.prompt is None else next(encoded) for item in items]


def _chat_ids(item: Item, server: Server) -> list[int] | str | None:
    if server.template is None or any(not isinstance(m.get("content"), str) for m in item.messages):
        return None
    try:
        text = server.template(item.messages)
    except WorkloadError:
        return "refused by the model's chat template"
    # A template writes the special tokens itself.
    return server.ids_of([text])[0]


def _request(
    index: int, item: Item, ids: list[int] | str | None, n_output: int, server: Server, kind: RequestKind
) -> Request | str:
    if isinstance(ids, str):
        return ids
    if kind is RequestKind.RERANK:
        if not item.documents or item.prompt is None:
            return "no documents to rank"
        n_tok = sum(map(len, server.ids_of([item.prompt, *item.documents], whole=True)))
        return Request(index, None, item.prompt, n_tok, 1, kind=kind, verbatim=True, documents=item.documents)
    n_output = 1 if kind is RequestKind.EMBED else n_output
    as_text = item.prompt is not None and not server.takes_ids
    n_prompt = 0 if ids is None else len(ids) + (server.n_extra_tok if as_text else 0)
    if ids is not None and not ids:
        return "an empty prompt"
    if server.max_tok is not None and n_prompt + n_output > server.max_tok:
        return f"longer than the model's limit of {server.max_tok:,} tokens"
    request = Request(index, None, None, n_prompt, n_output, kind=kind, verbatim=True)
    return prompted(request, item, ids, server)


def prompted(request: Request, item: Item, ids: list[int] | None, server: Server) -> Request:
    """The request with the row's prompt, in the form that the server takes."""
    if item.prompt is None:
        return replace(request, messages=json.dumps(item.messages, ensure_ascii=False))
    if server.takes_ids and ids is not None:
        return replace(request, prompt_ids=array("I", ids))
    return replace(request, prompt_text=item.prompt)


def _mapped(columns: Sequence[str]) -> dict[str, Sequence[str]]:
    names = dict(COLUMNS)
    for text in columns:
        name, equals, column = text.partition("=")
        if name not in COLUMNS or not equals or not column:
            raise WorkloadError(
                f"--data: {text!r}: expected NAME=COLUMN where NAME is one of {', '.join(COLUMNS)}"
            )
        names[name] = (column,)
    return names


def _item(row: Row, number: int, names: Mapping[str, Sequence[str]], where: str) -> Item | str:
    """A row's request, or the reason why it cannot be used; WorkloadError if it is malformed."""

    def value(name: str) -> Any:
        return next((row[column] for column in names[name] if row.get(column) is not None), None)

    mapped = [c for name in ("prompt", "messages") for c in names[name] if names[name] != COLUMNS[name]]
    missing = [column for column in mapped if column not in row]
    if missing or not any(column in row for name in ("prompt", "messages") for column in names[name]):
        raise WorkloadError(
            f"{where} has no column {(*missing, 'prompt')[0]!r}; it has "
            f"{names_in(row)}: name the right one: --data FILE,prompt=COLUMN"
        )
    chat, system = value("messages"), row.get("system") or None
    messages: tuple[Message, ...] = ()
    reply, prompt = value("reply"), value("prompt")
    if chat is not None:
        messages, last = _chat(chat, where)
        if messages and messages[0]["role"] != "system" and isinstance(system, str):
            messages = ({"role": "system", "content": system}, *messages)
        reply = last if reply is None else reply
        prompt = None
        if not messages:
            return "a chat without a user's message"
    elif not isinstance(prompt, str):
        if prompt is None:
            return "no prompt"
        raise WorkloadError(f"{where}: the prompt is of type {type(prompt).__name__}; expected text")
    elif not prompt.strip():
        return "an empty prompt"
    documents = value("documents") or ()
    if not isinstance(documents, list | tuple) or not all(isinstance(each, str) for each in documents):
        raise WorkloadError(f"{where}: documents: expected a list of texts")
    n_output = _number(value("output_tokens"), "output_tokens", where, whole=True)
    session = value("session")
    return Item(
        number, prompt, messages, reply if isinstance(reply, str) else None,
        None if n_output is None else int(n_output), _number(value("timestamp"), "timestamp", where),
        None if session is None else str(session), _number(value("pause_s"), "pause_s", where),
        tuple(documents),
    )  # fmt: skip


def _chat(chat: Any, where: str) -> tuple[tuple[Message, ...], str | None]:
    """The messages up to the last user's, and the assistant's answer to it."""
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise WorkloadError(f"{where}: messages: expected a list of objects with role and content")
    messages = []
    named = any(message.get("role") or message.get("from") for message in chat)
    for k, message in enumerate(chat):
        # SGLang's own format names no roles: they alternate.
        role = message.get("role") or message.get("from") if named else ("user", "assistant")[k % 2]
        role = _ROLES.get(str(role).lower(), role)
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or (content is None and not message.get("tool_calls")):
            raise WorkloadError(f"{where}: a message without role or content: {str(message)[:60]!r}")
        if not isinstance(content, str | list | None):
            raise WorkloadError(f"{where}: a message's content is {content!r:.60}; expected text or a list")
        own = {key: value for key, value in message.items() if key not in ("from", "value")}
        messages.append(own | {"role": role, "content": content})
    users = [k for k, message in enumerate(messages) if message["role"] in ("user", "tool")]
    if not users:
        return (), None
    after = messages[users[-1] + 1 :]
    reply = after[0]["content"] if after and after[0]["role"] == "assistant" else None
    return tuple(messages[: users[-1] + 1]), reply if isinstance(reply, str) else None


def _number(value: Any, name: str, where: str, *, whole: bool = False) -> float | None:
    if value is None:
        return None
    number = number_in(value)
    least, most = (1, MAX_TOK) if whole else (0, MOST_S)
    if not least <= number <= most or (whole and not number.is_integer()):
        what = f"a whole number from 1 to {most:,}" if whole else f"seconds from 0 to {most:g}"
        raise WorkloadError(f"{where}: {name} is {value!r:.60}; expected {what}")
    return number
