"""The sentence about what limited a run is true of its summary, for any summary."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from burstline.measure.record.manifest import Manifest, ServerFacts
from burstline.measure.record.summary import (
    Concurrency,
    Instrument,
    Memory,
    MetricFigures,
    Stationarity,
    Summary,
    Throughput,
)
from burstline.measure.record.verdict import QUEUE_GREW, Reason, SloResult, State, Verdict
from burstline.measure.stats.figure import Absent, Estimate, Figure, Result, known, measured
from burstline.reports.model.comparison import View
from burstline.reports.page import first_screen
from burstline.reports.page.bottleneck import limit_at, limit_of, limited_by, next_by
from burstline.reports.sentences import LIMITS, NEXT
from burstline.servers.identity import Identity
from burstline.servers.settings import Setting
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.spec import LoadSpec


def random_summary(rng: np.random.Generator) -> tuple[Summary, Manifest]:
    """A load and what the server's gauges may have said of it, each within its range."""

    def of(value, unit="requests"):
        return Absent("not watched") if rng.random() < 0.1 else measured(float(value), unit, "")

    most = int(rng.integers(1, 200))
    at_once = int(rng.integers(1, most + 1))
    asked = [LoadSpec(most), LoadSpec(most, concurrency=at_once), LoadSpec(most, rate=5.0)][rng.integers(3)]
    identity = Identity("vllm", max_num_seqs=int(rng.integers(1, 200)), kv_tok=10_000)
    state = rng.choice([State.VALID, State.NOT_STATIONARY, State.CLIENT_BOUND], p=[0.8, 0.1, 0.1])
    reasons = (Reason(QUEUE_GREW, "", ""),) if rng.random() < 0.1 else ()
    running = int(rng.integers(0, min(most, identity.max_num_seqs) + 1))
    concurrency = Concurrency(
        mean=of(rng.uniform(0.5, most)),
        max=of(most),
        server_running_max=of(running),
        server_waiting_mean=of(rng.uniform(0, most - running)),
        streaming_max=of(rng.integers(1, most + 1)) if rng.random() < 0.5 else None,
    )
    memory = Memory(kv_peak_fraction=of(rng.uniform(0, 1), "1"), preemptions=of(rng.choice([0, 0, 3]), "1"))
    trend = Stationarity(in_flight_trend_p=of(rng.random(), "1"))
    summary = Summary(
        {"planned": most, "ok": most}, {}, Verdict(State(state), reasons),
        concurrency=concurrency, memory=memory, stationarity=trend,
    )  # fmt: skip
    return summary, Manifest(engine="vllm", workload="load", asked=asked, identity=identity)


def test_what_is_said_to_limit_a_run_holds_of_500_random_summaries():
    """Each sentence's own condition, written apart from the code that chooses it."""
    rng, seen = np.random.default_rng(7), set()
    for _ in range(500):
        summary, manifest = random_summary(rng)
        code, _ = limited_by(summary, manifest)
        seen.add(code)
        gauges, memory = summary.concurrency, summary.memory
        waiting, running, mean = (
            known(f) for f in (gauges.server_waiting_mean, gauges.server_running_max, gauges.mean)
        )
        kv, preempted = known(memory.kv_peak_fraction), known(memory.preemptions)
        slots = manifest.identity.max_num_seqs
        beyond = min(known(gauges.max) or 0, manifest.asked.concurrency or 999) - slots
        waited = waiting is not None and (waiting >= 1 or ((running or 0) >= slots and waiting >= beyond / 4))
        queued = waited or bool(preempted)
        holds = {
            "": known(gauges.max) is None,
            "limit.client": summary.verdict.state == State.CLIENT_BOUND,
            "limit.in-flight": summary.verdict.has(QUEUE_GREW) and (waiting or 0) < 1,
            "limit.overloaded": summary.verdict.has(QUEUE_GREW) and (waiting or 0) >= 1,
            "limit.overloaded-batch": summary.verdict.has(QUEUE_GREW)
            and (running or 0) >= slots
            and (waiting or 0) >= 1,
            "limit.load": manifest.asked.concurrency is None and not summary.verdict.has(QUEUE_GREW),
            "limit.too-short": manifest.asked.concurrency is None and (waiting is None or waiting >= 1),
            "limit.batch": queued and (running or 0) >= manifest.identity.max_num_seqs,
            "limit.kv-cache": queued and (bool(preempted) or (kv or 0) >= 0.9),
            "limit.own-batch": queued,
            "limit.queue": queued,
            "limit.token-budget": queued,
            "limit.concurrency": manifest.asked.concurrency is not None and waiting is not None,
            "limit.concurrency-unwatched": manifest.asked.concurrency is not None and waiting is None,
            "limit.steps": waiting is not None,
            "limit.gaps": waiting is not None,
            "limit.unsure": waiting is not None and manifest.asked.rate is not None,
            "limit.one-in-flight": known(gauges.max) == 1,
            "limit.streams": waiting is None and known(gauges.streaming_max) is not None,
            "limit.unknown": waiting is None,
        }
        assert holds[code], (code, summary.concurrency, memory)
        if code in ("limit.concurrency", "limit.steps") and waiting and mean:
            many = running is not None and running >= 0.9 * known(gauges.max)
            assert many or waiting < max(1, 0.25 * mean) or manifest.asked.concurrency
        assert (code in LIMITS) == bool(code)
        shown = limit_of(summary, manifest)
        assert not ("room for all" in shown and "Limited by" in shown), shown
    assert len(seen) >= 9


