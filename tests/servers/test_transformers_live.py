"""A real `transformers serve`, started by its adapter under the keeper, asked, and measured.

That nothing of it is left is checked where its life ends (tests/servers/lives.py).
"""

import subprocess
import sys
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from burstline.servers.engines.transformers_serve import TransformersServe
from burstline.servers.host import process
from burstline.servers.host.ready import getter, wait_ready
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Target
from burstline.servers.registry import engine_at
from burstline.workloads.request import Request
from burstline.workloads.text_prompts import make_texts, words_of
from tests import verdicts
from tests.servers.lives import SETTINGS, Life, Lives, of
from tests.servers.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENGINE = TransformersServe()


@pytest.fixture(params=[of("transformers")])
def life(request: pytest.FixtureRequest, lives: Lives) -> Life:
    return lives(request.param)


def test_a_real_transformers_serve_answers_exactly(life: Life) -> None:
    target = life.target
    words = words_of(Tokenizer.from_file(str(life.model / "tokenizer.json")))
    (text,) = make_texts([200], words, 0, "5eed", [0])
    call = ENGINE.encode(Request(0, None, text, 200, 16), target)
    raw = httpx.post(target.url + call.path, content=call.body, headers=dict(call.headers), timeout=120)
    reply = ENGINE.decode(HttpReply(raw.status_code, dict(raw.headers), raw.content))
    assert engine_at(getter(target)) == "transformers"
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.finish_reason) == (200, 16, "length")
    assert (reply.terminated, reply.error) == (True, None)
    assert (life.launch.version or "").startswith("5.")


@pytest.mark.usefixtures("life")  # where it cannot live at all this would not be its end
def test_a_model_without_weights_is_its_end_and_it_says_why(tmp_path: Path) -> None:
    empty, extra = make_tiny_model(tmp_path / "model"), SETTINGS["transformers"].args
    asked = LaunchOptions(str(empty), "127.0.0.1", process.free_port(), "m", tmp_path, None, extra)
    launch = ENGINE.launch(asked)
    target = Target(f"http://127.0.0.1:{asked.port}", launch.served_name or "")
    failure = pytest.raises(EngineError, match=r"exit code 1 .*no file named model\.safetensors")
    with process.start(launch, tmp_path / "server.log") as server, failure:
        wait_ready(ENGINE, server, target, timeout_s=120)


def test_a_whole_run_sends_text_of_exactly_the_planned_tokens(life: Life, tmp_path: Path) -> None:
    load = ("--requests", "12", "--prompt-tokens", "20..60", "--output-tokens", "8")
    where = ("--engine", "transformers", "--url", life.url, "--model", life.model, "--out", tmp_path)
    argv = [sys.executable, "-m", "burstline", "run", *where, *load]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    (run,) = tmp_path.iterdir()
    records = pq.read_table(run / "records.parquet").to_pandas()
    assert verdicts.done(done.returncode, tmp_path), done.stderr
    assert set(records.outcome) == {"ok"}, records.error
    assert list(records.prompt_tok) == list(records.planned_prompt_tok)
    assert records.prompt_tok.nunique() > 1
