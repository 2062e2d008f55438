"""`burstline limit` over real sockets: every probe a run, the answer on a page, and what ends it early."""

import json
import math
import os

import pytest
from scipy import optimize

from burstline.cli import main
from burstline.measure.record.rundir import open_run
from tests.measure.queue_lab import erlang_c, mdc
from tests.truth.queue import Queue
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script

pytestmark = pytest.mark.timeout(900)
LOAD = ("--prompt-tokens", "8", "--output-tokens", "2", "-q")


def limit(url, out, *flags):
    code = main(["limit", "--engine", "truth", "--url", url, "--out", str(out), *LOAD, *flags])
    (path,) = out.glob("*-limit/limit.json")
    return code, json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.measures
def test_a_search_keeps_every_probe_as_a_run_and_writes_a_page(tmp_path, capsys):
    flags = ("--concurrency", "2", "--slo", "ttft.p90<=100ms", "--budget-s", "40")
    # So slow that the budget ends before two cores are full: then its probes would be DISTURBED.
    with truth_server(Script(ttft_s=0.05, gaps_s=(0.06,))) as server:
        code, found = limit(server.url, tmp_path / "runs", *flags)
    assert code == 4, "this server never slows down, so the budget ends the search"
    assert found["state"] == "open"
    assert found["found"]["more_requests"]
    probes = found["found"]["probes"]
    loads = [probe["load"] for probe in probes]
    assert loads[:2] == [2, 4]
    for number, (probe, name) in enumerate(zip(probes, found["runs"], strict=True), 1):
        run = open_run(tmp_path / "runs" / name)
        if number == len(probes) and not run.summary.counts["planned"]:
            continue  # the time was up before its first request
        assert run.status == "complete"
        assert run.manifest.asked.concurrency == probe["load"]
        # One whose latencies rise a little runs to its end.
        assert run.manifest.ended_s or number > 3
        assert run.summary.counts["ok"] == run.summary.counts["planned"] >= probe["last"]["n"]
        assert run.summary.verdict.state != "FAILED"
    assert len({open_run(tmp_path / "runs" / name).manifest.asked.salt for name in found["runs"]}) > 1
    (page,) = (tmp_path / "runs").glob("*-limit/report.html")
    assert found["answer"] in page.read_text()
    assert found["answer"] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.measures
def test_a_server_that_is_always_too_slow_holds_at_no_load(tmp_path, capsys):
    flags = ("--concurrency", "2", "--slo", "ttft.p90<=20ms", "--slo", "e2e.p50<=10s", "--budget-s", "200")
    with truth_server(Script(ttft_s=0.04, gaps_s=(0.001,))) as server:
        code, _ = limit(server.url, tmp_path / "runs", *flags)
    assert code == 3
    assert "misses TTFT p90 ≤ 20 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--rate", "2", "--concurrency", "2", "--slo", "ttft.p90<=1s"), "not both"),
        (("--rate", "2"), "--slo"),
        (("--rate", "2", "--slo", "output_tok_per_s>=100"), "output_tok_per_s"),
        (("--rate", "2", "--slo", "ttft.mean<=1s"), "percentiles"),
        (("--rate", "2", "--slo", "ttft<=1s"), "attainment"),
        (("--rate", "2", "--slo", "attainment>=95%"), "attainment"),
        (("--rate", "2", "--requests", "9", "--slo", "ttft.p90<=1s"), "drop --requests"),
        (("--rate", "2", "--arrival", "ramp:2..9", "--slo", "ttft.p90<=1s"), "expected one of"),
        (("--rate", "2", "--slo", "ttft.p90<=1s", "--error", "0.9"), "--error"),
        (("--rate", "2", "--slo", "ttft.p90<=1s", "--budget-s", "1"), "--budget-s"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(flags, said, capsys):
    assert main(["limit", "--engine", "truth", *flags]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert "Traceback" not in told.err


def waits_and_services(n_servers, load, t):
    """How often wait and service take longer than t mean services at M/M/c."""
    waits, free = erlang_c(n_servers, load), n_servers - load
    if abs(free - 1) < 1e-9:
        return math.exp(-t) * (1 + waits * t)
    return math.exp(-t) + waits / (1 - free) * (math.exp(-free * t) - math.exp(-t))


@pytest.mark.bench
@pytest.mark.parametrize(("n_servers", "cv", "most"), [(16, 1.0, 2.6), (32, 1.0, 2.5), (8, 0.0, 1.5)])
def test_a_search_agrees_with_the_analytic_limit_of_a_queue(n_servers, cv, most, tmp_path):
    """E2E is wait and service; 400 requests a second is what the server can take."""
    mean_s = n_servers / 400

    def beyond(rate):
        if cv:
            return waits_and_services(n_servers, rate * mean_s, most)
        return mdc(n_servers, 0.9, most - 1).beyond(rate * mean_s)

    truth = optimize.brentq(lambda rate: beyond(rate) - 0.1, 100, 399.9)
    with truth_server(setup=TruthSetup(queue=Queue(n_servers, mean_s, cv, 1))) as server:
        flags = ("--rate", "100", "--slo", f"e2e.p90<={mean_s * most * 1e3:g}ms", "--budget-s", "400")
        code, found = limit(server.url, tmp_path / "runs", *flags)
    answer, found = found["answer"], found["found"]
    print(answer, f"truth {truth:.2f}/s, {sum(p['last']['n'] for p in found['probes']):,} requests")
    assert code in (0, 4)  # 4: the budget ended the search
    assert found["low"] is None or found["low"] < truth
    assert found["high"] is None or found["high"] > truth
    assert found["best"] == pytest.approx(truth, rel=0.1)


@pytest.mark.bench
@pytest.mark.skipif("BURSTLINE_VLLM_PYTHON" not in os.environ, reason="BURSTLINE_VLLM_PYTHON names no vLLM")
def test_two_searches_at_vllm_overlap(tmp_path):
    assert main(["make-model", str(tmp_path / "tiny"), "--like", "tiny", "--weights"]) == 0
    found = []
    for k in (1, 2):
        flags = ("--model", str(tmp_path / "tiny"), "--max-num-seqs", "4", "--concurrency", "4")
        load = ("--prompt-tokens", "64", "--output-tokens", "16", "--slo", "ttft.p90<=300ms")
        out = tmp_path / f"runs{k}"
        main(["limit", "--engine", "vllm", "--out", str(out), *flags, *load, "--budget-s", "330", "-q"])
        (path,) = out.glob("*-limit/limit.json")
        found.append(json.loads(path.read_text())["found"])
    one, other = ((each["low"] or 0, each["high"] or math.inf) for each in found)
    assert max(one[0], other[0]) <= min(one[1], other[1])
