"""What is taken for a secret, and what only sounds like one."""

import json
import subprocess
import sys

import pytest

from burstline.servers import redact
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
