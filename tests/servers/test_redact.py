"""What is taken for a secret, and what only sounds like one."""

import argparse
import base64
import html
import json
import pickle
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.bench.run_settings import words_of_run
from burstline.bench.server_session import WITHOUT_MASK, Site, _probed
from burstline.console.flags import add_options, read_options
from burstline.console.server_options import ServerOptions
from burstline.dtypes import FLOATS
from burstline.loadgen.capture.masking import masked
from burstline.measure.record.manifest import Status
from burstline.servers import redact
from burstline.servers.host.keeper import _keep_log
from burstline.servers.launch import Launch
from burstline.servers.messages import Target, target_at
from burstline.servers.redact import Secret, learn_from, printable, without_secrets
from burstline.servers.registry import ENGINES
from burstline.suites.suite import platform_of
from burstline.suites.toml_table import TomlTable
from burstline.workloads.options import words_of

LEARN = """
import json, os, sys
from burstline.servers.redact import known_secrets
from burstline.servers.redact import learn_from
learn_from(sys.argv[1:], os.environ)
print(json.dumps(known_secrets()))
"""


def learned(tmp_path, *argv, **environ):
    """What a process of its own has learned: what one learns stays for ever."""
    env = {"PATH": "/bin", "PYTHONPATH": ":".join(sys.path), **environ}
    done = subprocess.run(
        [sys.executable, "-c", LEARN, *argv],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        check=True,
    )
    return set(json.loads(done.stdout))


def test_the_folder_of_the_shell_is_no_password(tmp_path):
    folders = {"PWD": str(tmp_path), "OLDPWD": str(tmp_path / "before")}
    assert not learned(tmp_path, "run", "--out", str(tmp_path), **folders)


NAMES = (
    *("DB_PWD", "HF_TOKEN", "OPENAI_API_KEY", "OPENAI_KEY", "MY_PASSWORD", "GH_PAT", "SLACK_WEBHOOK"),
    *("APP_SECRETS", "MY_JWT"),
)


@pytest.mark.parametrize("value", ["hunter2-and-more", "seven77", "open-sesame", "swordfish", "987654321"])
def test_a_variable_that_names_a_secret_is_learned(tmp_path, value):
    assert learned(tmp_path, **dict.fromkeys(NAMES, value)) == {value}


def test_the_login_in_a_variable_is_learned(tmp_path):
    assert "seven77" in learned(tmp_path, DATABASE_URL="postgres://me:seven77@host/db")


def test_text_that_steers_or_hides_is_escaped_and_spaces_of_any_width_stay():
    assert printable("\x1b[2J a\xadb \u202e \U000e0041") == "\\x1b[2J a\\xadb \\u202e \\U000e0041"
    assert printable("1\u202f000\xa0ms\n\té €") == "1\u202f000\xa0ms\n\té €"


@pytest.mark.parametrize(
    "environ",
    [{"OPENAI_API_KEY": "token"}, {"SORT_KEY": "finish_reason"}, {"MY_TOKEN": "four"}, {"MY_KEY": "EMPTY"}],
)
def test_words_of_the_protocol_and_short_values_are_known_by_their_names_only(tmp_path, environ):
    assert not learned(tmp_path, **environ)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "value", "secrets", "kept"),
    [
        ("Authorization", "Token AUTH123456", ["AUTH123456"], "Token"),
        ("Authorization", "Basic dXNlcjpwYXNzdzByZC0x", ["dXNlcjpwYXNzdzByZC0x", "passw0rd-1"], "Basic"),
        ("Cookie", "sid=s3cr3t-one; theme=dark; csrf=s3cr3t-two", ["s3cr3t-one", "s3cr3t-two"], "dark"),
        ("X-Api-Key", "k3y-of-mine", ["k3y-of-mine"], "application/json"),
        ("Accept", "application/json", [], "application/json"),
        ("Authorization", "Token CORRECTHORSE", ["CORRECTHORSE"], "Token"),
        ("Authorization", "Token correcthorse", ["correcthorse"], "Token"),
        ("X-Title", "nightly run", ["nightly run"], "nightly"),
        ("X-Password", "correct horse battery", ["correct horse battery"], "horse"),
        ("X-Trace", "run 4f9a1c77 of nightly", ["4f9a1c77"], "nightly"),
    ],
)
def test_a_header_is_known_by_each_part_that_a_server_may_quote(name, value, secrets, kept):
    learn_from(["--header", f"{name}: {value}"], {})
    quoted = f"no such key: {' and '.join(secrets)} ({kept})"
    assert (
        redact.redacted(quoted) == quoted
        if not secrets
        else not any(s in redact.redacted(quoted) for s in secrets)
    )
    assert kept in redact.redacted(quoted)
    assert masked(kept.encode()) == kept.encode()
    assert redact.redacted(redact.redacted(quoted)) == redact.redacted(quoted)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--header", "X-Pin: 77"], ["--header", "X-Pin: (removed)"]),
        (["--header=X-Pin: 77"], ["--header=X-Pin: (removed)"]),
        (["-H", "Cookie: a=b"], ["-H", "Cookie: (removed)"]),
        (["--header", "Accept: text/html", "--header", "no header"], None),
        (["--api-key", "77", "--key=a b", "--n"], ["--api-key", "(removed)", "--key=(removed)", "--n"]),
        (["--api-key", "-x=7", "-x=7"], ["--api-key", "(removed)", "-x=7"]),
        (
            ["gate", "run --header 'X-Pin: 77' -- --token 7", "a 'b - c"],
            ["gate", "run --header 'X-Pin: (removed)' -- --token '(removed)'", "a 'b - c"],
        ),
        (['{"secret": {"a": "77"}, "n": [1]}'], ['{"secret": "(removed)", "n": [1]}']),
        (["--extra-body", '{"max_tokens": "77",  "n": [1]}', "[::1]:80"], None),
        (["--set", 5, None, ["--key", 3]], ["--set", 5, None, ["--key", "(removed)"]]),
        (["x" * 9 + "[" * 5000, "[" * 5000], None),
    ],
)  # fmt: skip
def test_a_command_is_shown_without_its_secrets_however_short_they_are(argv, shown):
    assert without_secrets(argv) == (argv if shown is None else shown)


