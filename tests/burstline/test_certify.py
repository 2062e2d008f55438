"""Certifying: what is fired for which load, and what is printed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest

from burstline import certification, cli
from burstline.bench.load_options import Load, checked
from burstline.certification import (
    EVENTS_PER_S,
    Drill,
    certified,
    climbed,
    drill,
    ladder,
)
from burstline.loadgen.record.typed_json import from_json
from burstline.loadgen.record.verdict import tolerance_s
from burstline.loadgen.verdict.certificate import Certificate, EventRateLimit, MetricError, ServedSchedule
from burstline.verbs.certify import told
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.spec import LoadSpec

CLEAN = Certificate(
    errors={"ttft": MetricError(10, 1e-6, 2e-6, 3e-6, 0.2, 0.21, 0.200001, 0.210001)},
    schedule=ServedSchedule(0.012, 0.006, 0.012, None, None, None, None),
    n_requests=10,
    n_events=640,
    n_unmatched=0,
    events_per_s=20_000.0,
    read_lag_p50_s=7e-6,
    read_lag_p99_s=9e-4,
    kernel_stamped=1.0,
    cpu_per_event_s=9e-6,
    server_late_p99_s=1e-4,
    others_cpu_fraction=0.3,
    limit=EventRateLimit(39_000.0, "truth server"),
)


def lasts_s(planned: Drill) -> float:
    """The least time that the drill takes: waves one after the other, or the last arrival's reply."""
    script, plan = planned.scripts[0], planned.plan
    reply_s = script.ttft_s + max(r.n_output_tok for r in plan.requests) * script.gaps_s[0]
    if planned.load.spec.concurrency:
        return -(-len(plan.requests) // planned.load.spec.concurrency) * reply_s
    return plan.due_ns[-1] / 1e9 + reply_s


@pytest.mark.parametrize(
    "spec",
    [
        LoadSpec(),
        LoadSpec(requests=1),
        LoadSpec(requests=5000, output_tokens="2000"),
        LoadSpec(rate=10, duration_s=600),
        LoadSpec(arrival=parse_arrival("poisson"), rate=0.1, requests=100),
        LoadSpec(arrival=parse_arrival("ramp:1..500"), duration_s=60),
        LoadSpec(concurrency=1, requests=500, output_tokens="256"),
        LoadSpec(concurrency=1000, requests=100_000, output_tokens="16"),
    ],
    ids=lambda spec: checked(spec).name,
)
def test_every_load_has_a_drill_of_a_few_seconds(spec: LoadSpec) -> None:
    planned = drill(checked(spec), 2.0)
    assert lasts_s(planned) < 5
    assert len(planned.plan.requests) >= min(32, checked(spec).arrivals.n)


def test_the_classic_burst_is_drilled_whole_at_a_gpus_pace() -> None:
    planned = drill(checked(LoadSpec()), 10.0)
    assert planned.notes == ()
    assert len(planned.plan.requests) == 1000
    assert {(r.n_prompt_tok, r.n_output_tok) for r in planned.plan.requests} == {(512, 64)}
    assert planned.scripts[0].gaps_s[0] == pytest.approx(1000 / EVENTS_PER_S)


def test_a_short_deadline_does_not_stand_in_a_drills_way() -> None:
    planned = drill(checked(LoadSpec(requests=500, concurrency=4, deadline_s=0.01)), 2.0)
    assert planned.load.spec.deadline_s > 5


def test_what_is_cut_or_hastened_is_said() -> None:
    poisson = LoadSpec(arrival=parse_arrival("poisson"), rate=1, requests=500)
    notes = drill(
        checked(LoadSpec(arrival=parse_arrival("poisson"), rate=1, requests=500, output_tokens="4096")), 2.0
    ).notes
    assert [note.partition(" ")[0] for note in notes] == ["the", "arrivals", "180"]
    law = drill(checked(poisson), 2.0).law
    assert law is not None
    assert law[0] > 5


def test_the_ladder_climbs_and_every_stream_has_every_rung() -> None:
    planned, rungs = ladder()
    n_tok = sum(n for _, n in rungs)
    assert {request.n_output_tok for request in planned.plan.requests} == {n_tok}
    assert {len(script.gaps_s) for script in planned.scripts} == {n_tok - 1}
    assert list(rungs) == sorted(rungs)


def test_the_best_climb_counts_and_nobody_climbs_on_once_it_was_not_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        certification, "fired", lambda drill: SimpleNamespace(columns=None, served=(), reports=[Report])
    )

    def climb(*found: EventRateLimit) -> tuple[EventRateLimit, int]:
        left = list(found)
        monkeypatch.setattr(certification, "limit", lambda *_: left.pop(0))
        return climbed(), len(found) - len(left)

    low, high, other = (
        EventRateLimit(9_000, "client"),
        EventRateLimit(29_000, "client"),
        EventRateLimit(40_000, "truth server"),
    )
    assert climb(low, high, low, other) == (high, 3)
    assert climb(low, other, high) == (other, 2)


class Report:
    t0_ns = 0


def counted(monkeypatch: pytest.MonkeyPatch, found: Certificate) -> None:
    """Certifying without a server."""
    monkeypatch.setattr(certification, "certified", lambda drill: found)


def test_the_client_is_within_its_tolerance_of_the_truth() -> None:
    """The whole way, once: 50 requests, driver and server in processes of their own."""
    found = certified(drill(short(), 0.5))
    assert (found.n_requests, found.n_unmatched) == (50, 0)
    assert found.kernel_stamped > 0.99
    assert set(found.errors) == {"ttft", "itl", "tpot", "e2e"}
    for error in found.errors.values():
        assert error.p50_s < 1e-3
        assert abs(error.reported_p50_s - error.true_p50_s) < tolerance_s(error.true_p50_s)
    assert abs(found.errors["ttft"].bias_s) < 1e-3, "the send is stamped when it returns, about as it arrives"
    assert found.schedule.spread_s is not None
    assert found.cpu_per_event_s is not None


def short() -> Load:
    return checked(LoadSpec(requests=50, prompt_tokens="64", output_tokens="16"))


def test_a_certificate_is_told_with_whose_limit_it_was() -> None:
    text = told("10 x 512 -> 64 tokens, burst", ("the first 10 of 20 requests",), CLEAN)
    assert "10 x 512 -> 64 tokens, burst (the first 10 of 20 requests)" in text
    assert "at least 39,000 events a second: the truth server sends no faster" in text
    assert "12.0 ms from the first arrival to the last" in text
    theirs = told("x", (), replace(CLEAN, limit=EventRateLimit(9_000.0, "client"), n_unmatched=3))
    assert "the client does not follow" in theirs
    assert "3 of 10 requests failed" in theirs


def test_the_verb_prints_json_on_request_and_fails_where_it_is_not_clean(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    counted(monkeypatch, replace(CLEAN, n_unmatched=1))
    monkeypatch.setattr(certification, "climbed", lambda: EventRateLimit(1.0, "search"))
    assert cli.main(["certify", "--requests", "10", "--json"]) == 4
    assert from_json(Certificate, orjson.loads(capfdbinary.readouterr().out)).limit == EventRateLimit(
        1.0, "search"
    )
    assert cli.main(["certify", "--requests", "10", "--concurrency", "2", "--arrival", "poisson"]) == 2
