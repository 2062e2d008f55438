"""Pitfalls 7, 14, 16, 19 and 20: what fails is named, counted, and never makes anything look better."""

import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from burstline.loadgen.driver.job import Job
from burstline.servers.messages import Target
from burstline.workloads.prompts import salted
from tests.pitfalls.chain import VOCABULARY, fired, play, requests
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script

FAST = {"ttft_s": 0.0, "gaps_s": (0.001,)}


def test_07_every_way_to_fail_has_its_name_and_brings_no_throughput() -> None:
    endings = [
        (Script(**FAST, n_tok=0), "empty"),
        (Script(**FAST, fault="close", fault_after_tok=0), "truncated"),
        (Script(**FAST, fault="close", fault_after_tok=3), "truncated"),
        (Script(**FAST, fault="half_close", fault_after_tok=3), "truncated"),
        (Script(**FAST, fault="close", fault_after_tok=3, chunked=False), "truncated"),
        (Script(**FAST, fault="reset", fault_after_tok=-1), "reset"),
        (Script(**FAST, n_tok=5, finish="length"), "clamped"),
        (Script(**FAST, n_tok=5, finish="stop"), "short"),
        (Script(**FAST, finish="abort"), "aborted"),
        (Script(**FAST, status=503), "http_503"),
        (Script(**FAST, fault="error", fault_after_tok=2), "error_event"),
        (Script(**FAST, fault="stall", fault_after_tok=2), "timeout"),
    ]
    due_s = (np.arange(len(endings)) * 0.01).tolist()  # so that each gets its script
    with truth_server([script for script, _ in endings], thread=True) as truth:
        played = fired(truth, requests(len(endings)), due_s, deadline_s=0.5)
    assert [record.outcome for record in played.records] == [outcome for _, outcome in endings]
    summary = played.summary()
    assert (summary["counts"]["planned"], summary["counts"]["ok"]) == (len(endings), 0)
    assert summary["throughput"]["output_tok_per_s"]["point"] is None
    assert summary["metrics"]["ttft"]["p50"]["point"] is None
    assert summary["verdict"]["state"] == "FAILED"


def test_14_a_salt_repeated_is_flagged_and_a_fresh_one_hits_no_cache() -> None:
    asked = requests(40, 2, n_prompt_tok=64)
    with truth_server(Script(**FAST), setup=TruthSetup(prefix_cache=True), thread=True) as truth:
        first = fired(truth, asked, salt="aa").summary()
        again = fired(truth, asked, salt="aa").summary()
        fresh = fired(truth, asked, salt="bb").summary()
    assert [row["lengths"]["cached_tok"]["point"] for row in (first, fresh)] == [0, 0]
    assert again["lengths"]["cached_fraction"]["point"] == pytest.approx(48 / 64)
    codes = [{warning["code"] for warning in row["verdict"]["warnings"]} for row in (first, again, fresh)]
    assert ["prefix-cache" in found for found in codes] == [False, True, False]


def test_14_workers_that_ask_each_others_prompts_are_flagged() -> None:
    """Without a salt, and with the same seed in both: every prompt is asked twice."""
    asked = requests(20, 2, n_prompt_tok=64)
    twice = (*asked, *(replace(request, index=20 + request.index) for request in asked))
    with truth_server(Script(**FAST), setup=TruthSetup(prefix_cache=True), thread=True) as truth:
        summary = fired(truth, twice).summary()
    assert summary["lengths"]["cached_fraction"]["point"] == pytest.approx(48 / 64 / 2)
    assert "prefix-cache" in {warning["code"] for warning in summary["verdict"]["warnings"]}


def test_14_drivers_that_share_a_load_share_no_prefix(tmp_path: Path) -> None:
    asked, due_ns = requests(20), array("q", bytes(20 * 8))
    job = Job(asked, due_ns, "truth", Target("http://x", "x"), tmp_path, tmp_path, salt="aa")
    sent = [salted(request, "aa", VOCABULARY) for share in job.split(3) for request in share.requests]
    assert len({tuple(request.prompt_ids[:8]) for request in sent}) == 20


def test_16_a_server_that_sheds_load_never_looks_faster() -> None:
    """The same server with and without shedding: what it refuses counts as infinitely late."""
    script = Script(ttft_s=0.02, gaps_s=(0.001,))
    everything = play(script, 60).summary()
    with truth_server(script, setup=TruthSetup(max_in_flight=20), thread=True) as truth:
        shed = fired(truth, requests(60)).summary()
    assert everything["counts"] == {"planned": 60, "ok": 60}
    assert shed["counts"]["http_503"] == 40
    for name in ("ttft", "e2e"):
        assert everything["metrics"][name]["p50"]["point"] > 0
        assert shed["metrics"][name]["p50"]["point"] is None, "a median among refusals"
        assert shed["metrics"][name]["mean"]["point"] is None


@pytest.mark.parametrize(("n", "deadline_s"), [(200, 0.6), pytest.param(1000, 6.0, marks=pytest.mark.slow)])
def test_19_one_stream_that_never_ends_is_one_timeout_and_the_rest_is_whole(
    n: int, deadline_s: float
) -> None:
    stalled = Script(ttft_s=0.0, fault="stall", fault_after_tok=1)
    played = play([stalled, Script(**FAST)], n, deadline_s=deadline_s)
    assert played.summary()["counts"] == {"planned": n, "ok": n - 1, "timeout": 1}
    (lost,) = [record for record in played.records if record.outcome == "timeout"]
    assert len(lost.token_ns) == 1


def test_20_too_few_file_descriptors_are_refused_before_anything_starts_with_the_fix(tmp_path: Path) -> None:
    command = f"ulimit -n 256; exec {sys.executable} -m burstline run --requests 1000 --out {tmp_path} -q"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "ulimit" in ended.stderr
    assert "1,000" in ended.stderr
    assert list(tmp_path.iterdir()) == []
