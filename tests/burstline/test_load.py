"""The load's flags, checked before anything is started."""

import argparse
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.bench.run import check
from burstline.bench.run_settings import Settings
from burstline.console.flags import add_options, read_options
from burstline.console.server_options import ServerOptions
from burstline.loadgen.driver.job import n_drivers
from burstline.servers.redact import Secret
from burstline.suites.toml_table import TomlTable
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.data_sets import Server
from burstline.workloads.due_times import due_times
from burstline.workloads.load import load_of
from burstline.workloads.options import options_of, words_of
from burstline.workloads.prompts import rng
from burstline.workloads.request import RequestKind, WorkloadError
from burstline.workloads.spec import DataSource, Goals, HangUps, LoadSpec, Sharing, TraceSource

DATA = Path(__file__).parents[1] / "data" / "workloads"


def test_the_classic_burst_is_what_no_flag_asks_for():
    load = load_of(LoadSpec())
    assert load.title == "1,000 requests of 512 → 64 tokens, all at once"
    assert load.name == "burst-1000x512-64"
    assert load.n_at_once == 1000


def test_a_rate_alone_means_a_constant_one():
    assert (
        load_of(LoadSpec(rate=10, duration_s=3)).title
        == "30 requests of 512 → 64 tokens, evenly spaced arrivals at 10 req/s"
    )


def test_an_open_loop_of_a_million_requests_needs_the_connections_of_ten_seconds():
    assert load_of(LoadSpec(requests=1_000_000, rate=50)).n_connections == 501
    assert load_of(LoadSpec(requests=30_000)).n_connections == 30_000, "a burst needs all"


def test_a_closed_loop_needs_no_more_connections_than_its_concurrency():
    load = load_of(LoadSpec(requests=100, concurrency=8))
    assert load.n_at_once == 8
    assert load.title.endswith("concurrency 8")


def test_a_closed_loop_by_time_has_more_requests_than_it_can_need() -> None:
    load = load_of(LoadSpec(concurrency=8, duration_s=30))
    assert load.title == "requests of 512 → 64 tokens, concurrency 8 for 30 s"
    assert load.name == "closed8-30sx512-64"
    assert load.until_s == 30
    assert load.arrivals.n > 8 * 30 / (64 * 0.004)
    short = load_of(LoadSpec(concurrency=1, duration_s=15, output_tokens="16"))
    assert short.arrivals.n > 15 / 0.02, "replies of 16 tokens have taken 44 ms at a small model"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LoadSpec(requests=0), "--requests 0"),
        (
            LoadSpec(requests=9, duration_s=3, rate=3),
            "--requests sets the number of requests: --duration-s would be ignored",
        ),
        (LoadSpec(arrival=parse_arrival("steps:5x3"), duration_s=3), "--arrival sets the number of requests"),
        (LoadSpec(sessions=5, rate=3, duration_s=3), "--sessions sets the number of requests"),
        (LoadSpec(concurrency=2, duration_s=0), "--duration-s 0: expected seconds above 0"),
        (LoadSpec(concurrency=2, workers=3), "--concurrency 2: expected at least 3"),
        (LoadSpec(requests=3, workers=500), "500 load drivers for 3 requests"),
        (LoadSpec(concurrency=4, trace=TraceSource("x", 8)), "speed=8 of --trace would be ignored"),
        (LoadSpec(data=DataSource(__file__, split="x")), ",split=x: a file has no splits; drop split=x"),
        (
            LoadSpec(shared_prefix=Sharing(1, 600)),
            "--shared-prefix 600 is longer than a prompt of 512 tokens",
        ),
        (LoadSpec(shared_prefix=Sharing(hit=1.0)), "--shared-prefix 100%: the last token"),
        (LoadSpec(rate=0.0), "--rate 0: expected requests per second"),
        (LoadSpec(rate=1e-9, requests=9), "expected at most 1e[+]09: raise the rate"),
        (LoadSpec(sessions=2, turns="0"), "--turns 0: expected at least 1 turn,"),
        (LoadSpec(turns="5"), "--turns 5 is for conversations: give --sessions N"),
        (LoadSpec(requests=10**11), "--requests 100000000000: expected at most 10,000,000"),
        (
            LoadSpec(prompt_tokens="99999999999"),
            "--prompt-tokens 99999999999: expected at most 16,777,216 tokens",
        ),
        (LoadSpec(prompt_tokens="zipf:1.1,1..9999999999"), "--prompt-tokens zipf"),
        (LoadSpec(rate=1000, duration_s=1e9), "constant: 1e[+]12 requests; expected at most 10,000,000"),
        (LoadSpec(arrival=parse_arrival("steps:1e9x1e9")), "steps: 1e[+]18 requests"),
        (LoadSpec(prompt_tokens="none"), "--prompt-tokens none"),
        (LoadSpec(output_tokens="0"), "--output-tokens 0"),
        (LoadSpec(deadline_s=0), "--deadline-s 0"),
        (LoadSpec(salt="xyz"), "--salt 'xyz'"),
        (LoadSpec(workers=0), "--workers 0"),
        (LoadSpec(seed=10**22), "--seed 10000000000000000000000: expected at most 4,611"),
        (LoadSpec(seed=-(2**63)), "--seed -9223372036854775808"),
        (LoadSpec(concurrency=0), "--concurrency 0"),
        (LoadSpec(concurrency=4, arrival=parse_arrival("poisson")), "--arrival poisson"),
        (LoadSpec(arrival=parse_arrival("poisson")), "--rate"),
        (
            LoadSpec(trace=TraceSource("t.csv"), request_kind=RequestKind.RERANK),
            "--trace sends generate requests: drop --request-kind rerank",
        ),
        (LoadSpec(sessions=2, request_kind=RequestKind.EMBED), "--sessions sends .*--request-kind embed"),
    ],
)
def test_a_silly_wish_is_refused_with_the_flag_that_made_it(spec, words):
    with pytest.raises(WorkloadError, match=words):
        load_of(spec)


