"""Text of others: remove secrets, and escape it so that it cannot control a terminal.

Secrets are known by value once `learn` has seen them, from the command on (`learn_from`), and by their names
and forms. `printable` is for every text that a server can influence. All here is linear in a text's length.
"""

import base64
import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self
from unicodedata import category
from urllib.parse import quote, quote_plus, unquote

REMOVED: Final = "(removed)"
LEAST_KNOWN: Final = 5
"""Shorter values are removed by their names only: a word like "key" stands in too many places."""
OF_PROTOCOL: Final = frozenset(
    """abort array assistant basic bearer bfloat16 chunk complete content default dummy empty error event
    failed false finish_reason float float16 float32 function index input interrupted length lightllm llamacpp
    model object openai openai-chat output prompt reference retry running sglang string system token tokens
    transformers trtllm truth usage""".split()  # noqa: SIM905
)
"""Words by which replies and runs are read, in lower case: as a key they are removed by their names only."""
_OF_TEXT: Final = re.sub(
    r"\w+",
    r"(?<!\g<0>)",
    "audio bos cls draft each end eos first image input last mask max new next num output pad per prompt sep "
    "special start stop think unk video",
).replace(" ", "")
"""What a token is of that is no secret: eos_token, time_per_token."""

# The names of secrets, each by its end, in text, options, variables, headers and JSON.
_NAME: Final = (
    r"(?:(?i:api[_-]?keys?|[a-z0-9][_-]keys?|secrets?|passw(?:or)?ds?|passphrase|(?<![a-z])pwd|authorization"
    rf"|credentials?|cookies?|signature|(?<![a-z])(?:auth|jwt|bearer|sig|pin|webhook)|[_-]pat|{_OF_TEXT}[_-]token"
    r"|(?:hf|hub|auth|access|bearer|api|refresh|session|security)tokens?|session[_-]?id)"
    r"|[a-z0-9](?:Key|Token|Auth|KeyId|Secret))"
)
_EITHER: Final = r"(?<![a-zA-Z])(?i:tokens|licen[cs]e)"
_OF_KEY: Final = r"(?!\W{1,9}\d+[a-zA-Z]{0,9}\b)" + "".join(
    rf"(?=\W{{1,9}}{what})" for what in (r"[\w-]{8}", r"[\d_-]{0,64}[a-zA-Z]", r"(?:[a-zA-Z_-]{0,64}\d){3}")
)
"""Names of counts, terms or keys; and a key's value: eight characters, of them a letter and three digits."""
_SECRET_NAME: Final = re.compile(rf"(?:{_NAME}|^(?i:auth|key|token))$")
# `Authorization: Bearer X`, `--api-key=X`, `X-API-Key: X`, `{"api_key": "X"}`, `api_key=['X']`, `?key=X`.
_SCHEME: Final = r"(?i:bearer|basic|digest|token)[^\S\n]+"
_GAP: Final = r"[^\S\n]{0,64}"
_VALUE: Final = r"(?!\(removed\))(\[[^\]\n]*\]?+|[^\s\"'\\,;&#)\]}]+)"  # twice redacted is once redacted
_ASSIGNED: Final = re.compile(
    rf"((?:{_NAME}|{_EITHER}{_OF_KEY}|(?<=[?&\"'])(?i:token)|(?<=[?&])(?i:key))(?:\\?[\"'])?{_GAP}(?:=|:|%3D|%3A){_GAP}"
    rf"(?:\\?[\"'])?+(?:{_SCHEME})?+){_VALUE}"
)
_OPTION: Final = re.compile(rf"(?<![\w-])(--?(?:[\w-]{{0,64}}{_NAME}|(?i:key|token))[^\S\n]+[\"']?+){_VALUE}")
_BEARER: Final = re.compile(r"\b((?:Bearer|Basic)[^\S\n]+)([\w.~+/=-]{5,})", re.IGNORECASE)
_PLAIN: Final = "(?i:branch|download|dtype|format|lang|rev|revision|version)"
# Bounded, and from the first letter of a scheme on: else each letter of a long word begins a search.
URL_LOGIN: Final = re.compile(
    r"((?<![\w+.-])[a-zA-Z][\w+.-]{1,31}://)((?:[^\s/@\"'<>:]{0,512}:[^\s\"'<>]{0,512})|[^\s/@\"'<>:]{1,512})(?=@)"
)
_QUERY: Final = re.compile(rf"([?&#](?!{_PLAIN}=)(?:[^?&#=]{{0,64}}=)?+)((?!\(removed\))[^?&#]+)")
_FORMS: Final = (_ASSIGNED, _OPTION, _BEARER, URL_LOGIN)
_HINTS: Final = (
    *("key", "secret", "pass", "pwd", "auth", "credential", "cookie", "sig", "jwt", "bearer", "_pat", "-pat"),
    *("webhook", "token", "basic", "://", "session", "pin", "licen"),
)
"""Each form has one of them, in lower case: they are found a hundred times as fast."""

