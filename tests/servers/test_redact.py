"""What is taken for a secret, and what only sounds like one."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstline.servers import redact
from burstline.servers.host.keeper import _keep_log
from burstline.servers.redact import printable

LEARN = """
import json, os, sys
from burstline.servers.redact import known_secrets, learn_from
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


@pytest.mark.parametrize("name", ["DB_PWD", "HF_TOKEN", "OPENAI_API_KEY", "OPENAI_KEY", "MY_PASSWORD"])
def test_a_variable_that_names_a_secret_is_learned(tmp_path, name):
    assert "hunter2-and-more" in learned(tmp_path, **{name: "hunter2-and-more"})


def test_text_that_steers_or_hides_is_escaped_and_spaces_of_any_width_stay():
    assert printable("\x1b[2J a\xadb \u202e \U000e0041") == "\\x1b[2J a\\xadb \\u202e \\U000e0041"
    assert printable("1\u202f000\xa0ms\n\té €") == "1\u202f000\xa0ms\n\té €"


def test_a_key_of_digits_is_no_number_of_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_learned", set())
    monkeypatch.setattr(redact, "_known", set())
    redact.learn("12345")
    kept = b'{"created": 1791234500, "n":12345, "token_ids": [5, 12345, 7]}'
    assert redact.masked(kept) == kept
    assert (
        redact.masked(b'{"said": "12345", "key": "Bearer 12345."}')
        == b'{"said": "*****", "key": "Bearer *****."}'
    )


@pytest.mark.parametrize(
    "environ", [{"OPENAI_API_KEY": "token"}, {"SORT_KEY": "finish_reason"}, {"MY_TOKEN": "short1"}]
)
def test_common_words_and_short_values_of_the_environment_are_no_secrets(tmp_path, environ):
    assert not learned(tmp_path, **environ)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_learned", "_known"):
        monkeypatch.setattr(redact, name, set())
    for name in ("_known_text", "_known_bytes"):
        monkeypatch.setattr(redact, name, None)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "value", "secrets", "kept"),
    [
        ("Authorization", "Token AUTH123456", ["AUTH123456"], "Token"),
        ("Authorization", "Basic dXNlcjpwYXNzdzByZC0x", ["dXNlcjpwYXNzdzByZC0x", "passw0rd-1"], "Basic"),
        ("Cookie", "sid=s3cr3t-one; theme=dark; csrf=s3cr3t-two", ["s3cr3t-one", "s3cr3t-two"], "dark"),
        ("X-Api-Key", "k3y-of-mine", ["k3y-of-mine"], "application/json"),
        ("Accept", "application/json", [], "application/json"),
    ],
)
def test_a_header_is_known_by_each_part_that_a_server_may_quote(name, value, secrets, kept):
    redact.learn_header(name, value)
    quoted = f"no such key: {' and '.join(secrets)} ({kept})"
    assert (
        redact.redacted(quoted) == quoted
        if not secrets
        else not any(s in redact.redacted(quoted) for s in secrets)
    )
    assert kept in redact.redacted(quoted)
    assert redact.masked(kept.encode()) == kept.encode()
    assert redact.redacted(redact.redacted(quoted)) == redact.redacted(quoted)


@pytest.mark.usefixtures("fresh")
def test_a_body_is_known_by_the_names_of_its_keys():
    redact.learn_body({"auth": "secret-1", "deep": [{"user_token": "secret-2"}], "max_tokens": "words-3"})
    assert redact.redacted("secret-1 secret-2 words-3") == "(removed) (removed) words-3"


PIECES = """api_key|Authorization|password|:|=| |(|)|[|'|"|Bearer |Basic |abc123|(removed)|https://|u:p@|,|&|?|HF_TOKEN|}"""


@settings(max_examples=500)
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
    assert (tmp_path / "log").read_bytes() == b"k=***************** tail\nSECRET other\n"