def drivers_of(spec: LoadSpec) -> int:
    return n_drivers("auto", load_of(spec).n_connections)


@pytest.mark.parametrize(
    ("spec", "n_workers"),
    [
        (LoadSpec(), 1),
        (LoadSpec(requests=2000), 1),
        (LoadSpec(requests=2001), 2),
        (LoadSpec(requests=100_000), 8),
        (LoadSpec(requests=100_000, concurrency=2000), 1),
        (LoadSpec(requests=100_000, concurrency=6000), 3),
        (LoadSpec(requests=10, concurrency=6000), 1),
        (LoadSpec(requests=100_000, rate=100), 1),
        (LoadSpec(requests=100_000, rate=500), 3),
        (LoadSpec(requests=50, rate=1), 1),
    ],
    ids=lambda x: load_of(x).name if isinstance(x, LoadSpec) else "",
)
def test_auto_is_a_driver_for_every_2000_in_flight_on_half_the_cores(spec, n_workers, monkeypatch):
    monkeypatch.setattr("burstline.loadgen.driver.job.usable_cores", lambda: 16)
    assert drivers_of(spec) == n_workers
    monkeypatch.setattr("burstline.loadgen.driver.job.usable_cores", lambda: 1)
    assert drivers_of(spec) == 1


def test_workers_are_a_number_or_auto():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, LoadSpec)
    given = [["--workers", "auto"], ["--workers", "4"], []]
    assert [read_options(LoadSpec, parser.parse_args(argv)).workers for argv in given] == ["auto", 4, 1]
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--workers", "many"])


def test_a_request_beyond_the_models_limit_says_the_limit():
    load = load_of(LoadSpec(prompt_tokens="4000", output_tokens="200"))
    load.plan(Server(max_tok=4200))
    with pytest.raises(WorkloadError, match="4199"):
        load.plan(Server(max_tok=4199))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LoadSpec(trace=TraceSource("x"), rate=3.0), "--trace sets --rate; drop one"),
        (LoadSpec(data=DataSource("x"), prompt_tokens="9"), "--data sets --prompt-tokens; drop one"),
        (LoadSpec(sessions=3, shared_prefix=Sharing(shared_tok=9)), "--sessions sets --shared-prefix"),
        (LoadSpec(think_s="2"), "--sessions"),
        (LoadSpec(data=DataSource("no/such.jsonl")), "no such file"),
        (LoadSpec(trace=TraceSource("no/such.jsonl")), "no such file"),
    ],
)
def test_no_flag_of_a_source_is_ignored(spec, words):
    with pytest.raises(WorkloadError, match=words):
        load_of(spec)