_WORDS: Final = re.compile(r"[A-Z]?[a-z]+(?:[_ -][A-Za-z]+)*")
"""What reads as words is no secret of its own where it is only a part of one."""
_INNOCENT: Final = re.compile(r"(?i:accept(-encoding|-language)?|cache-control|content-type|user-agent)")

_learned: set[str] = set()
_known: set[str] = set()
_known_text: re.Pattern[str] | None = None
_known_bytes: re.Pattern[bytes] | None = None


def without_known(text: str) -> str:
    """The text without the values that were learned."""
    return text if _known_text is None else _known_text.sub(REMOVED, text)


def redacted(text: str) -> str:
    """The text without secrets."""
    text = without_known(text)
    for form in _forms_in(text):
        text = form.sub(rf"\1{REMOVED}", text)
    return text


def _forms_in(text: str) -> tuple[re.Pattern[str], ...]:
    lower = text.lower()
    return _FORMS if any(hint in lower for hint in _HINTS) else ()


def printable(text: str, limit: int | None = None) -> str:
    """The text, cut to `limit`, with what steers a terminal or hides text escaped, but for LF and tabs."""
    if limit is not None and len(text) > limit:
        text = text[:limit] + " ..."
    unseen = () if text.isprintable() else {c for c in set(text).difference("\n\t") if not c.isprintable()}
    return text.translate({ord(c): ascii(c)[1:-1] for c in unseen if category(c) != "Zs"}) if unseen else text


def words_of_server(text: str, limit: int = 2000) -> str:
    """A server's text on one line, printable and without secrets, so that it cannot forge our output."""
    return printable(" ".join(redacted(text[: 4 * limit]).split()), limit)


def can_be_known(secret: str) -> bool:
    """Whether a secret is removed where others repeat it: it is not too short, and no word of a protocol."""
    return len(secret) >= LEAST_KNOWN and secret.lower() not in OF_PROTOCOL


def learn(*secrets: str | None) -> None:
    """From now on remove these values wherever they stand, in each encoding that a server may use."""
    global _known_text, _known_bytes
    _learned.update(more := set(filter(can_be_known, filter(None, secrets))))
    _known.update(*map(_encodings, more))
    if _known:
        longest_first = "|".join(map(re.escape, sorted(_known, key=lambda form: (-len(form), form))))
        _known_text, _known_bytes = re.compile(longest_first), re.compile(longest_first.encode())


def known_secrets() -> tuple[str, ...]:
    """All that was learned, for a child that writes as well."""
    return tuple(sorted(_learned))


def known_in(data: bytes) -> Iterator[tuple[int, int]]:
    """Where known values stand in raw bytes: from, to."""
    return iter(()) if _known_bytes is None else (found.span() for found in _known_bytes.finditer(data))


def n_unfinished(data: bytes) -> int:
    """How many bytes at the end may be the beginning of a known value."""
    forms = [form.encode() for form in _known]
    ends = range(min(max(map(len, forms), default=1) - 1, len(data)), 0, -1)
    return next((n for n in ends if any(form.startswith(data[-n:]) for form in forms)), 0)


def secrets_in(text: str, *forms: re.Pattern[str]) -> Iterator[str]:
    """What the forms of text say is a secret, also as it is sent where a URL quotes it."""
    for form in forms or _forms_in(text):
        for found in form.finditer(text):
            secret = found[2]
            parts = re.findall(r"[^\s,'\"]+", secret[1:-1]) if secret[0] == "[" else [secret]
            parts += [secret.partition(":")[2] or secret] * (form is URL_LOGIN)
            yield from (way(part) for part in parts for way in (str, unquote))


def _encodings(secret: str) -> set[str]:
    as_json = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    percent = {quote(secret), quote(secret, safe=""), quote_plus(secret)}
    lower = {re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), form) for form in percent}
    slashes = {form.replace("/", "\\/") for form in as_json}
    in_base64 = {base64.b64encode(secret.encode()).decode()} if ":" in secret else set()
    as_html = {html.escape(secret), html.escape(secret).replace("&#x27;", "'")}
    return {secret, *as_json, *slashes, *percent, *lower, *as_html, *in_base64}