@pytest.mark.parametrize(
    ("reason", "code"),
    [("send-lag", "limit.client"), ("slow-client", "limit.client"), ("read-lag", "limit.load")],
)
def test_a_load_that_a_busy_machine_made_another_one_has_no_known_limit(reason: str, code: str) -> None:
    """DISTURBED, as others made the client late: the load was another one all the same."""
    values = {"name": "TTFT p90", "effect": "2 s", "names": "TTFT p90", "share": 0.2, "effect_ms": 2.0}
    reasons = (Reason.of("busy-machine", share=0.5, who=""), Reason.of(reason, **values))
    verdict = Verdict(State.DISTURBED, reasons)
    gauges = {"mean": measured(2.0, "requests", ""), "max": measured(5.0, "requests", "")}
    trend = Stationarity(in_flight_trend_p=measured(0.5, "1", ""))
    summary = Summary(
        {"planned": 80, "ok": 80}, {}, verdict, concurrency=Concurrency(**gauges), stationarity=trend,
        throughput=Throughput(requests_per_s=measured(40.0, "1/s", "")),
    )  # fmt: skip
    manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(80, rate=40.0))
    assert limited_by(summary, manifest)[0] == code


def test_the_card_of_an_unknown_limit_says_once_that_it_is_unknown():
    """ "Unknown" stood above "What limited the server is unknown: ..."."""
    rng, seen = np.random.default_rng(11), {}
    for _ in range(500):
        view = view_like(*random_summary(rng))
        tile = first_screen._limit(view)
        seen.setdefault(tile.value, set()).add(tile.detail)
    assert len(seen["Unknown"]) >= 2
    assert not [text for text in seen["Unknown"] if "unknown" in text.lower()]
    assert all(text[:1].isupper() for text in seen["Unknown"])


@pytest.mark.parametrize(
    ("running", "slots", "n", "is_exact"),
    [(241, None, 1000, False), (241, 256, 1000, False), (256, 256, 1000, True), (64, 256, 64, True)],
)
def test_the_most_that_a_gauge_read_is_no_maximum_below_the_limit(running, slots, n, is_exact):
    """One step had 242, and the gauge, read once a second, 241 at most."""
    gauges = {
        "mean": measured(n / 2, "requests", ""),
        "max": measured(n, "requests", ""),
        "server_waiting_mean": measured(400.0, "requests", ""),
        "server_running_max": measured(running, "requests", ""),
    }
    summary = Summary({"planned": n, "ok": n}, {}, Verdict(State.VALID), concurrency=Concurrency(**gauges))
    identity = Identity("vllm", max_num_seqs=slots)
    manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(n), identity=identity)
    text = limit_of(summary, manifest)
    if "ran at once" in text:
        assert ("readings of its gauge" in text) != is_exact
    else:
        assert running == n, text


