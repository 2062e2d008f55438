"""Drawn secrets, at each place where a user can give one, quoted back in each way: none is in what we write."""

from __future__ import annotations

import base64
import html
import json
import os
import random
import shlex
import string
import sys
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from burstline.loadgen.capture.masking import masked_reply
from burstline.servers import redact
from burstline.servers.messages import EngineError
from burstline.servers.redact import Secret, learn_from, without_secrets
from tests.faults.lab import noted
from tests.secrets_learned import forget
from tests.seeds import SEED

N_DRAWS = int(os.environ.get("LAB_SECRETS", "60"))
WORDS = ("open", "sesame", "correct", "horse", "battery", "staple", "token", "model", "length", "Bearer")
ALPHABETS = (
    string.ascii_lowercase,
    string.digits,
    string.ascii_letters + string.digits + "+/=",
    string.ascii_letters + "/?#[]@!$&'()*+=%~",
    string.ascii_letters + "\"\\<>&'é{}:",
    "0123456789abcdef-",
)

Argv = tuple[list[str], dict[str, str]]


def a_secret(rng: random.Random) -> str:
    """5 to 80 characters that a header can hold, and no word of a protocol."""
    while True:
        if rng.random() < 0.2:
            value = rng.choice("-_.").join(rng.choices(WORDS, k=rng.randint(1, 5)))
        else:
            value = "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(5, 80)))
        if redact.can_be_known(value) and not value.startswith("-") and redact.REMOVED not in value:
            return value


def header(text: str) -> Callable[[str], Argv]:
    return lambda value: (["run", "--header", text.format(value)], {})


def in_url(value: str) -> Argv:
    return ["run", "--url", f"http://me:{quote(value, safe='')}@h"], {}


def key(value: str) -> Argv:
    Secret(value)
    return ["run", "--url", "http://h"], {"BURSTLINE_API_KEY": value}


def body(value: str) -> Argv:
    return [
        "run",
        "--extra-body",
        json.dumps({"n": 1, "deep": [{"user_token": value}], "secret": {"a": value}}),
    ], {}


def command(value: str) -> Argv:
    words = ["run", "--url", "http://h", "--header", f"X-Pin: {value}", "--", "--api-key", value]
    return ["gate", shlex.join(words), "http://h"], {}


PLACES: dict[str, Callable[[str], Argv]] = {
    "the key": key,
    "a URL's password": in_url,
    "a header of its own": header("X-Pin: {}"),
    "a bearer": header("Authorization: Bearer {}"),
    "a token": header("Authorization: Token {}"),
    "a header in one word": lambda value: ([f"--header=X-Pin: {value}"], {}),
    "a body": body,
    "a URL's query": lambda value: (["run", "--url", f"http://h/?page={quote(value, safe='')}"], {}),
    "an argument of the engine": lambda value: (["run", "--", "--api-key", value], {}),
    "an argument in one word": lambda value: (["run", "--", f"--api-key={value}"], {}),
    "JSON for the engine": lambda value: (["run", "--", "--override", json.dumps({"api_key": value})], {}),
    "a contender": command,
    "a client": lambda value: (["certify", "--client", shlex.join(["tool", "--password", value, "-q"])], {}),
    "a URL of the engine": lambda value: (["run", "--", f"https://h/m?sig={quote(value, safe='')}"], {}),
    "a variable": lambda value: (["run"], {"HF_TOKEN": value}),
}
WAYS: dict[str, Callable[[str], str]] = {
    "bare": lambda value: value,
    "in a sentence": lambda value: f"no such key: {value}, sorry",
    "twice": lambda value: f"{value} {value}",
    "in JSON": lambda value: json.dumps({"seen": [value]}),
    "in JSON of any character": lambda value: json.dumps([value], ensure_ascii=False),
    "in JSON with slashes": lambda value: json.dumps(value).replace("/", "\\/"),
    "as a part of a URL": lambda value: "/v1?a=" + quote(value, safe=""),
    "as a path": quote,
    "in a form": lambda value: "q=" + quote_plus(value),
    "in HTML": lambda value: f"<p>{html.escape(value)}</p>",
}