def names_secret(name: Any, value: Any = "") -> bool:
    """Whether an option, a variable, a header or a key of JSON with this value is named as a secret is."""
    name, first = str(name).lstrip("-"), value[0] if isinstance(value, list) and value else value
    is_key = isinstance(first, str) and re.search(f"{_EITHER}$", name) and re.match(_OF_KEY, f"={first}")
    return bool(is_key or _SECRET_NAME.search(name))


@dataclass(frozen=True, slots=True)
class Secret:
    """A text whose secrets are known from now on and not `shown`; only a server or a child is told it."""

    _text: str = field(repr=False)
    shown: str = REMOVED

    def __post_init__(self) -> None:
        if self.shown == REMOVED:
            learn(self._text)

    @classmethod
    def words(cls, *words: str) -> tuple[Self, ...]:
        """The words of a command, of which names and forms say what is secret: `--header`, 'X-Key: 5'."""
        shown = tuple(_words(words, found := list[str]()))
        learn(*found)
        return tuple(map(cls, words, shown))

    def reveal(self) -> str:
        return self._text


def learn_from(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Learn every secret that the command line or the environment names as one, commands within it too."""
    found = [value for name, value in environ.items() if names_secret(name, value) and name != "PWD"]
    _shown(argv, found)
    learn(*found, *(secret for value in environ.values() for secret in secrets_in(value, URL_LOGIN)))


def without_secrets(value: Any) -> Any:
    """The JSON value with every key, token and password replaced by "(removed)", its text printable.

    Names decide (of `--header 'NAME: VALUE'` all but innocent ones), forms (`Bearer ...`, `http://user:password@host`)
    and values that were learned. A list may be a command; a text in it may be one, too, or JSON.
    """
    return _shown(value, [])


def _shown(value: Any, found: list[str], *, hidden: bool = False) -> Any:
    """The JSON value as it may be shown; secrets in it, such as each text that is `hidden`, go to `found`."""
    shown = value
    if isinstance(value, Mapping):
        shown = {k: _shown(each, found, hidden=hidden or names_secret(k, each)) for k, each in value.items()}
    elif isinstance(value, str):
        found += [value] if hidden else []
        shown = printable(redacted(value))
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        shown = [_shown(each, found, hidden=True) for each in value] if hidden else list(_words(value, found))
    return REMOVED if hidden and value else shown


def _words(items: Iterable[Any], found: list[str]) -> Iterator[Any]:
    """Each word of a command as it may be shown; an item may be any JSON value."""
    option = ""
    for item in items:
        word = item if isinstance(item, str) else ""
        before = "" if names_secret(option) else re.match(r"(?:--?[\w-]+=)?", word)[0]  # type: ignore[index]
        flag, value = before[:-1] or option, word[len(before) :]
        name, colon, content = value.partition(":")
        if names_secret(flag, value):
            found.append(value)
            yield before + REMOVED
        elif flag in ("--header", "-H") and colon and not _INNOCENT.fullmatch(name.strip()):
            found += _of_header(name.strip(), content.strip())
            yield f"{before}{printable(name)}: {REMOVED}"
        else:
            yield before + _within(value, found) if word else _shown(item, found)
        option = word if word.startswith("-") and not before else ""


def _within(text: str, found: list[str]) -> str:
    """A text as it may be shown: JSON and a command are read as what they are."""
    found += secrets_in(text)
    is_json = text.startswith(("{", "["))
    with suppress(ValueError, RecursionError):  # it is neither
        if is_json or " -" in text:
            value = json.loads(text) if is_json else shlex.split(text)
            if (clean := _shown(value, found)) != value:
                text = json.dumps(clean) if is_json else shlex.join(clean)
    shown = printable(redacted(text))
    if re.match(r"[a-zA-Z][\w+.-]{1,31}://\S+$", shown):
        found += (way(each[2]) for each in _QUERY.finditer(shown) for way in (str, unquote))
        shown = _QUERY.sub(rf"\1{REMOVED}", shown)
    return shown


def _of_header(name: str, value: str) -> Iterator[str]:
    """A header that each request carries, and each part of it that may be quoted alone."""
    words = [part for word in re.split(r"[\s;,]+", value) for part in (word, word.partition("=")[2])]
    first, *more = [word for word in words if word.strip("=")] or [value]
    if first.lower() == "basic" and more:
        with suppress(ValueError):
            more += base64.b64decode(more[0], validate=True).decode(errors="replace").split(":", 1)
    yield from (value, *(part for part in (first, *more) if not _WORDS.fullmatch(part)))
    if names_secret(name) and len(more) == 1:  # the first is the scheme
        yield more[0]