@pytest.mark.parametrize("state", [State.DISTURBED, State.CLIENT_BOUND])
@pytest.mark.parametrize(
    ("codes", "asked", "lag_s", "is_known"),
    [
        (["send-lag"], {"rate": 10.0}, 0.0017, True),
        (["send-lag"], {"rate": 10.0}, 0.01, True),
        (["send-lag"], {"rate": 10.0}, 0.0101, False),
        (["send-lag"], {"rate": 1000.0}, 0.0017, False),
        (["send-lag"], {"rate": 10.0}, None, False),
        (["send-lag"], {"concurrency": 4}, 0.0017, False),
        (["send-lag", "slow-client"], {"rate": 10.0}, 0.0017, False),
        (["slow-client"], {"rate": 10.0}, 0.0017, False),
    ],
)
def test_sends_that_are_late_by_little_of_the_time_between_them_are_the_load_as_asked(
    state: State, codes: list[str], asked: dict[str, float], lag_s: float | None, is_known: bool
) -> None:
    """At 10 req/s, with one request in flight at most, a client 1.7 ms late "may have been too slow"."""
    gauges = Concurrency(mean=measured(0.4, "requests", ""), max=measured(1.0, "requests", ""))
    verdict = Verdict(state, tuple(Reason(code, "", "") for code in codes))
    summary = Summary(
        {"planned": 100, "ok": 100}, {}, verdict, concurrency=gauges,
        instrument=Instrument(send_lag_p99_s=measured(lag_s, "s", "nothing was sent")),
    )  # fmt: skip
    manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(100, **asked))
    assert (limited_by(summary, manifest)[0] != "limit.client") == is_known


@pytest.mark.parametrize(
    ("slots", "waiting", "served", "code"),
    [
        (64, 11.6, None, "limit.batch"),
        (64, 11.6, 12.1, "limit.batch"),
        (128, 11.6, None, "limit.too-short"),
        (128, 11.6, 14.0, "limit.load"),
        (128, 0.0, None, "limit.load"),
        (None, None, None, "limit.too-short"),
        (None, None, 14.0, "limit.load"),
    ],
)
def test_an_open_loop_with_a_queue_or_too_short_for_one_did_not_see_the_server_keep_up(
    slots: int | None, waiting: float | None, served: float | None, code: str
) -> None:
    """Cut to the part after its warm-up, the rising queue of a short run shows no trend."""

    def of(value: float | None, unit: str) -> Figure:
        return Absent("not known") if value is None else measured(value, unit, "")

    gauges = {
        "mean": measured(84.0, "requests", ""),
        "max": measured(92.0, "requests", ""),
        "server_waiting_mean": of(waiting, "requests"),
        "server_running_max": of(slots and min(slots, 92.0), "requests"),
    }
    trend = Stationarity(in_flight_trend_p=measured(0.39, "1", ""))
    target = SloResult("ttft.p90<=500ms", Result.FAIL, "", measured(2.3, "s", ""))
    summary = Summary(
        {"planned": 240, "ok": 240}, {}, Verdict(State.VALID), concurrency=Concurrency(**gauges),
        stationarity=trend, throughput=Throughput(requests_per_s=of(served, "1/s")), targets=(target,),
    )  # fmt: skip
    asked = LoadSpec(240, rate=14.0)
    manifest = Manifest(
        engine="vllm", workload="load", asked=asked, identity=Identity("vllm", max_num_seqs=slots)
    )
    assert limited_by(summary, manifest)[0] == code
    view = SimpleNamespace(summary=summary, manifest=manifest)
    assert next_by(view).startswith("Next: lower the load until the SLOs hold")


