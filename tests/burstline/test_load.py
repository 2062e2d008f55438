"""The load's flags, checked before anything is started."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from burstline.bench.load_options import checked
from burstline.bench.vocabulary import ASSUMED
from burstline.bench.wish import Wish
from burstline.verbs.run import add_arrivals, add_load, add_sources, wish_of
from servers.engine import Identity
from workloads.request import WorkloadError
from workloads.seeds import rng

DATA = Path(__file__).parents[1] / "data" / "workloads"


def test_the_classic_burst_is_what_no_flag_asks_for():
    load = checked(Wish())
    assert load.title == "1,000 requests of 512 → 64 tokens, all at once"
    assert load.name == "burst-1000x512-64"
    assert load.n_at_once == 1000


def test_a_rate_alone_means_a_constant_one():
    assert checked(Wish(rate=10, duration_s=3)).title == "30 requests of 512 → 64 tokens, constant at 10/s"


def test_an_open_loop_of_a_million_requests_needs_the_connections_of_ten_seconds():
    assert checked(Wish(requests=1_000_000, rate=50)).n_connections == 501
    assert checked(Wish(requests=30_000)).n_connections == 30_000, "a burst needs all"


def test_a_closed_loop_needs_no_more_connections_than_its_concurrency():
    load = checked(Wish(requests=100, concurrency=8))
    assert load.n_at_once == 8
    assert load.title.endswith("8 at a time")


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(requests=0), "--requests 0"),
        (Wish(requests=10**11), "--requests 100000000000: expected at most 10,000,000"),
        (
            Wish(prompt_tokens="99999999999"),
            "--prompt-tokens 99999999999: expected at most 16,777,216 tokens",
        ),
        (Wish(prompt_tokens="zipf:1.1,1..9999999999"), "--prompt-tokens zipf"),
        (Wish(rate=1000, duration_s=1e9), "constant: 1e[+]12 requests; expected at most 10,000,000"),
        (Wish(arrival="steps", steps="1e9x1e9"), "steps: 1e[+]18 requests"),
        (Wish(prompt_tokens="none"), "--prompt-tokens none"),
        (Wish(output_tokens="0"), "--output-tokens 0"),
        (Wish(deadline_s=0), "--deadline-s 0"),
        (Wish(salt="xyz"), "--salt 'xyz'"),
        (Wish(workers=0), "--workers 0"),
        (Wish(concurrency=0), "--concurrency 0"),
        (Wish(max_rate=5), "--concurrency"),
        (Wish(concurrency=4, max_rate=0), "--max-rate 0"),
        (Wish(concurrency=4, arrival="poisson"), "--arrival poisson"),
        (Wish(arrival="sometimes"), "burst, constant"),
        (Wish(arrival="poisson"), "--rate"),
    ],
)
def test_a_silly_wish_is_refused_with_the_flag_that_made_it(wish, words):
    with pytest.raises(WorkloadError, match=words):
        checked(wish)


@pytest.mark.parametrize(
    ("wish", "n_workers"),
    [
        (Wish(), 1),
        (Wish(requests=2000), 1),
        (Wish(requests=2001), 2),
        (Wish(requests=100_000), 8),
        (Wish(requests=100_000, concurrency=2000), 1),
        (Wish(requests=100_000, concurrency=6000), 3),
        (Wish(requests=10, concurrency=6000), 1),
        (Wish(requests=100_000, rate=100), 1),
        (Wish(requests=100_000, rate=500), 3),
        (Wish(requests=50, rate=1), 1),
    ],
    ids=lambda x: checked(x).name if isinstance(x, Wish) else "",
)
def test_auto_is_a_driver_for_every_2000_in_flight_on_half_the_cores(wish, n_workers, monkeypatch):
    monkeypatch.setattr("loadgen.driver.job._n_cores", lambda: 16)
    assert checked(replace(wish, workers="auto")).n_workers == n_workers
    monkeypatch.setattr("loadgen.driver.job._n_cores", lambda: 1)
    assert checked(replace(wish, workers="auto")).n_workers == 1


def test_workers_are_a_number_or_auto():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_load(parser)
    add_sources(parser)
    add_arrivals(parser)
    given = [["--workers", "auto"], ["--workers", "4"], []]
    assert [wish_of(parser.parse_args(argv)).workers for argv in given] == ["auto", 4, 1]
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--workers", "many"])


def test_a_request_beyond_the_models_limit_says_the_limit():
    load = checked(Wish(prompt_tokens="4000", output_tokens="200"))
    load.plan(ASSUMED, identity=Identity("x", max_model_len=4200))
    with pytest.raises(WorkloadError, match="4199"):
        load.plan(ASSUMED, identity=Identity("x", max_model_len=4199))


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(trace_speed=2.0), "--trace-speed needs --trace"),
        (Wish(data_filter=("a==b",)), "--data-filter needs --data"),
        (Wish(trace="x", rate=3.0), "--rate would be ignored"),
        (Wish(data="x", prompt_tokens="9"), "--prompt-tokens would be ignored"),
        (Wish(groups=3), "--groups needs --shared-prefix"),
        (Wish(shared_prefix=3, prefix_hit=0.5), "give one"),
        (Wish(prefix_hit=1.5), "--prefix-hit 1.5"),
        (Wish(think_s="2"), "--sessions"),
        (Wish(sessions=3, warmup="5", warmup_handover=True), "--warmup-handover is for single requests"),
        (
            Wish(data=str(DATA / "sessions.jsonl"), warmup="5", warmup_handover=True),
            "--warmup-handover is for single requests",
        ),
        (Wish(data="no/such.jsonl"), "no such file"),
        (Wish(trace="no/such.jsonl"), "no such file"),
    ],
)
def test_no_flag_of_a_source_is_ignored(wish, words):
    with pytest.raises(WorkloadError, match=words):
        checked(wish)


def test_a_trace_brings_its_own_times_and_a_window_counts_from_its_begin():
    load = checked(Wish(trace=str(DATA / "trace.jsonl"), trace_window="0.5..1.5", trace_speed=2.0))
    due_s = load.arrivals.due_s(rng(0, "arrivals"))
    assert 0 <= due_s[0] < due_s[-1] < 0.5
    assert load.title.endswith("Burstline trace at 2 times its speed, at recorded times")


def test_rows_with_timestamps_are_due_at_them():
    load = checked(Wish(data=str(DATA / "prompts.jsonl"), arrival="replay"))
    due_s = load.arrivals.due_s(rng(0, "arrivals"))
    assert due_s[:3].tolist() == pytest.approx([0, 0.04, 0.08])
