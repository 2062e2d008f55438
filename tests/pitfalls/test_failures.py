"""Pitfalls 7, 14, 16, 19 and 20: what fails is named, counted, and never makes anything look better."""

from array import array
from pathlib import Path

import pytest

from burstline.loadgen.driver.job import Job
from burstline.servers.messages import Target
from burstline.workloads.prompts import salted
from tests.pitfalls.chain import VOCABULARY, fired, requests
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script

FAST = {"ttft_s": 0.0, "gaps_s": (0.001,)}


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


def test_14_drivers_that_share_a_load_share_no_prefix(tmp_path: Path) -> None:
    asked, due_ns = requests(20), array("q", bytes(20 * 8))
    job = Job(asked, due_ns, "truth", Target("http://x", "x"), tmp_path, tmp_path, salt="aa")
    sent = [salted(request, "aa", VOCABULARY) for share in job.split(3) for request in share.requests]
    assert len({tuple(request.prompt_ids[:8]) for request in sent}) == 20