@pytest.mark.parametrize(
    ("mean", "least_s", "step"),
    [(0.4, 0.08, "loosen TTFT p90 ≤ 50 ms"), (0.4, 0.04, "lower the load"), (1.6, 0.08, "lower the load")],
)
def test_requests_that_overlap_by_chance_do_not_hide_an_slo_out_of_reach(
    mean: float, least_s: float, step: str
) -> None:
    """Alone nearly always, and the fastest is slower than the SLO: no lower load would meet it."""
    ttft = MetricFigures(min=measured(least_s, "s", ""), max=measured(0.2, "s", ""))
    gauges = Concurrency(mean=measured(mean, "requests", ""), max=measured(2.0, "requests", ""))
    target = SloResult("ttft.p90<=50ms", Result.FAIL, "", measured(0.15, "s", ""))
    summary = Summary(
        {"planned": 20, "ok": 20}, {"ttft": ttft}, Verdict(State.VALID), concurrency=gauges, targets=(target,)
    )
    manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(20, rate=4.0))
    assert step in next_by(SimpleNamespace(summary=summary, manifest=manifest))


ALONE = Concurrency(mean=measured(0.4, "requests", ""), max=measured(1.0, "requests", ""))
FEW = Absent("p90 needs 64 samples, there are 63")
OPEN = [
    # What was measured of the SLO, the load, and what decides it.
    (FEW, {"requests": 64}, "send more requests (about --requests 66), which TTFT p90 ≤ 50 ms needs."),
    (FEW, {"duration_s": 20.0}, "send more requests (about --duration-s 21), which"),
    (FEW, {"sessions": 12}, "send more requests (about --sessions 13), which"),
    # Half of the interval is 2.1 times as far from the point as the bound is: 4.41 times as many.
    (
        Estimate(0.06, 0.039, 0.081, 0.95, 60, "s"),
        {"requests": 64},
        "send more requests (about --requests 283), which",
    ),
    (Estimate(0.0501, 0.02, 0.08, 0.95, 60, "s"), {"requests": 64}, "send more at once"),
    (Estimate(0.05, 0.02, 0.08, 0.95, 60, "s"), {"requests": 64}, "send more at once"),
    (Absent("no token was counted"), {"requests": 64}, "send more at once"),
]


@pytest.mark.parametrize(("shown", "asked", "step"), OPEN)
def test_an_slo_that_more_requests_decide_comes_before_another_load(
    shown: Figure, asked: dict[str, float], step: str
) -> None:
    """A higher rate was advised: it sends as many requests, and leaves the SLO as open."""
    n = 63 if shown is FEW else 90
    ttft = MetricFigures(mean=Estimate(0.04, None, None, None, n, "s"))
    target = SloResult("ttft.p90<=50ms", Result.INCONCLUSIVE, "", shown)
    summary = Summary(
        {"planned": 64, "ok": 64}, {"ttft": ttft}, Verdict(State.VALID), concurrency=ALONE, targets=(target,)
    )
    manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(**asked, rate=4.0))
    view = view_like(summary, manifest)
    assert next_by(view).startswith(f"Next: {step}")
    probe = view_like(summary, replace(manifest, argv=("burstline", "limit")))
    assert "more requests" not in limit_at("4 req/s", probe)[1], "a search sends as many as it needs"
    missed = replace(target, target="tpot.p90<=50ms", result=Result.FAIL)
    view = view_like(replace(summary, targets=(target, missed)), manifest)
    assert "more requests" not in next_by(view)


SLOTS = "let the server run more than 4 requests"
ASKED = (Setting("max_num_seqs", "4", "-np 4", "4"),)


def view_like(summary: Summary, manifest: Manifest) -> View:
    return View(SimpleNamespace(manifest=manifest), summary)


