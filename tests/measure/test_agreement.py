"""The server's histograms against the client's records."""

from __future__ import annotations

import numpy as np
import pytest

from burstline.measure.metrics.definitions import e2e_service, itl, ttft_service
from burstline.measure.metrics.server import agreement, disagreement
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.summary import Summary
from burstline.measure.record.tables import record_table, telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import Grade, PercentileGrade, State, Verdict
from burstline.measure.stats.estimates import Absent, Estimate
from burstline.measure.stats.quantiles import Samples, percentiles
from burstline.measure.verdict.judge import caveats
from burstline.servers.host.telemetry import Row
from tests.measure.making import failed, ok

EDGES_S = (0.01, 0.1, 0.25, 0.5, 1.0, np.inf)
SENT_S = 0.001
"""When `ok` sends."""


def seen_by_watcher(*rows: Row) -> Telemetry:
    return Telemetry.of(telemetry_table(rows)).over(1.0)


def client(ttft_s: float = 0.2, gap_s: float = 0.03, n: int = 20) -> Columns:
    """n requests of four tokens, the first so long after it was sent."""
    return columns_of(record_table([ok(i, SENT_S + ttft_s, [gap_s] * 3) for i in range(n)]))


def server(
    ttft_s: float = 0.2, gap_s: float = 0.03, n: int = 20, before: int = 7, at_ns=(-1, 2 * 10**9)
) -> Telemetry:
    """What its histograms were before and after the load, `before` requests of 0.9 s among the earlier."""
    seen = {"ttft": [ttft_s] * n, "itl": [gap_s] * 3 * n, "e2e": [ttft_s + 3 * gap_s] * n}
    rows = []
    for at, now in zip(at_ns, (False, True), strict=False):
        for name, values in seen.items():
            all_s = np.array([0.9] * before + (values if now else []))
            for edge_s in EDGES_S:
                rows.append((at, f"{name}_le_{edge_s}".replace("inf", "+Inf"), (all_s <= edge_s).sum()))
            rows += [(at, f"{name}_count", len(all_s)), (at, f"{name}_sum", all_s.sum())]
    return seen_by_watcher(*(Row(at, "engine", name, float(value)) for at, name, value in rows))


def point(figure: Estimate | Absent) -> float:
    assert isinstance(figure, Estimate), figure
    return figure.point


def test_two_sides_that_agree_say_so_and_nothing_is_flagged() -> None:
    found = agreement(client(), server())
    assert [point(found.figure(f"{name}_gap_s")) for name in ("ttft", "itl", "e2e")] == pytest.approx(
        [0, 0, 0]
    )
    assert point(found.ttft_client_p50_s) == pytest.approx(0.2)
    assert not list(disagreement(found, {}))


def test_the_servers_median_lies_in_its_bucket_and_earlier_requests_are_left_out() -> None:
    figure = agreement(client(), server()).ttft_server_p50_s
    assert isinstance(figure, Estimate)
    assert (figure.low, figure.high, figure.level, figure.n) == (0.1, 0.25, 1.0, 20)
    assert 0.1 < figure.point < 0.25
    late = agreement(client(2.0), server(2.0)).ttft_server_p50_s
    assert isinstance(late, Estimate)
    assert (late.low, late.high) == (1.0, None)


@pytest.mark.parametrize("n", [11, 12, 24])
def test_the_clients_median_is_the_one_that_the_other_tables_print(n: int) -> None:
    """Of 24 requests it was the 12th value here, and half way to the 13th elsewhere."""
    records = [ok(i, 0.1 * (i + 1), [0.01 * (i + 1), 0.03, 0.05][: 1 + i % 3]) for i in range(n)]
    c = columns_of(record_table(records))
    found = agreement(c, server(n=n))
    printed = {
        "ttft": percentiles(Samples.per_request(ttft_service(c)), (0.5,), "s"),
        "itl": percentiles(itl(c), (0.5,), "s"),
        "e2e": percentiles(Samples.per_request(e2e_service(c)), (0.5,), "s"),
    }
    for name, own in printed.items():
        assert point(found.figure(f"{name}_client_p50_s")) == pytest.approx(point(own["p50"])), name


def test_what_lies_between_the_two_is_named_with_its_size() -> None:
    reason = next(disagreement(agreement(client(0.23), server(0.2)), {}))
    assert reason is not None
    assert reason.code == "server-view"
    assert reason.text == "The server's own TTFT is 30 ms shorter than the client's."
    slower = next(disagreement(agreement(client(gap_s=0.05), server(gap_s=0.02)), {}))
    assert slower is not None
    assert "ITL" in slower.text


def test_a_server_that_says_more_than_the_client_saw_cannot_be_right() -> None:
    reason = next(disagreement(agreement(client(0.2), server(0.24)), {}))
    assert reason is not None
    assert reason.text == "The server's own TTFT is 40 ms longer than the client saw."


def test_five_percent_and_a_millisecond_are_borne() -> None:
    assert not list(disagreement(agreement(client(0.209), server(0.2)), {}))
    assert not list(disagreement(agreement(client(0.0029, gap_s=0.5), server(0.002, gap_s=0.5)), {}))


@pytest.mark.parametrize(
    ("late_s", "is_said"), [({}, True), ({"ttft": 0.01}, True), ({"ttft": 0.02}, False), ({"e2e": 1.0}, True)]
)
def test_what_our_own_late_reads_explain_is_not_put_down_to_the_network(
    late_s: dict[str, float], is_said: bool
) -> None:
    found = agreement(client(0.23), server(0.2))
    assert any("TTFT" in each.text for each in disagreement(found, late_s)) == is_said
    graded = {name: {"p50": PercentileGrade(Grade.OK, 0.0, s)} for name, s in late_s.items()}
    counts, verdict = {"planned": 20, "ok": 20}, Verdict(State.VALID)
    summary = Summary(counts, {}, verdict, agreement=found, grades=graded)
    warnings = caveats(summary, Manifest(engine="vllm", workload="load"))
    assert any("server's own TTFT" in each.text for each in warnings) == is_said
    longer = agreement(client(0.2), server(0.24))
    assert "longer" in next(disagreement(longer, {"ttft": 1.0})).text, "no lateness explains this"


def test_where_the_two_sides_counted_different_numbers_they_are_not_compared() -> None:
    others = agreement(client(0.15, n=10), server(0.2)).ttft_gap_s
    assert isinstance(others, Absent)
    assert others.reason == "the server also counted others' or failed requests (20, here 10)"
    late = agreement(client(0.15, n=20), server(0.2, n=16))
    assert isinstance(late.ttft_gap_s, Absent)
    assert late.ttft_gap_s.reason == "the server's own metrics are incomplete (16 of 20)"
    assert not list(disagreement(late, {}))


def test_what_was_not_watched_or_not_told_is_absent_and_not_flagged() -> None:
    silent = seen_by_watcher()
    others = seen_by_watcher(Row(0, "engine", "running", 1.0))
    nobody = columns_of(record_table([failed(0)]))
    late = server(at_ns=(10, 2 * 10**9))
    cases = [
        (client(), silent),
        (client(), others),
        (client(), late),
        (nobody, server()),
        (client(), server(n=0)),
    ]
    for c, watched in cases:
        found = agreement(c, watched)
        assert isinstance(found.ttft_gap_s, Absent)
        assert found.ttft_gap_s.reason
        assert not list(disagreement(found, {}))