@pytest.mark.usefixtures("fresh")
def test_nothing_shows_a_secret_and_it_is_known_from_then_on():
    secret = Secret("open-sesame")
    target = target_at("http://me:pa55word@h", "m", secret)
    where = ServerOptions(
        url=Secret.words("http://me:pa55word@h"),
        api_key=secret,
        engine_args=Secret.words("--api-key", "open-sesame"),
    )
    launch = Launch(("vllm", "--api-key", "open-sesame"), {"HF_TOKEN": "open-sesame"})
    for text in (repr(secret), str(secret), f"{secret:}", repr(target), repr(where), repr(launch)):
        assert "open-sesame" not in text
        assert "pa55word" not in text
    assert redact.redacted("open-sesame pa55word") == "(removed) (removed)"
    assert (secret.reveal(), target.login.reveal()) == ("open-sesame", "me:pa55word")
    assert pickle.loads(pickle.dumps(secret)) == secret


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("option", "text", "shown"),
    [
        ("--header", "X-Pin: 77", "X-Pin: (removed)"),
        ("--header", "Accept: text/html", "Accept: text/html"),
        ("--extra-body", '{"user_token": "v4lue-1", "n": 1}', '{"user_token": "(removed)", "n": 1}'),
        ("--extra-body", "[", "["),
    ],
)
def test_an_option_shows_all_but_what_is_secret_in_it(option, text, shown):
    where = read_options_of(option, text)
    assert (where.shown, where.reveal()) == (shown, text)
    assert "77" not in repr(where) + str(where)
    assert "v4lue-1" not in repr(where) + str(where)


def read_all(*words):
    """The options as they are after the command line was parsed, and no later."""
    parser = argparse.ArgumentParser()
    add_options(parser, ServerOptions)
    return read_options(ServerOptions, parser.parse_args(words))


def read_options_of(option, text):
    read = read_all(f"{option}={text}")
    assert words_of(read) == (option, text)
    return read.extra_body or read.header[0]


def test_no_key_is_a_word_by_which_our_own_files_are_read():
    words = (*ENGINES, *get_args(Status), *FLOATS)
    assert [word for word in words if redact.can_be_known(word)] == []


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("key", "can"),
    [("EMPTY", False), ("Bearer", False), ("abcd", False), ("me:1234", False), ("abcde", True)],
)
def test_a_key_that_cannot_be_masked_is_taken_and_said(key, can):
    target = Target("http://h", "m", Secret(key))
    engine = SimpleNamespace(probe=lambda ask, target: (target, ()), capabilities_of=lambda target: None)
    site = Site(engine, target, None, None, None, None, None)
    said = []
    assert _probed(site, said.append).notes == tuple(said) == (() if can else (WITHOUT_MASK,))