@pytest.mark.parametrize(
    ("engine", "slots", "server", "words", "step"),
    [
        ("llamacpp", 4, {"attached": False}, (), "raise --concurrency."),
        ("llamacpp", 8, {"attached": True}, (), "raise --concurrency."),
        ("llamacpp", 4, {"attached": True}, (), f"{SLOTS} (--parallel) at"),
        ("llamacpp", 4, {"attached": False}, ("--", "-np", "4"), f"{SLOTS} (--max-num-seqs) at"),
        ("llamacpp", 4, {"attached": False, "settings": ASKED}, (), SLOTS),
        ("vllm", 4, {"attached": False}, (), f"{SLOTS} (--max-num-seqs) at"),
        ("endpoint", 4, {"attached": True}, (), f"{SLOTS} at once, and raise --concurrency too."),
        ("vllm", None, {"attached": True}, (), "raise --concurrency."),
    ],
)  # fmt: skip
def test_where_all_slots_are_taken_more_users_are_advised_with_more_slots(
    engine: str, slots: int | None, server: dict, words: tuple[str, ...], step: str
) -> None:
    """Without more of them, more users would only queue; of a server fitted to the load they follow."""
    four = measured(4.0, "requests", "")
    gauges = Concurrency(
        mean=four,
        max=measured(5.0, "requests", ""),
        server_running_max=four,
        server_waiting_mean=measured(0.0, "requests", ""),
    )
    summary = Summary({"planned": 60, "ok": 60}, {}, Verdict(State.VALID), concurrency=gauges)
    manifest = Manifest(
        engine=engine, workload="load", asked=LoadSpec(60, concurrency=4), argv=("burstline", "run", *words),
        identity=Identity(engine, max_num_seqs=slots), server=ServerFacts(model="m", **server),
    )  # fmt: skip
    assert limited_by(summary, manifest)[0] == "limit.concurrency"
    assert next_by(view_like(summary, manifest)).startswith(f"Next: {step}")


def test_one_slot_that_is_taken_is_not_to_get_a_higher_rate_alone() -> None:
    manifest = Manifest(
        engine="llamacpp", workload="load", asked=LoadSpec(60, rate=4.0), server=ServerFacts(model="m"),
        identity=Identity("llamacpp", max_num_seqs=1),
    )  # fmt: skip
    summary = Summary({"planned": 60, "ok": 60}, {}, Verdict(State.VALID), concurrency=ALONE)
    assert limited_by(summary, manifest)[0] == "limit.one-in-flight"
    told = "Next: let the server run more than 1 request (--parallel) at once, and raise --rate too."
    assert next_by(view_like(summary, manifest)) == told


@pytest.mark.parametrize(("slots", "code"), [(4, "limit.overloaded-batch"), (8, "limit.overloaded")])
def test_a_queue_that_grew_for_want_of_slots_is_the_batch_limits(slots: int, code: str) -> None:
    gauges = {
        "mean": measured(40.0, "requests", ""),
        "max": measured(90.0, "requests", ""),
        "server_waiting_mean": measured(36.0, "requests", ""),
        "server_running_max": measured(4.0, "requests", ""),
    }
    verdict = Verdict(State.NOT_STATIONARY, (Reason.of(QUEUE_GREW, share=2.0),))
    summary = Summary({"planned": 80, "ok": 80}, {}, verdict, concurrency=Concurrency(**gauges))
    identity = Identity("vllm", max_num_seqs=slots)
    asked = LoadSpec(80, rate=40.0)
    manifest = Manifest(engine="vllm", workload="load", asked=asked, identity=identity)
    assert limited_by(summary, manifest)[0] == code
    if slots == 4:
        assert limit_of(summary, manifest).startswith(
            "Limited by the batch limit of 4 requests (--max-num-seqs)"
        )


@pytest.mark.parametrize(
    ("running", "waiting", "most_waiting", "is_queue"),
    [
        (4, 36.0, 80, True),
        (4, 36.0, None, True),
        (4, None, 80, True),
        (106, 0.0, 0, False),
        (106, 0.02, None, False),
        (None, None, None, False),
        (4, 0.0, 0, False),
    ],
)
def test_a_queue_is_named_only_where_the_server_counted_one(running, waiting, most_waiting, is_queue):
    """A server slowed by others ran all 110 at once: no reading of its gauge met one that waited."""
    names = ("server_running_max", "server_waiting_mean", "server_waiting_max")
    known_ones = zip(names, (running, waiting, most_waiting), strict=True)
    gauges = {name: measured(value, "requests", "not watched") for name, value in known_ones}
    concurrency = Concurrency(mean=measured(41.0, "", ""), max=measured(110.0, "", ""), **gauges)
    verdict = Verdict(State.NOT_STATIONARY, (Reason.of(QUEUE_GREW, share=4.06),))
    summary = Summary({"planned": 300, "ok": 300}, {}, verdict, concurrency=concurrency)
    identity = Identity("reference", max_num_seqs=4)
    manifest = Manifest(engine="x", workload="load", asked=LoadSpec(300, rate=40.0), identity=identity)
    code, _ = limited_by(summary, manifest)
    assert ("queue" in f"{limit_of(summary, manifest)} {LIMITS[code]}") == is_queue
    assert ("in flight" in limit_of(summary, manifest)) != is_queue