def test_a_trace_brings_its_own_times_and_a_window_counts_from_its_begin():
    load = load_of(LoadSpec(trace=TraceSource(str(DATA / "trace.jsonl"), 2.0, 0.5, 1.5)))
    due_s = due_times(load.arrivals, rng(0, "arrivals"))
    assert 0 <= due_s[0] < due_s[-1] < 0.5
    title = "Burstline trace of 14 requests/s at 2 times its speed, arrivals at recorded times"
    assert load.title.endswith(title)


def test_rows_with_timestamps_are_due_at_them():
    load = load_of(LoadSpec(data=DataSource(str(DATA / "prompts.jsonl")), arrival=parse_arrival("replay")))
    due_s = due_times(load.arrivals, rng(0, "arrivals"))
    assert due_s[:3].tolist() == pytest.approx([0, 0.04, 0.08])


def test_times_beyond_what_a_clock_counts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "times.txt").write_text("0\n1e11\n")
    with pytest.raises(WorkloadError, match=r"due after 1e\+11 s; expected at most 1e\+09: are the recorded"):
        load_of(LoadSpec(arrival=parse_arrival(f"file:{tmp_path / 'times.txt'}")))


SPECS = (
    LoadSpec(requests=9, rate=2.5, arrival=parse_arrival("gamma:0.5"), warmup=20),
    LoadSpec(arrival=parse_arrival("steps:5x30,10x30"), cancel_share=HangUps(0.2, "normal:8,2")),
    LoadSpec(shared_prefix=Sharing(4, hit=0.6), tokenizer=Path("tok"), workers="auto", deadline_s=1e-3),
    LoadSpec(shared_prefix=Sharing(1, 256), warmup=3, salt="5eed", seed=7),
    LoadSpec(trace=TraceSource("a,b.csv", 2.0, 0.5, 9.0)),
    LoadSpec(warmup=0),
    LoadSpec(data=DataSource("q.csv", ("prompt=question", "reply=answer"), "test"), warmup="auto"),
)


