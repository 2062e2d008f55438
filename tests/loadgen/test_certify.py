"""Certificates: what the client reported against what a server of known truth sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from burstline.loadgen.record.columns import Columns, columns_of
from burstline.loadgen.record.tables import record_table
from burstline.loadgen.record.typed_json import from_json, to_json
from burstline.loadgen.verdict.certificate import Certificate, certificate, limit
from burstline.servers.truth.exchanges import Served
from tests.loadgen.making import failed, ok

MS = 1_000_000
T0_NS = 7_000_000_000


def served(index: int, sent_ns: list[int], arrival_ns: int = 0) -> Served:
    """A reply of one token per event, each sent when it was due but for the last, 2 ms late."""
    n = len(sent_ns)
    at_ns = [T0_NS + ns for ns in sent_ns]
    return Served(
        number=index,
        index=index,
        path="/v1/completions",
        status=200,
        first_byte_ns=T0_NS + arrival_ns,
        arrival_ns=T0_NS + arrival_ns,
        read_ns=T0_NS + arrival_ns,
        kernel_stamps=True,
        ended_ns=at_ns[-1],
        ended="done",
        n_prompt_tok=4,
        event_kind=["token"] * n,
        event_tok=[1] * n,
        event_due_ns=[*at_ns[:-1], at_ns[-1] - 2 * MS],
        event_ns=at_ns,
    )


class Report:
    """What a certificate reads of a driver's report."""

    t0_ns = T0_NS
    cpu_s = 0.001
    reader = "python"


def columns(*records) -> Columns:
    return columns_of(record_table(records))


def certify(c: Columns, rows: list[Served], **options) -> Certificate:
    return certificate(c, rows, [Report()], **options)  # type: ignore[list-item]


def reported_late(late_s: float, n: int = 20) -> Certificate:
    """Every token of n requests reported so much too late."""
    records = [ok(i, 0.2 + late_s, [0.02] * 3) for i in range(n)]
    rows = [served(i, [200 * MS, 220 * MS, 240 * MS, 260 * MS], arrival_ns=1 * MS) for i in range(n)]
    return certify(columns(*records), rows)


def test_what_is_reported_5_ms_late_is_5_ms_off_where_it_counts_from_due_and_not_in_the_gaps() -> None:
    found = reported_late(0.005)
    for name in ("ttft", "e2e"):
        error = found.errors[name]
        assert (error.n, error.bias_s, error.p99_s) == (20, pytest.approx(0.005), pytest.approx(0.005))
    assert found.errors["itl"].n == 60
    assert found.errors["itl"].p99_s == pytest.approx(0, abs=1e-12)
    assert found.errors["ttft"].true_p50_s == pytest.approx(0.199), "it arrived 1 ms after it was due"
    assert found.errors["ttft"].reported_p50_s == pytest.approx(0.204)
    assert found.errors["tpot"].reported_p50_s == pytest.approx(0.02)
    assert not found.is_clean
    assert reported_late(0.0005).is_clean


def test_in_a_burst_ttft_is_true_from_when_the_server_had_the_request() -> None:
    """A client that stamps its send 3 ms after the request had arrived reports a TTFT 3 ms too short."""
    records = [replace(ok(i, 0.2, [0.02] * 3), sent_ns=4 * MS) for i in range(20)]
    rows = [served(i, [200 * MS, 220 * MS, 240 * MS, 260 * MS], arrival_ns=1 * MS) for i in range(20)]
    found = certify(columns(*records), rows).errors
    assert found["ttft"].bias_s == pytest.approx(-0.003)
    assert found["itl"].bias_s == pytest.approx(0, abs=1e-9)


def test_errors_of_both_signs_cancel_in_the_bias_and_not_in_the_p99() -> None:
    records = [ok(i, 0.2 + (0.003 if i % 2 else -0.003), [0.02]) for i in range(10)]
    found = certify(columns(*records), [served(i, [200 * MS, 220 * MS], arrival_ns=MS) for i in range(10)])
    assert found.errors["ttft"].bias_s == pytest.approx(0, abs=1e-12)
    assert found.errors["ttft"].p99_s == pytest.approx(0.003)


def test_requests_are_joined_by_index_whatever_the_order_of_arrival() -> None:
    records = [ok(i, 0.1 * (i + 1), [0.02]) for i in range(5)]
    rows = [
        served(i, [100 * MS * (i + 1), 100 * MS * (i + 1) + 20 * MS], arrival_ns=MS) for i in (3, 0, 4, 1, 2)
    ]
    found = certify(columns(*records), rows)
    assert found.errors["ttft"].p99_s == pytest.approx(0, abs=1e-9)
    assert found.n_unmatched == 0


def test_what_failed_or_lost_an_event_is_counted_and_never_clean() -> None:
    records = [ok(0, 0.2, [0.02]), ok(1, 0.2, []), failed(2)]
    found = certify(columns(*records), [served(i, [200 * MS, 220 * MS]) for i in range(3)])
    assert (found.n_requests, found.n_unmatched, found.errors["ttft"].n) == (3, 2, 1)
    assert not found.is_clean


def test_the_burst_the_lateness_and_the_servers_own_error_are_on_record() -> None:
    records = [ok(i, 0.2, [0.02]) for i in range(11)]
    rows = [served(i, [200 * MS, 220 * MS], arrival_ns=i * MS) for i in range(11)]
    found = certify(columns(*records), rows)
    assert found.schedule.spread_s == pytest.approx(0.010)
    assert found.schedule.late_p50_s == pytest.approx(0.005)
    assert found.schedule.rate_error is None, "a burst has no rate"
    assert found.server_late_p99_s == pytest.approx(0.002)
    assert found.cpu_per_event_s == pytest.approx(0.001 / 22)
    closed = certify(columns(*records), rows, open_loop=False)
    assert closed.schedule.spread_s is None


