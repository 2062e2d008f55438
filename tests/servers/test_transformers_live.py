"""A real `transformers serve`, started by its adapter under the keeper, asked, stopped; and a run of it."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from burstline.servers.engines.transformers_serve import PYTHON_VARIABLE, TransformersServe
from burstline.servers.host import process
from burstline.servers.host.ready import getter, wait_ready
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Target
from burstline.servers.registry import engine_at
from burstline.workloads.request import Request
from burstline.workloads.text_prompts import make_texts, words_of
from tests import verdicts
from tests.servers.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no transformers"),
]
ENGINE = TransformersServe()
# By default it takes nearly all memory of the machine for its KV cache.
SMALL = ("--device", "cpu", "--cb-num-blocks", "64", "--cb-block-size", "32")
ADD_WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16)
model.save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([os.environ[PYTHON_VARIABLE], "-c", ADD_WEIGHTS, folder], check=True, env=environment)
    return folder


def options(model: Path, run_dir: Path, *extra_args: str) -> LaunchOptions:
    return LaunchOptions(str(model), "127.0.0.1", process.free_port(), "m", run_dir, None, extra_args)


def test_a_real_transformers_serve_answers_exactly_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    asked = options(model, tmp_path, *SMALL)
    launch = ENGINE.launch(asked)
    target = Target(f"http://127.0.0.1:{asked.port}", launch.served_name or "")
    words = words_of(Tokenizer.from_file(str(model / "tokenizer.json")))
    (text,) = make_texts([200], words, 0, "5eed", [0])
    with process.start(launch, tmp_path / "server.log") as server:
        wait_ready(ENGINE, server, target, timeout_s=120)
        family = psutil.Process(server.keeper_pid).children(recursive=True)
        call = ENGINE.encode(Request(0, None, text, 200, 16), target)
        raw = httpx.post(target.url + call.path, content=call.body, headers=dict(call.headers), timeout=120)
        reply = ENGINE.decode(HttpReply(raw.status_code, dict(raw.headers), raw.content))
        assert engine_at(getter(target)) == "transformers"
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.finish_reason) == (200, 16, "length")
    assert (reply.terminated, reply.error) == (True, None)
    assert (launch.version or "").startswith("5.")
    assert family
    assert not any(member.is_running() for member in family)
    process.require_free_port("127.0.0.1", asked.port)


def test_a_model_without_weights_is_its_end_and_it_says_why(tmp_path: Path) -> None:
    empty = make_tiny_model(tmp_path / "model")
    asked = options(empty, tmp_path, *SMALL)
    launch = ENGINE.launch(asked)
    target = Target(f"http://127.0.0.1:{asked.port}", launch.served_name or "")
    failure = pytest.raises(EngineError, match=r"exit code 1 .*no file named model\.safetensors")
    with process.start(launch, tmp_path / "server.log") as server, failure:
        wait_ready(ENGINE, server, target, timeout_s=120)


def test_a_whole_run_sends_text_of_exactly_the_planned_tokens(model: Path, tmp_path: Path) -> None:
    load = ("--requests", "12", "--prompt-tokens", "20..60", "--output-tokens", "8")
    where = ("--engine", "transformers", "--model", model, "--out", tmp_path)
    argv = [sys.executable, "-m", "burstline", "run", *where, *load, "--", *SMALL]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    (run,) = tmp_path.iterdir()
    records = pq.read_table(run / "records.parquet").to_pandas()
    assert verdicts.done(done.returncode, tmp_path), done.stderr
    assert set(records.outcome) == {"ok"}, records.error
    assert list(records.prompt_tok) == list(records.planned_prompt_tok)
    assert records.prompt_tok.nunique() > 1
