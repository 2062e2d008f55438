"""Every source of a load, run whole against a server of known truth: each prompt is as long as planned."""

from pathlib import Path

import pytest

from loadgen.record.rundir import open_run
from tests.burstline.test_run import finished, the_run
from tests.servers.tiny_model import make_tiny_model

DATA = Path(__file__).parents[1] / "data" / "workloads"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("flags", "n"),
    [
        pytest.param(("--trace", str(DATA / "mooncake.jsonl"), "--trace-speed", "8"), 60, id="trace"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (("--data", str(DATA / "prompts.jsonl"), "--arrival", "replay"), 40),
                (("--data", str(DATA / "sharegpt.json"), "--requests", "20", "--data-order", "file"), 20),
                (("--requests", "40", "--shared-prefix", "32", "--groups", "2", "--prompt-tokens", "64"), 40),
                (
                    ("--requests", "40", "--prompt-tokens", "normal:90,30", "--output-tokens", "zipf:1,2..9"),
                    40,
                ),
            )
        ),
    ],
)
def test_the_server_counts_what_was_planned_in_every_row(flags, n, folder, tmp_path):
    small = () if "--trace" in flags or "--output-tokens" in flags else ("--output-tokens", "4")
    server = ("--engine", "truth", "--tokenizer", folder)
    code, output = finished(tmp_path / "runs", *server, *flags, *small)
    assert code in (0, 4), output
    run = open_run(the_run(tmp_path / "runs"))
    records = run.records
    assert len(records) == n
    assert (records["outcome"] == "ok").all()
    assert (records["prompt_tok"] == records["planned_prompt_tok"]).all()
    assert run.plan.sha256 == run.manifest.plan_sha256