SCHEMES = ("Bearer", "Basic", "Digest", "Token", "token")
SECRET_NAMES = (
    "api_key",
    "userToken",
    "authorization",
    "hf-token",
    "client_secret",
    "sessionToken",
    "Cookie",
    "accessKey",
    "apikey",
    "passphrase",
    "pin",
    "DB_PIN",
    "session_id",
    "sessionId",
    "license_key",
    "credentials",
    "signature",
    "auth",
    "hftoken",
)
INNOCENT_NAMES = (
    "max_tokens",
    "eos_token",
    "tokenizer",
    "num_key_value_heads",
    "author",
    "keyed",
    "first_token",
    "tokens",
    "license",
    "pin_memory",
    "spin",
    "sessions",
)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", [*SECRET_NAMES, *INNOCENT_NAMES])
def test_one_list_of_names_is_meant_in_text_options_and_json_and_learned_from_bodies(name):
    hidden = name in SECRET_NAMES
    found = {
        "text": redact.redacted(f"{name}: v4lue-1") == f"{name}: (removed)",
        "option": without_secrets([f"--{name}", "v4lue-1"])[1] == "(removed)",
        "json": without_secrets({name: ["v4lue-1"]})[name] == "(removed)",
    }
    learn_from([json.dumps({"deep": [{name: ["v4lue-1", {"a": "v4lue-2"}]}]})], {})
    found["body"] = redact.redacted("v4lue-1 and v4lue-2") == "(removed) and (removed)"
    assert found == dict.fromkeys(found, hidden)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((f"Authorization: {scheme} v4lue-1", f"Authorization: {scheme} (removed)") for scheme in SCHEMES),
        ("--token=v4lue-1 --token-budget=7", "--token=(removed) --token-budget=7"),
        ("/x?token=v4lue-1&n=2", "/x?token=(removed)&n=2"),
        ("{'token': 'v4lue-1', 'a': 1}", "{'token': '(removed)', 'a': 1}"),
        ("/x?sig=v4lue-1&key=v4lue-2&n=2", "/x?sig=(removed)&key=(removed)&n=2"),
        ("?next=api_key%3Dv4lue-1 api_key%3Av4lue-2", "?next=api_key%3D(removed) api_key%3A(removed)"),
        (r'"{\"api_key\": \"v4lue-1\", \"a\": 1}"', r'"{\"api_key\": \"(removed)\", \"a\": 1}"'),
        ("tool --api-key v4lue-1 --key 'v4lue-2' --n 5", "tool --api-key (removed) --key '(removed)' --n 5"),
        ("AccountName=x;AccountKey=v4lue-1;y", "AccountName=x;AccountKey=(removed);y"),
        ("password:\nnext line", "password:\nnext line"),
        ("I got Bearer abc.v4lue-1 twice", "I got Bearer (removed) twice"),
        ("the bearer of it", "the bearer of it"),
        ("http://me:v4lue-1@host/x https://v4lue-2@host", "http://(removed)@host/x https://(removed)@host"),
        (
            'api_key="(removed)" Authorization: Token (removed)',
            'api_key="(removed)" Authorization: Token (removed)',
        ),
        ("Authorization: (removed)))))", "Authorization: (removed)))))"),
    ],
)
def test_a_secret_is_known_by_the_form_of_what_surrounds_it(text, shown):
    assert redact.redacted(text) == shown