def written(argv: list[str], said: str) -> dict[str, str]:
    """All that we make of a command and of what others say: stored, printed, captured."""
    body = json.dumps({"error": {"message": said}, "n": 5}).encode()
    head = b"HTTP/1.1 401 No\r\ncontent-type: application/json\r\nx-said: %b\r\n\r\n"
    line = said.encode("utf-8")
    return {
        "manifest": json.dumps(without_secrets({"argv": argv, "repeat": shlex.join(without_secrets(argv))})),
        "log": redact.redacted(said + "\n"),
        "record": redact.words_of_server(said),
        "error": str(EngineError(said)),
        "terminal": redact.without_known(said),
        "capture": masked_reply(head % line + body).decode(),
        "text": masked_reply(b"HTTP/1.1 401 No\r\ncontent-type: text/plain\r\n\r\n" + line).decode(),
    }


def forms(value: str) -> set[str]:
    return {value, json.dumps(value)[1:-1], quote(value, safe=""), html.escape(value)}


@pytest.mark.slow
def test_no_drawn_secret_stands_in_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    began_s, hits = time.monotonic(), []
    for k in range(N_DRAWS):
        rng = random.Random(f"secrets {SEED} {k}")
        value, other = a_secret(rng), base64.b32encode(rng.randbytes(20)).decode()
        place, way = rng.choice(list(PLACES)), rng.choice(list(WAYS))
        seen = []
        for each in (value, other):  # what stands in both is ours
            forget(monkeypatch)
            argv, environ = PLACES[place](each)
            learn_from(argv, environ)
            seen.append(written(argv, WAYS[way](each)))
        ours, control = seen
        hits += [
            (place, way, name, value)
            for name, shown in ours.items()
            if any(shown.count(form) > control[name].count(form) for form in forms(value))
        ]
    noted(f"{N_DRAWS} drawn secrets", "0 hits", hits or "0 hits", time.monotonic() - began_s)
    assert not hits


def steps_of(work: Callable[[], object]) -> int:
    """How many lines of Python a piece of work takes."""
    n = 0

    def traced(*_: object) -> object:
        nonlocal n
        n += 1
        return traced

    before = sys.gettrace()
    sys.settrace(traced)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return n


UNITS = {
    "a word": "x",
    "JSON": '{"a": "open-sesame", "n": 5},\n',
    "URLs": "http://me:pa55@h ",
    "keys": "api_key=open-sesame ",
    "short words": "a bc def ",
    "headers": "X-Api-Key: open-sesame\r\nAccept: text/html\r\n",
    "counts and keys": "tokens=128 license: mit session_id=4711 ",
    "digits": "4711",
    "paths": "/a?b=c&d=e#",
    "quotes": '"\\',
    "the beginning of a secret": "open-sesam",
}
WORK: dict[str, Callable[[str], object]] = {
    "a text": redact.redacted,
    "a command": lambda text: without_secrets(["--x", text]),
    "a capture": lambda text: masked_reply(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + text.encode()
    ),
    "a log": lambda text: redact.n_unfinished(text.encode()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("work", ["a command", "a capture", "a log"])
@pytest.mark.parametrize("unit", ["JSON", "the beginning of a secret"])
def test_twice_the_text_takes_twice_the_steps(work: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = []
    for size in (1 << 20, 2 << 20):
        forget(monkeypatch)
        redact.learn("open-sesame")
        text = UNITS[unit] * (size // len(UNITS[unit]))
        n.append(steps_of(lambda text=text: WORK[work](text)))  # type: ignore[misc]
    assert n[1] <= 2.5 * n[0] + 100


@pytest.mark.measures
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("work", ["a text", "a command"])
@pytest.mark.parametrize("unit", UNITS)
def test_twice_the_text_takes_twice_the_time(work: str, unit: str) -> None:
    """What regular expressions do is no line of Python: the CPU's time says it, the least of two."""
    redact.learn("open-sesame")
    times_s = []
    for size in (1 << 20, 2 << 20):
        text, of_size = UNITS[unit] * (size // len(UNITS[unit])), []
        for _ in range(2):
            began_s = time.process_time()
            WORK[work](text)
            of_size.append(time.process_time() - began_s)
        times_s.append(min(of_size))
    assert times_s[1] <= 2.5 * times_s[0] + 0.05