@pytest.mark.parametrize(("waiting", "code"), [(0.88, "limit.batch"), (0.1, "limit.concurrency")])
def test_one_request_beyond_the_batch_limit_waits_for_it(waiting: float, code: str) -> None:
    """Where a search of the highest load ends: four slots, five at a time, the queue never above one."""
    gauges = {
        "mean": measured(5.0, "requests", ""),
        "max": measured(6.0, "requests", ""),
        "server_waiting_mean": measured(waiting, "requests", ""),
        "server_running_max": measured(4.0, "requests", ""),
    }
    summary = Summary({"planned": 80, "ok": 80}, {}, Verdict(State.VALID), concurrency=Concurrency(**gauges))
    identity = Identity("reference", max_num_seqs=4)
    asked = LoadSpec(80, concurrency=5)
    manifest = Manifest(engine="reference", workload="load", asked=asked, identity=identity)
    assert limited_by(summary, manifest)[0] == code
    if code == "limit.batch":
        assert "at most 4 of 5 requests ran at once and the rest waited" in limit_of(summary, manifest)


@pytest.mark.parametrize(("served", "code"), [(3.23, "limit.unsure"), (3.9, "limit.gaps")])
def test_a_short_run_that_served_less_than_its_rate_names_no_limit(served: float, code: str) -> None:
    """Forty requests at 4 a second are too few for a trend of those in flight, which may have grown."""
    gauges = {name: measured(12.0, "requests", "") for name in ("mean", "max", "server_running_max")}
    concurrency = Concurrency(**gauges, server_waiting_mean=measured(0.0, "requests", ""))
    throughput = Throughput(requests_per_s=measured(served, "1/s", ""))
    summary = Summary(
        {"planned": 40, "ok": 40},
        {},
        Verdict(State.DISTURBED),
        concurrency=concurrency,
        throughput=throughput,
    )
    manifest = Manifest(
        engine="vllm", workload="load", asked=LoadSpec(40, arrival=parse_arrival("constant"), rate=4.0)
    )
    assert limited_by(summary, manifest)[0] == code


@pytest.mark.parametrize(
    ("full", "budget", "code"),
    [(0.9, 2048, "limit.batch"), (0.2, 2048, "limit.token-budget"), (0.2, None, "limit.queue")],
)
def test_a_batch_that_was_seldom_full_while_requests_waited_is_not_the_limit(
    full: float, budget: int | None, code: str
) -> None:
    """A burst whose prompts enter 16 a step: its batch is full for a moment, long after most had waited."""
    gauges = {
        "mean": measured(110.0, "requests", ""),
        "max": measured(200.0, "requests", ""),
        "server_waiting_mean": measured(60.0, "requests", ""),
        "server_running_max": measured(128.0, "requests", ""),
        "server_full_fraction": measured(full, "1", ""),
    }
    memory = Memory(kv_peak_fraction=measured(0.016, "1", ""))
    summary = Summary(
        {"planned": 200, "ok": 200}, {}, Verdict(State.VALID),
        concurrency=Concurrency(**gauges), memory=memory,
    )  # fmt: skip
    identity = Identity("vllm", max_num_seqs=128, max_num_batched_tokens=budget)
    manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(200), identity=identity)
    assert limited_by(summary, manifest)[0] == code
    assert ("the rest waited" in limit_of(summary, manifest)) == (full > 0.5)
    assert ("fewer for most of the time" in limit_of(summary, manifest)) == (full < 0.5)