def test_a_schedule_is_held_against_its_law_and_its_plan() -> None:
    due_ns = (np.cumsum(np.random.default_rng(0).exponential(0.01, 200)) * 1e9).astype(int)
    records = [
        replace(ok(i, 0.2, [0.02]), due_ns=int(at), token_ns=[int(at) + 200 * MS, int(at) + 220 * MS])
        for i, at in enumerate(due_ns)
    ]
    rows = [
        served(i, [int(at) + 200 * MS, int(at) + 220 * MS], arrival_ns=int(at * 1.01))
        for i, at in enumerate(due_ns)
    ]
    schedule = certify(columns(*records), rows, law=(100.0, 1.0)).schedule
    assert schedule.rate_error == pytest.approx(1 / 1.01 - 1)
    assert schedule.gap_cv == pytest.approx(schedule.planned_gap_cv)
    assert schedule.gap_ks is not None
    assert schedule.gap_ks < 0.1
    assert schedule.spread_s is None


def streams(n_streams: int, gaps_s: list[float], blur: float) -> tuple[Columns, list[Served]]:
    """Streams whose gaps are reported right in the first half and `blur` of a gap too long or short after."""
    records, rows = [], []
    for i in range(n_streams):
        true_s = 0.2 + i * 1e-4 + np.cumsum([0.0, *gaps_s])
        off_s = np.where(np.arange(len(true_s)) < len(true_s) // 2, 0.0, blur * gaps_s[-1])
        off_s[1::2] *= -1
        reported_s = true_s + off_s
        records.append(ok(i, float(reported_s[0]), np.diff(reported_s).tolist()))
        rows.append(served(i, (true_s * 1e9).round().astype(int).tolist()))
    return columns(*records), rows


def test_the_limit_is_the_last_rung_that_the_client_followed() -> None:
    rungs = [(1000.0, 20), (2000.0, 20)]
    gaps_s = [0.01] * 19 + [0.005] * 20
    sharp = limit(*streams(10, gaps_s, 0.0), T0_NS, rungs)
    assert sharp.by == "search"
    assert sharp.events_per_s == pytest.approx(2000, rel=0.1)
    blurred = limit(*streams(10, gaps_s, 0.3), T0_NS, rungs)
    assert blurred.by == "client"
    assert blurred.events_per_s == pytest.approx(1000, rel=0.1)


def read_one_by_one(sent_s: np.ndarray, read_s: float) -> np.ndarray:
    """When each token (a row a stream) is said to have come by a reader of which every read takes `read_s`.

    On virtual time, as in the wire: round after round over the streams that have something; a read takes all
    that is there, and the kernel's one stamp is that of the last.
    """
    n_streams, n_tok = sent_s.shape
    said_s, done, now_s = np.empty_like(sent_s), [0] * n_streams, 0.0
    next_s = sent_s[:, 0].copy()
    while np.isfinite(next_s).any():
        now_s = max(now_s, next_s.min())
        for i in np.flatnonzero(next_s <= now_s):
            now_s += read_s
            begin, done[i] = done[i], int(np.searchsorted(sent_s[i], now_s, side="right"))
            said_s[i, begin : done[i]] = sent_s[i, done[i] - 1]
            next_s[i] = sent_s[i, done[i]] if done[i] < n_tok else np.inf
    return said_s


@pytest.mark.parametrize(
    ("reads_per_s", "knee_per_s", "by"),
    [(1500, 1000, "client"), (6000, 4000, "client"), (50_000, 8000, "search")],
)
def test_the_knee_is_found_where_the_reader_has_its_own(reads_per_s: int, knee_per_s: int, by: str) -> None:
    """Ten streams climb from 1000 to 8000 events a second; a reader follows as many as it can read."""
    rungs = [(1000.0 * 2**k, 20 * 2**k) for k in range(4)]
    gaps_s = [10 / rate for rate, n_tok in rungs for _ in range(n_tok)]
    sent_s = 0.2 + np.arange(10)[:, None] * 1e-3 + np.cumsum([0.0, *gaps_s[1:]])
    said_s = read_one_by_one(sent_s, 1 / reads_per_s)
    c = columns(*(ok(i, float(row[0]), np.diff(row).tolist()) for i, row in enumerate(said_s)))
    rows = [served(i, (row * 1e9).round().astype(int).tolist()) for i, row in enumerate(sent_s)]
    found = limit(c, rows, T0_NS, rungs)
    assert found.by == by
    assert found.events_per_s == pytest.approx(knee_per_s, rel=0.05)


def test_where_no_stream_came_through_nothing_was_followed() -> None:
    c, _ = streams(10, [0.01] * 39, 0.0)
    assert limit(c, [], T0_NS, [(1000.0, 20), (2000.0, 20)]).events_per_s == 0


def test_a_truth_server_that_is_too_slow_is_named_and_not_the_client() -> None:
    found = limit(*streams(10, [0.01] * 39, 0.0), T0_NS, [(1000.0, 20), (2000.0, 20)])
    assert found.by == "truth server"
    assert found.events_per_s == pytest.approx(1000, rel=0.1)


def test_a_certificate_survives_json() -> None:
    found = reported_late(0.002)
    assert from_json(Certificate, to_json(found)) == found
    with_limit = replace(found, limit=limit(*streams(10, [0.01] * 39, 0.0), T0_NS, [(1000.0, 40)]))
    assert from_json(Certificate, to_json(with_limit)) == with_limit