@pytest.mark.parametrize(
    ("text", "is_key"),
    [
        ("tokens=128", False),
        ("max_tokens: 1234567890", False),
        ("tokens: 12345678tok of 99999", False),
        ("n_tokens=12345678 in 4.5 s", False),
        ("'tokens': [1234, 5678, 91011]", False),
        ('"tokens": ["Hello", " world", "1234"]', False),
        ("tokens\n1a2b3c4d5e", False),
        ("tokens: ghp-1a2b3c4d5e", True),
        ("refresh_tokens='1a2b3c4d5e'", True),
        ('"tokens": ["1a2b3c4d5e", "second-1"]', True),
        ("license: apache-2.0", False),
        ("license=cc-by-nc-4.0", False),
        ("License: LIC-9F3A-7721", True),
        ('{\\"licence\\": \\"9f3a77218c\\"}', True),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_names_of_counts_and_of_keys_hide_what_is_a_key(text, is_key):
    shown = redact.redacted(text)
    assert ("(removed)" in shown) == is_key
    assert is_key or shown == text
    assert redact.redacted(shown) == shown


@pytest.mark.usefixtures("fresh")
def test_our_own_values_under_such_names_are_known_where_they_are_keys():
    body = {"tokens": ["1a2b3c4d5e"], "license": "LIC-9F3A-7721", "max_tokens": 12_345_678}
    assert without_secrets(body) == {"tokens": "(removed)", "license": "(removed)", "max_tokens": 12_345_678}
    assert without_secrets(["--tokens", "1a2b3c4d5e"]) == ["--tokens", "(removed)"]
    assert without_secrets(["--tokens", "12345678"]) == ["--tokens", "12345678"]
    assert without_secrets({"tokens": [101, 102], "license": "mit"}) == {
        "tokens": [101, 102],
        "license": "mit",
    }
    learn_from([json.dumps(body)], {"LICENSE": "LIC-1111-7721"})
    assert redact.redacted("1a2b3c4d5e LIC-9F3A-7721 LIC-1111-7721") == "(removed) (removed) (removed)"


def test_json_is_known_by_its_names_and_nothing_is_still_nothing():
    assert without_secrets({"key": "v4lue-1", "token": "", "auth": None, "n": 1}) == {
        "key": "(removed)",
        "token": "",
        "auth": None,
        "n": 1,
    }


@pytest.mark.usefixtures("fresh")
def test_a_learned_value_is_known_in_each_encoding():
    secret = "user:p /\"é&<>'%1"
    redact.learn(secret)
    percent = [quote(secret), quote(secret, safe=""), quote_plus(secret)]
    forms = [
        secret,
        *percent,
        *(re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), each) for each in percent),
    ]
    for in_json in (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
        forms += [in_json, in_json.replace("/", r"\/")]
    forms += [html.escape(secret), html.escape(secret).replace("&#x27;", "'")]
    forms.append(base64.b64encode(secret.encode()).decode())
    assert {form: redact.redacted(f"x {form} y") for form in forms} == dict.fromkeys(forms, "x (removed) y")
    assert masked(b"x " + forms[-1].encode()) == b"x " + b"*" * len(forms[-1])


@pytest.mark.usefixtures("fresh")
def test_the_longest_learned_value_is_removed_whole_and_what_is_no_secret_stays():
    redact.learn("v4lue", "v4lue-and-more", "EMPTY", "abcd", None)
    assert redact.redacted("v4lue-and-more v4lue EMPTY abcd") == "(removed) (removed) EMPTY abcd"


def test_a_command_line_is_known_by_its_options_and_by_the_forms_in_them(tmp_path):
    argv = [
        "--api-key",
        "v4lue-1",
        "--header",
        "Authorization: Bearer v4lue-2",
        "--set",
        "api_key=['v4lue-3', 'v4lue-4']",
    ]
    argv += ["--url", "http://me:p%40ss-5@host/", "--output", "innocent"]
    assert learned(tmp_path, *argv) == {
        *("v4lue-1", "Bearer v4lue-2", "v4lue-2", "v4lue-3", "v4lue-4"),
        *("me:p%40ss-5", "me:p@ss-5", "p%40ss-5", "p@ss-5"),
    }


def test_a_command_within_a_command_is_known_as_our_own_is(tmp_path):
    inner = "run --url http://h -- --api-key v4lue-1 --set api_key=v4lue-2 --header 'X-K: v4lue words'"
    argv = ["gate", inner, "--client", "tool --password 'v4lue 3' -H 'Authorization: Bearer v4lue-4'"]
    found = learned(tmp_path, *argv)
    assert found == {"v4lue-1", "v4lue-2", "v4lue words", "v4lue", "v4lue 3", "Bearer v4lue-4", "v4lue-4"}


@pytest.mark.parametrize("unit", ["x", "a://b:", "key=", "Bearer ", "--key ", "http://", "[", " "])
def test_a_long_text_ends(unit):
    """100 kB; tens of seconds of CPU where the work grows with the square."""
    began_s = time.process_time()
    redact.redacted(unit * (100_000 // len(unit)))
    assert time.process_time() - began_s < 8


def test_a_servers_words_stand_on_one_line_without_secrets_and_are_cut(monkeypatch):
    assert redact.words_of_server("api_key=v4lue-1\nforged: \x1b[2J") == "api_key=(removed) forged: \\x1b[2J"
    assert redact.words_of_server("abc def", 5) == "abc d ..."
    lengths = []
    monkeypatch.setattr(redact, "redacted", lambda text: lengths.append(len(text)) or text)
    redact.words_of_server("x" * 100_000, 100)
    assert lengths == [400], "a long text costs no more"


def test_a_list_is_removed_whole():
    assert redact.redacted("api_key=['v4lue-1', 'v4lue-2'] and more") == "api_key=(removed) and more"


@pytest.mark.usefixtures("fresh")
def test_a_url_that_is_refused_is_known_by_what_it_asks():
    (url,) = Secret.words("http://h/?sig=v4lue%2D1&page=v4lue-2#v4lue-3")
    assert url.shown == "http://h/?sig=(removed)&page=(removed)#(removed)"
    with pytest.raises(ValueError, match="expected no"):
        target_at(url.reveal())
    assert redact.redacted("v4lue-1 v4lue-2 v4lue-3") == "(removed) (removed) (removed)"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("value", ["experimental", "main-2026", "bfloat16-scaled"])
def test_which_version_of_a_model_is_meant_is_no_secret(value):
    """A revision, a data type, a format: other programs name them in their own texts."""
    url = f"https://h/m?rev={value}&sig=v4lue-1&DTYPE={value}"
    said = f"loading {value} with v4lue-1"
    assert Secret.words("--model", url)[1].shown == f"https://h/m?rev={value}&sig=(removed)&DTYPE={value}"
    assert redact.redacted(said) == f"loading {value} with (removed)"
    learn_from(["--model", "https://h/m?x=float16&y=BFloat16"], {})
    assert redact.redacted("dtype=torch.float16 bfloat16") == "dtype=torch.float16 bfloat16"


@pytest.mark.usefixtures("fresh")
def test_urls_engine_arguments_and_variables_are_secrets_once_parsed():
    where = read_all("--url", "http://me:v4lue-1@h, http://h/v1", "--header", "X-Pin: v4lue-2")
    words = Secret.words("--tp", "2", "--api-key", "v4lue-3", "--token=v4lue-4", "https://h/m?of=v4lue-5")
    where = replace(where, engine_args=words)
    env = platform_of(TomlTable({"name": "a", "env": {"DB_PASSWORD": "v4lue-6", "N": "1"}}, "x.toml")).env
    assert "v4lue" not in repr((where, words, env))
    assert [word.shown for word in words] == [
        *("--tp", "2", "--api-key", "(removed)", "--token=(removed)", "https://h/m?of=(removed)")
    ]
    assert redact.redacted(" ".join(f"v4lue-{k}" for k in range(1, 7))) == " ".join(["(removed)"] * 6)
    assert words_of_run(where, Path("o"))[1:] == (
        *("--url", "http://me:v4lue-1@h,http://h/v1", "--header", "X-Pin: v4lue-2", "--out", "o", "--"),
        *("--tp", "2", "--api-key", "v4lue-3", "--token=v4lue-4", "https://h/m?of=v4lue-5"),
    )
    assert {name: value.reveal() for name, value in env.items()} == {"DB_PASSWORD": "v4lue-6", "N": "1"}


def test_what_is_kept_steers_no_terminal():
    assert without_secrets({"raw": {"version": "1\x1b[2J\u202e"}}) == {"raw": {"version": "1\\x1b[2J\\u202e"}}


@pytest.mark.usefixtures("fresh")
def test_a_body_is_known_by_the_names_of_its_keys():
    body = {"auth": "secret-1", "deep": [{"user_token": "secret-2"}], "max_tokens": "words-3"}
    learn_from([json.dumps(body), json.dumps({"sort_key": "finish_reason"})], {})
    assert redact.redacted("finish_reason") == "finish_reason", "a key may be one to sort by"
    assert redact.redacted("secret-1 secret-2 words-3") == "(removed) (removed) words-3"


PIECES = """api_key|Authorization|password|:|=| |(|)|[|'|"|Bearer |Basic |abc123|(removed)|https://|u:p@|,|&|?|HF_TOKEN|}"""


@given(st.lists(st.sampled_from(PIECES.split("|")), max_size=12).map("".join))
def test_what_is_redacted_twice_is_as_redacted_once(text):
    once = redact.redacted(text)
    assert redact.redacted(once) == once


@pytest.mark.usefixtures("fresh")
def test_a_log_that_comes_in_parts_shows_no_part_of_a_secret(tmp_path):
    redact.learn("SECRETKEY12345678")
    say = "import sys, time\nfor part in ('k=SECRE', 'TKEY1234', '5678 tail', '\\nSECRET other\\n'):\n"
    say += "    print(part, end='', flush=True)\n    time.sleep(0.3)\n"
    with (
        (tmp_path / "log").open("wb", buffering=0) as log,
        subprocess.Popen([sys.executable, "-c", say], stdout=subprocess.PIPE) as process,
    ):
        _keep_log(process, log.fileno())
    assert (tmp_path / "log").read_bytes() == b"k=(removed) tail\nSECRET other\n"