def test_users_who_pause_are_the_limit_and_not_the_model():
    """Eight users of whom four have a request in flight on average; without pauses the concurrency is it."""
    gauges = {
        "mean": measured(4.0, "requests", ""),
        "max": measured(8.0, "requests", ""),
        "server_waiting_mean": measured(0.0, "requests", ""),
        "server_running_max": measured(8.0, "requests", ""),
    }
    summary = Summary({"planned": 80, "ok": 80}, {}, Verdict(State.VALID), concurrency=Concurrency(**gauges))

    def told(**asked):
        manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(80, concurrency=8, **asked))
        return limited_by(summary, manifest)[0], limit_of(summary, manifest)

    text = "Limited by the pauses of the users: on average 4.0 requests of 8 users in flight."
    assert told(think_s="1") == ("limit.pauses", text)
    assert told()[0] == "limit.concurrency"


@pytest.mark.parametrize("why", ["/metrics: no complete answer within 5 s", "it has no such metric"])
@pytest.mark.parametrize(("at_a_time", "streams"), [(16, 1), (16, 5), (None, 32), (None, 256)])
def test_a_server_without_a_gauge_of_its_queue_is_limited_by_what_its_replies_show(why, at_a_time, streams):
    """R41, R47: a page that is slow and a metric that is not there are two reasons."""
    concurrency = Concurrency(
        mean=measured(12.0, "requests", ""), max=measured(400.0, "requests", ""),
        server_waiting_mean=Absent(why), streaming_max=measured(float(streams), "requests", ""),
    )  # fmt: skip
    ok = {"planned": 400, "ok": 400}
    summary = Summary(ok, {}, Verdict(State.VALID), concurrency=concurrency)
    manifest = Manifest(engine="openai", workload="load", asked=LoadSpec(400, concurrency=at_a_time))
    text = limit_of(summary, manifest)
    most = at_a_time or 400
    assert f"at most {streams} of {most} requests streamed at once" in text
    assert why in text
    unseen = replace(summary, concurrency=replace(concurrency, streaming_max=None))
    assert "streamed" not in limit_of(unseen, manifest)
    assert why in limit_of(unseen, manifest)


@pytest.mark.parametrize("at_a_time", [None, 100])
def test_a_full_listen_queue_is_named_as_the_limit(at_a_time):
    """A server without metrics gets a hundred connections at once, with a backlog of five."""
    full = Reason("listen-queue", "The server's listen queue was full.", "")
    concurrency = Concurrency(
        mean=measured(60.0, "requests", ""), max=measured(100.0, "requests", ""),
        server_waiting_mean=Absent("it has no metrics"), streaming_max=measured(5.0, "requests", ""),
    )  # fmt: skip
    verdict = Verdict(State.VALID, warnings=(full,))
    summary = Summary({"planned": 100, "ok": 100}, {}, verdict, concurrency=concurrency)
    manifest = Manifest(engine="openai", workload="load", asked=LoadSpec(100, concurrency=at_a_time))
    assert limited_by(summary, manifest)[0] == "limit.listen-queue"
    assert limit_of(summary, manifest) == (
        "Limited by the server's listen queue: it was full, so TCP sent requests again, with at most 100 "
        "requests in flight."
    )
    assert "backlog" in NEXT["limit.listen-queue"]
    others = replace(summary, verdict=Verdict(State.VALID))
    assert limited_by(others, manifest)[0] == "limit.streams"


@pytest.mark.parametrize(
    ("running", "kv", "step"),
    [
        (2, 0.561, "to about 3, which"),
        (2, 0.5, "to about 4, which"),
        (20, 0.055, "to about 360, which"),
        (256, 0.895, "to about 280, which"),
    ],
)
def test_a_batch_is_not_to_be_raised_beyond_what_the_kv_cache_holds(running, kv, step):
    """Two that fill 56% of it leave room for a third, not for a fourth."""
    gauges = {
        "mean": measured(380.0, "requests", ""),
        "max": measured(400.0, "requests", ""),
        "server_waiting_mean": measured(300.0, "requests", ""),
        "server_running_max": measured(float(running), "requests", ""),
    }
    summary = Summary(
        {"planned": 400, "ok": 400}, {}, Verdict(State.VALID), concurrency=Concurrency(**gauges),
        memory=Memory(kv_peak_fraction=measured(kv, "1", "")),
    )  # fmt: skip
    identity = Identity("vllm", max_num_seqs=running)
    manifest = Manifest(engine="vllm", workload="load", asked=LoadSpec(400), identity=identity)
    assert step in next_by(view_like(summary, manifest))
