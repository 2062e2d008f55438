"""Every source of a load, run whole at the known-truth server and at the embedded engine."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from burstline.cli import main
from burstline.measure.record.rundir import open_run
from burstline.servers.engines.truth import Truth
from burstline.servers.messages import Target
from burstline.workloads.data_sets import Server, data_requests, read_data
from burstline.workloads.lengths import Lengths
from tests.burstline.inside import ran
from tests.burstline.test_run import the_run
from tests.servers.tiny_model import make_tiny_model
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.verdicts import done

DATA = Path(__file__).parents[1] / "data" / "workloads"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "n"),
    [
        (("--trace", f"{DATA / 'mooncake.jsonl'},speed=8"), 60),
        (("--data", str(DATA / "prompts.jsonl"), "--arrival", "replay"), 40),
        (("--data", str(DATA / "sharegpt.json"), "--requests", "20"), 20),
        (("--requests", "40", "--shared-prefix", "32,groups=2", "--prompt-tokens", "64"), 40),
        (("--requests", "40", "--prompt-tokens", "normal:90,30", "--output-tokens", "zipf:1,2..9"), 40),
    ],
)
def test_the_server_counts_what_was_planned_in_every_row(flags, n, folder, tmp_path):
    small = () if "--trace" in flags or "--output-tokens" in flags else ("--output-tokens", "4")
    server = ("--engine", "truth", "--tokenizer", folder)
    code, output = ran(tmp_path / "runs", *server, *flags, *small)
    assert done(code, tmp_path / "runs"), output
    run = open_run(the_run(tmp_path / "runs"))
    records = run.record_table.to_pandas()
    assert len(records) == n
    assert (records["outcome"] == "ok").all()
    assert (records["prompt_tok"] == records["planned_prompt_tok"]).all()
    assert run.plan.sha256 == run.manifest.plan_sha256


@pytest.mark.slow
@pytest.mark.parametrize("hit", [0.0, 0.3, 0.6, 0.9])
def test_the_embedded_engines_cache_serves_the_planned_share_within_a_point(hit, lives, tmp_path):
    load = ("--engine", "reference", "--requests", "60", "--prompt-tokens", "400", "--output-tokens", "2")
    url = lives("reference").url
    code, output = ran(
        tmp_path / "runs", *load, "--url", url, "--concurrency", "4", "--shared-prefix", f"{hit:.0%}"
    )
    assert done(code, tmp_path / "runs"), output
    summary = json.loads((the_run(tmp_path / "runs") / "summary.json").read_text())
    served = summary["lengths"]["cached_fraction"]["point"]
    print(f"\n--shared-prefix {hit:.0%}: served {served:.4f}")
    assert served == pytest.approx(hit, abs=0.01)
    assert not [w for w in summary["verdict"]["warnings"] if w["code"].startswith("prefix-")]


@pytest.mark.slow
def test_sessions_over_two_drivers_keep_their_order_their_pauses_and_their_prompts(tmp_path):
    script = Script(ttft_s=0.02, gaps_s=(0.005,))
    lengths = ("--turn-tokens", "8..16", "--prompt-tokens", "32", "--output-tokens", "4")
    shape = ("--sessions", "12", "--turns", "4", *lengths)
    pauses = ("--think-s", "0.05..0.1")
    with truth_server(script) as truth:
        where = ("--engine", "truth", "--url", truth.url, "--workers", "2")
        code, output = ran(tmp_path / "runs", *where, *shape, *pauses)
        served = {row.index: row for row in truth.log() if row.index is not None}
    assert done(code, tmp_path / "runs"), output
    run = open_run(the_run(tmp_path / "runs"))
    assert len(run.manifest.drivers) == 2
    records = run.record_table.to_pandas()
    assert (records["outcome"] == "ok").sum() == len(records) == 12 * 4
    assert (records["prompt_tok"] == records["planned_prompt_tok"]).all()
    for request in run.plan.requests:
        if request.turn.after:
            over_ns = max(served[index].event_ns[-1] for index in request.turn.after)
            assert served[request.index].arrival_ns >= over_ns + request.turn.pause_ns
    assert run.summary.sessions.sessions.point == 12
    assert run.summary.sessions.early_turns.point == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [
        ("--request-kind", "embed", "--requests", "700", "--prompt-tokens", "64"),
        ("--request-kind", "rerank", "--data", str(DATA / "rerank.jsonl")),
    ],
    ids=["embed", "rerank"],
)
@pytest.mark.measures
def test_embeddings_and_rerank_have_latency_and_rates_but_no_token_metrics(load, folder, tmp_path):
    with truth_server(Script(ttft_s=0.1)) as truth:
        where = ("--engine", "truth", "--url", truth.url, "--tokenizer", folder, "--rate", "200")
        code, output = ran(tmp_path / "runs", *where, *load)
        paths = {row.path for row in truth.log() if row.index is not None}
    assert done(code, tmp_path / "runs"), output
    assert paths == {f"/v1/{'embeddings' if 'embed' in load else 'rerank'}"}
    run = open_run(the_run(tmp_path / "runs"))
    records = run.record_table.to_pandas()
    assert (records["outcome"] == "ok").all()
    e2e_s = records["closed_ns"] / 1e9 - records["sent_ns"] / 1e9
    assert np.median(e2e_s) == pytest.approx(0.1, abs=0.02)
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["metrics"]["e2e"]["p50"]["point"] or len(records) < 11
    assert summary["throughput"]["requests_per_s"].get("point") or len(records) < 80
    assert summary["metrics"]["tpot"]["p50"]["point"] is None


def test_a_chat_with_an_image_reaches_the_server_as_it_stands_in_the_file(folder):
    row = next(row for row in (DATA / "chats.jsonl").read_text().splitlines() if "image_url" in row)
    items = [item for item in read_data(str(DATA / "chats.jsonl")).items if "image_url" in str(item.messages)]
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    (request,), _, _ = data_requests(items, Server(tokenizer=tokenizer), None, 0, Lengths(64, 64))
    call = Truth().encode(request, Target("http://127.0.0.1:1", "m"))
    assert call.path == "/v1/chat/completions"
    assert json.loads(call.body)["messages"] == json.loads(row)["messages"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_suite_of_loads_runs_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert done(main(["run", "burstline/suites/shipped/loads.toml", "--out", str(tmp_path)]), tmp_path)
    (suite,) = tmp_path.glob("loads-*")
    runs = [open_run(manifest.parent) for manifest in sorted(suite.glob("0*/*/manifest.json"))]
    assert len(runs) == 5
    for run in runs:
        assert run.status == "complete"
        assert (run.record_table.to_pandas()["outcome"] == "ok").all(), run.name
