"""20 secrets in 12 ways of entry, quoted back in 5 ways: not one is in a file, on a stream or in a process title."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from burstline.loadgen.capture.capture import read_captures
from burstline.measure.record.rundir import open_run
from tests.faults import hostile
from tests.faults.lab import REPOSITORY, Command, Ended, burstline, files_with, noted
from tests.faults.test_processes import exported, runs_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRETS = {
    "a bearer": ["sk-Lab0-4f9a1c77e2"],
    "a token of letters": ["CORRECTHORSEBATTERY"],
    "a login's halves": ["lab-user-81c", "p4ss/w0rd+81c="],
    "a cookie's parts": ["sid-5up3rs3cr3t", "csrf-0x77aa99"],
    "a header of its own": ["x-api-L4b-31337", "9182736450"],
    "a URL's password": ["url p@ss:w0rd/0042"],
    "the key of the environment": ["env/k3y+0042=="],
    "a body": ["body-4uth-0042", 'body"quo\\ted-0042', "body-list-0042"],
    "variables of the engine": ["hf_Lab0042abcdef", "var-s3cr3t-0042"],
    "arguments of the engine": ["arg-k3y-0042", "arg-jsOn-0042"],
    "a URL of the engine": ["hub-p4ss-0042", "hub-t0ken-0042"],
    "a suite's file": ["suite-hdr-0042"],
}
VALUES = [value for values in SECRETS.values() for value in values]
LOAD = ("--requests", "40", "--prompt-tokens", "8", "--output-tokens", "4")
ATTACH = ("--engine", "vllm", "--vocab-size", "1000", "--model", "m", *LOAD)


def needles() -> list[bytes]:
    forms = set()
    for value in VALUES:
        forms |= {
            value,
            quote(value),
            quote(value, safe=""),
            json.dumps(value)[1:-1],
            value.replace("/", "\\/"),
        }
    for user, password in (SECRETS["a login's halves"], ("user", *SECRETS["a URL's password"])):
        forms.add(base64.b64encode(f"{user}:{password}".encode()).decode())
    return [form.encode() for form in sorted(forms)]


def quotes(sock: socket.socket, asked: hostile.Asked) -> None:
    """Refuses, with all that may be secret in the request: whole lines, bare values, halves, JSON, a long text."""
    lines = [line for line in asked.head.decode("latin-1").split("\r\n")[1:] if ": " in line]
    values = [line.partition(": ")[2] for line in lines]
    logins = [base64.b64decode(v[6:]).decode() for v in values if v.startswith("Basic ")]
    seen = " ".join((*values, *logins)) + json.dumps(json.loads(asked.body), ensure_ascii=False)
    bare = [value for value in VALUES if value in seen or json.dumps(value)[1:-1] in seen]
    way = asked.nth % 5
    if way == 2:  # in halves: each in a chunk of its own, and a moment between them
        text = json.dumps({"error": {"message": f"no: {' '.join(bare)}"}}).encode()
        half = len(text) // 2
        head = b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head + hostile.chunk(text[:half]))
        time.sleep(0.02)
        sock.sendall(hostile.chunk(text[half:]) + b"0\r\n\r\n")
        return
    said = {
        0: "bad headers: " + " | ".join(lines),
        1: "no such key: " + " and ".join(bare),
        3: json.dumps({"headers": values, "body": asked.body.decode(), "seen": bare}),
        4: " ".join(
            f"{k} {value}" for k, value in zip(range(4000), itertools.cycle(bare or ["-"]), strict=False)
        ),
    }[way]
    hostile.plain(sock, json.dumps({"error": {"message": said}}).encode(), "401 Unauthorized")


ENGINE = """
import json, os, sys, time
words = sys.orig_argv
if "burstline.servers.truth" in words and "-m" in words:
    values = [os.environ[name] for name in ("HF_TOKEN", "SOME_API_KEY", "LAB_PASSWORD") if name in os.environ]
    values += [word for word in words if "0042" in word]
    say = lambda text: print(text, end="", flush=True)
    say("whole: " + " ".join(f"{name}={value}" for name, value in os.environ.items()) + "\\n")
    say("bare: " + " and ".join(values) + "\\n" + repr(words) + "\\n")
    for value in values:
        say("halves: " + value[: len(value) // 2])
        time.sleep(0.3)
        say(value[len(value) // 2 :] + "\\n")
    say(json.dumps({"arguments": words, "values": values}) + "\\n")
    line = " ".join(values)
    say((line + " ") * (80_000 // (len(line) + 1)) + "\\n")  # a line that no read has whole
    say("x" * 65_530 + line + "\\n")
"""


class Titles:
    """What `ps` shows of our own processes while a command runs; what the user typed is the user's."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def ran(self, command: Command) -> Ended:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(command.end)  # it reads the output: a full pipe would stop the command
            while not ended.done():
                for process in command.family():
                    with contextlib.suppress(psutil.Error):
                        words = process.cmdline()
                        if "burstline" not in words and "burstline.servers.truth" not in words:
                            self.seen.add(" ".join(words))
                time.sleep(0.05)
        return ended.result()


def hits(folder: Path, texts: str, titles: Titles) -> list[str]:
    found = files_with(folder, needles())
    found += [f"stream: {n!r}" for n in needles() if n.decode() in texts]
    return found + [f"title: {n!r}" for n in needles() if any(n.decode() in title for title in titles.seen)]


EXPORTED = ("token", "served")
"""The runs that are also written in every format: each takes seconds."""


def shown(out: Path) -> str:
    return "".join(exported(run, out / "to") for run in runs_in(out) if out.name in EXPORTED)


def options(pairs: Sequence[str]) -> list[str]:
    return [word for header in pairs for word in ("--header", header)]


def test_no_secret_leaves_by_a_file_a_stream_or_a_title(tmp_path: Path) -> None:
    assert len(VALUES) == 20
    assert len(SECRETS) == 12
    began_s = time.monotonic()
    (password,) = SECRETS["a URL's password"]
    login = f"://user:{quote(password, safe='')}@"
    basic = base64.b64encode(":".join(SECRETS["a login's halves"]).encode()).decode()
    (cookie, csrf), (key, pin) = SECRETS["a cookie's parts"], SECRETS["a header of its own"]
    auth, quoted, listed = SECRETS["a body"]
    body = json.dumps({"auth": auth, "deep": [{"userToken": quoted, "api_keys_of": 1, "secret": [listed]}]})
    rest = [f"Cookie: sid={cookie}; theme=dark; csrf={csrf}", f"X-Api-Key: {key}", f"X-Pin: {pin} or {pin}"]
    titles, texts = Titles(), ""
    outs = tmp_path / "outs"
    with hostile.serving(hostile.for_some(quotes, 1), n_honest=1) as server:
        url = server.url
        runs: dict[str, tuple[list[str], dict[str, str]]] = {
            "bearer": (
                [*options([f"Authorization: Bearer {SECRETS['a bearer'][0]}", *rest]), "--url", url],
                {},
            ),
            "token": (
                [
                    *options([f"Authorization: Token {SECRETS['a token of letters'][0]}"]),
                    "--extra-body",
                    body,
                    "--url",
                    url,
                ],
                {},
            ),
            "basic": ([*options([f"Authorization: Basic {basic}"]), "--url", url], {}),
            "login": (["--url", url.replace("://", login)], {}),
            "key": (["--url", url], {"BURSTLINE_API_KEY": SECRETS["the key of the environment"][0]}),
        }
        for name, (flags, variables) in runs.items():
            server.n_load = 0
            argv = ("run", "--out", str(outs / name), *ATTACH, *flags)
            ended = titles.ran(Command(outs / name, *argv, **variables))
            texts += ended.out + shown(outs / name)
            assert "got HTTP 401" in texts, ended.out
        server.n_load = 0
        suite, in_suite = tmp_path / "suite.toml", SECRETS["a suite's file"][0]
        suite.write_text(
            f'name = "lab"\n[[engine]]\nengine = "vllm"\nurl = "{url}"\nheader = ["X-Api-Key: {in_suite}"]\n'
            '[[workload]]\nname = "small"\nrequests = 20\nprompt_tokens = "8"\noutput_tokens = "4"\n'
        )
        for argv in (("run", str(suite), "--dry-run"), ("run", str(suite))):
            texts += titles.ran(Command(outs / "suite", *argv, "--out", str(outs / "suite"))).out
        suite.unlink()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ENGINE)
    hub, token = SECRETS["a URL of the engine"]
    of_engine = {
        "HF_TOKEN": SECRETS["variables of the engine"][0],
        "SOME_API_KEY": SECRETS["variables of the engine"][1],
        "PYTHONPATH": f"{site}:{REPOSITORY}",
    }
    arg, in_json = SECRETS["arguments of the engine"]
    for name, words in {
        "served": ("--model", f"https://user:{hub}@hub/m?token={token}"),
        "failed": ("--api-key", arg, "--override", json.dumps({"api_key": in_json})),
    }.items():
        argv = ("run", "--out", str(outs / name), "--engine", "truth", *LOAD, "--", *words)
        ended = titles.ran(Command(outs / name, *argv, **of_engine))
        texts += ended.out + shown(outs / name)
        log = next((outs / name).glob("*/server.log")).read_bytes()
        assert log.count(b"halves: ") >= 2, log[:2000]
        assert len(log) > 100_000
    found = hits(outs, texts, titles)
    noted("20 secrets, 12 ways in, 5 ways out", "0 hits", found or "0 hits", time.monotonic() - began_s)
    assert not found


def test_innocent_words_of_the_environment_leave_captures_alone(tmp_path: Path) -> None:
    words = {
        "OPENAI_API_KEY": "token",
        "SORT_KEY": "finish_reason",
        "MY_TOKEN": "completion_tokens",
        "DB_PWD": "choices",
    }
    words |= {
        "MY_SECRET": "prompt_tokens",
        "CACHE_KEY": "Bearer",
        "HF_TOKEN": "length",
        "SSH_PASSWORD": "usage index text",
    }
    with hostile.serving(hostile.honest) as server:
        ended = burstline(tmp_path / "out", *ATTACH, "--url", server.url, **words)
    run = open_run(ended.run)
    raw = b"".join(read.data for each in read_captures(ended.run / "captures") for read in each.reads)
    masks = re.findall(rb"\*{3,}", raw)
    table = run.request_table
    noted("innocent words in the environment", "no mask", masks or "no mask", ended.time_s)
    assert not masks
    assert set(table.column("finish_reason").to_pylist()) == {"length"}
    assert set(table.column("output_tok").to_pylist()) == {4}