@pytest.mark.parametrize("spec", SPECS)
def test_a_load_is_the_same_as_flags_as_a_suites_table_and_as_typed(spec: LoadSpec) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, LoadSpec)
    assert read_options(LoadSpec, parser.parse_args(words_of(spec))) == spec
    table = {name: value for name, value in spec.to_json().items() if value not in (None, "")}
    assert LoadSpec(**TomlTable(table, "s.toml").options(LoadSpec)) == spec
    assert LoadSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_arrival, "sometimes"),
        (parse_arrival, "gamma"),
        (parse_arrival, "gamma:0"),
        (parse_arrival, "ramp:2..inf"),
        (parse_arrival, "steps:5 by 30"),
        (parse_arrival, "steps:1x0"),
        (parse_arrival, "poisson:8"),
        (Sharing.parse, "101%"),
        (Sharing.parse, "0"),
        (Sharing.parse, "9,groups=0"),
        (Sharing.parse, "9,groups=100000000000"),
        (HangUps.parse, "2"),
        (HangUps.parse, "0.2,at=3"),
        (TraceSource.parse, "t,speed=0"),
        (TraceSource.parse, "t,window=9..3"),
        (TraceSource.parse, "t,pace=2"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_an_example(parse, text):
    with pytest.raises(WorkloadError, match=r"expected|there are burst"):
        parse(text)


WORDS = st.lists(
    st.sampled_from(
        ["0", "8", "-1", "0.5", "1e999", "nan", "20%", "auto", "on", "x", "", "5x", ":", "..", ",", "s"]
    )
    | st.sampled_from(
        ["groups=", "speed=", "window=", "after=", "split=", "poisson", "gamma", "ramp", "steps"]
    )
    | st.text(max_size=3),
    max_size=6,
).map("".join)


@given(row=st.sampled_from([*options_of(LoadSpec).values(), *options_of(Goals).values()]), word=WORDS)
def test_a_word_is_parsed_or_refused(row, word):
    """Never another error: a ValueError is what flags and suites turn into one line."""
    with suppress(ValueError):
        row.parse(word)


def test_a_part_that_is_given_twice_is_refused() -> None:
    with pytest.raises(WorkloadError, match="speed is given twice; give it once"):
        TraceSource.parse("t.csv,speed=2,speed=4")


@pytest.mark.parametrize(
    "spec",
    [
        LoadSpec(trace=TraceSource(str(DATA / "trace.jsonl"))),
        LoadSpec(data=DataSource(str(DATA / "prompts.jsonl")), arrival=parse_arrival("replay")),
        LoadSpec(concurrency=8, requests=20),
        LoadSpec(rate=3, requests=20),
    ],
)
def test_the_flags_of_a_load_make_the_same_load_again(spec: LoadSpec) -> None:
    """A certificate, a profiled load and each run of a sweep are asked for by them."""
    load = load_of(spec)
    parser = argparse.ArgumentParser()
    add_options(parser, LoadSpec)
    again = load_of(read_options(LoadSpec, parser.parse_args(words_of(load.spec))))
    assert (again.spec, again.title) == (load.spec, load.title)


def test_no_warm_up_is_another_wish_than_none_at_all() -> None:
    """Where nothing is said, an engine that was just started is warmed up."""
    assert load_of(LoadSpec(warmup=0)).plan().stages == ()
    assert LoadSpec(warmup=0).warmup != LoadSpec().warmup


def test_goals_are_options_too():
    parser = argparse.ArgumentParser()
    add_options(parser, Goals)
    goals = Goals(("ttft.p99<=2s", "itl.p99<=1s"), 0.05)
    assert read_options(Goals, parser.parse_args(words_of(goals))) == goals


NEEDS_64 = "ttft.p90<=1s may not be met in one run: p90 needs at least 64 requests{}, {} are planned"


@pytest.mark.parametrize(
    ("spec", "slo", "notes"),
    [
        (LoadSpec(requests=60), "ttft.p90<=1s", [NEEDS_64.format("", 60)]),
        (LoadSpec(requests=64), "ttft.p90<=1s", []),
        # Those that fill the server are not counted.
        (LoadSpec(rate=2, duration_s=32), "ttft.p90<=1s", [NEEDS_64.format(" behind the first", 64)]),
        (LoadSpec(rate=2, duration_s=33), "ttft.p90<=1s", []),
        (LoadSpec(requests=64, concurrency=4), "ttft.p90<=1s", [NEEDS_64.format(" behind the first 4", 64)]),
        (LoadSpec(rate=2, duration_s=30), "ttft.p50<=1s", []),
        (LoadSpec(rate=2, duration_s=30), "itl.p99<=1s", []),  # of gaps there are many in one request
        (LoadSpec(rate=2, duration_s=30), "output_tok_per_s>=10", []),
        (LoadSpec(concurrency=1, duration_s=30), "ttft.p99<=1s", []),  # how many it sends is not known
        (LoadSpec(sessions=10), "ttft.p90<=1s", []),
    ],
)
def test_a_target_that_so_few_requests_cannot_meet_is_named_before_the_load(spec, slo, notes, tmp_path):
    where = ServerOptions(engine="truth", url=Secret.words("http://127.0.0.1:9"))
    said: list[str] = []
    check(Settings(load=load_of(spec), where=where, out=tmp_path, goals=Goals(slo=(slo,))), said.append)
    assert said == notes


@pytest.mark.parametrize("engine", ["lightllm", "tgi", "llamacpp"])
def test_sessions_that_an_engine_has_no_words_for_are_refused_before_it_is_asked(engine, tmp_path):
    where = ServerOptions(engine=engine, url=Secret.words("http://127.0.0.1:9"))
    settings = Settings(load=load_of(LoadSpec(sessions=2)), where=where, out=tmp_path)
    with pytest.raises(WorkloadError, match="sessions need --endpoint chat"):
        check(settings)
