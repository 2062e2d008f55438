"""Certificates: what a client sent and printed against what a server of known truth saw and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from burstline.cli import main
from burstline.console.stdout import json_text
from burstline.measure.record.typed_json import from_json, to_json
from burstline.measure.verdict.certificate import Certificate, Measured, Printed, Reading, certificate
from burstline.reports.formats.text import text
from burstline.reports.page.certificate_page import blocks, certificate_page
from burstline.servers.truth.serve import Served

MS = 1_000_000
T0_NS = 7_000_000_000
TRUE_MS = {"ttft": 200.0, "tpot": 20.0, "itl": 20.0, "e2e": 260.0}


def served(index: int, arrival_ns: int = 0, **fields: object) -> Served:
    """A reply of four tokens 20 ms apart from 200 ms on, the last sent 2 ms later than it was due."""
    at_ns = T0_NS + arrival_ns
    sent_ns = [at_ns, *(at_ns + ms * MS for ms in (200, 220, 240, 260))]
    values: dict[str, object] = {
        "number": index,
        "index": None,
        "path": "/v1/completions",
        "status": 200,
        "first_byte_ns": at_ns - MS // 2,
        "arrival_ns": at_ns,
        "read_ns": at_ns,
        "kernel_stamps": True,
        "ended_ns": sent_ns[-1],
        "ended": "done",
        "n_prompt_tok": 4,
        "event_kind": ["headers", *["token"] * 4],
        "event_tok": [0, 1, 1, 1, 1],
        "event_due_ns": [*sent_ns[:-1], sent_ns[-1] - 2 * MS],
        "event_ns": sent_ns,
        "connection": index,
        "body_hash": index,
    }
    return Served(**values | fields)  # type: ignore[arg-type]


REFUSED = {"status": 503, "event_kind": ["plain"], "event_tok": [0], "event_due_ns": [0], "event_ns": [0]}
"""Of a request that the server refused at once."""


def told(n_ok: int | None = 10, n_failed: int | None = 0, **off_ms: float) -> Printed:
    """A client that prints the truth, but for so many ms."""
    numbers = {
        f"metrics.{metric}.{p}": (true_ms + off_ms.get(metric, 0.0)) / 1e3
        for metric, true_ms in TRUE_MS.items()
        for p in ("p50", "p90", "p99")
    }
    return Printed("theirs", n_ok, n_failed, numbers, {"itl": "each request's own"})


def certified(
    rows: Sequence[Served],
    printed: Printed,
    *,
    n: int = 10,
    due_s: Sequence[float] | None = (),
    concurrency: int | None = None,
    count: Mapping[str, int] | None = None,
) -> Certificate:
    due = None if due_s is None else np.array(due_s or [0.0] * n)
    asked = "a load", "fixed", n, (4, 4), due, concurrency
    n_tok_of = None if count is None else count.__getitem__
    measured = Measured("theirs", *asked, "", {}, None, 1.0, None, 0.0, T0_NS / 1e9 + 1.0)
    return certificate(rows, measured, printed, n_tok_of)


def burst(n: int = 10) -> list[Served]:
    return [served(i, i * MS // 10) for i in range(n)]


def test_a_client_that_prints_the_truth_has_no_findings_and_one_that_is_off_has_each_named() -> None:
    assert certified(burst(), told()).findings == ()
    found = certified(burst(), told(ttft=20.0, itl=-3.0, tpot=0.9))
    assert [each.split(":")[0] for each in found.findings] == [
        *("TTFT p50", "TTFT p90", "TTFT p99", "ITL p50", "ITL p90", "ITL p99")
    ]
    assert found.findings[0] == "TTFT p50: printed 220.00 ms, true 200.00 ms."
    assert found.findings[3] == (
        "ITL p50: printed 17.00 ms, true 20.00 ms, by its definition: each request's own."
    )


def test_the_true_numbers_are_the_servers_and_what_a_tool_does_not_print_is_left_open() -> None:
    found = certified(burst(), Printed("theirs", 10, None, {"throughput.requests_per_s": 50.0}, {}))
    true = {each.name: each.true for each in found.readings}
    assert {name: true[f"{name}.p99"] for name in TRUE_MS} == {
        name: pytest.approx(ms / 1e3) for name, ms in TRUE_MS.items()
    }
    took_s = 0.26 + 0.0009
    assert true["throughput.output_tok_per_s"] == pytest.approx(40 / took_s)
    assert [each.printed for each in found.readings if each.is_time] == [None] * 12
    assert [each.split(":")[0] for each in found.findings] == ["Requests per second"], "38 were true"
    part = Printed("ours", 10, 0, {"throughput.requests_per_s": 50.0}, {"throughput": "of a part"})
    assert certified(burst(), part).findings == ()
    assert found.server_late_p99_s == pytest.approx(0.002)
    assert found.before_s == pytest.approx(T0_NS / 1e9 - 0.0005)
    assert found.after_s == pytest.approx(1.0 - 0.2609)


def test_a_client_that_sends_nothing_has_no_time_around_its_load() -> None:
    found = certified([], told())
    shown = text(blocks(found))
    assert (found.before_s, found.after_s) == (None, None)
    assert "From the command to the first request  -\n" in shown


def test_the_first_byte_is_held_against_the_heads_where_a_tool_prints_that() -> None:
    printed = Printed("k6", 10, 0, {"metrics.ttfb.p50": 0.2}, {})
    (found,) = (each for each in certified(burst(), printed).readings if each.name == "ttfb.p50")
    assert found.true == 0
    assert found.is_off
    assert not Reading("ttft.p50", 0.2, 0.2009, "").is_off
    assert Reading("throughput.requests_per_s", 100, 94, "").is_off


def test_what_came_before_the_load_is_in_no_number() -> None:
    warm = [served(100 + k, (k - 2) * 300 * MS, event_ns=[0, 1, 2, 3, 4]) for k in range(2)]
    found = certified([*warm, *burst()], told())  # it says itself that there were 10
    assert (found.offered.n, found.offered.n_before) == (10, 2)
    assert found.findings == ()
    beside = [served(100, 0), *burst()]  # one more amid the load is no warm-up
    assert certified(beside, told(11)).offered.n == 11
    assert "It sent 11 requests; 10 were asked for." in certified(beside, told(11)).findings


def test_failures_retries_and_hang_ups_are_counted_and_a_tool_that_hides_them_is_told_so() -> None:
    rows = burst()
    rows[3] = served(3, 0, **REFUSED)
    rows[4] = served(4, 0, ended="close")
    rows[5] = served(5, 0, ended="client_closed")
    hidden = certified(rows, told(10, 0))
    assert (hidden.offered.n_ok, hidden.offered.n_failed, hidden.offered.n_hung_up) == (7, 2, 1)
    assert "The server failed 2 requests; the tool printed 0." in hidden.findings
    assert "It printed 10 successful requests; there were 7." in hidden.findings
    assert "It closed 1 request before the reply was complete." in hidden.findings
    silent = certified(rows, told(7, None)).findings
    assert "The server failed 2 requests; the tool does not print failures." in silent
    assert not any("failed 2" in each for each in certified(rows, told(7, 2)).findings)
    again = [*rows, served(10, 30 * MS, body_hash=3)]
    retried = certified(again, told(8, 2))
    assert (retried.offered.n_retries, retried.offered.n) == (1, 11)
    assert any("It retried 1 request that had failed" in each for each in retried.findings)
    assert not any("were asked for" in each for each in retried.findings)


def test_a_burst_that_is_none_and_another_arrival_process_are_found() -> None:
    late = certified([served(i, i * 52 * MS // 10) for i in range(10)], told())
    assert late.offered.spread_s == pytest.approx(0.0473)
    (finding,) = late.findings
    assert finding.startswith(
        "The burst took 47 ms to arrive, 18% of a median request's time; at most 10 were"
    )
    due_s = np.cumsum(np.random.default_rng(0).exponential(0.01, 200))
    on_time = [served(i, round(at * 1e9)) for i, at in enumerate(due_s)]
    assert certified(on_time, told(200), n=200, due_s=due_s.tolist()).findings == ()
    even = [served(i, i * 10 * MS) for i in range(200)]
    found = certified(even, told(200), n=200, due_s=due_s.tolist())
    assert found.offered.gap_cv == pytest.approx(0, abs=1e-6)
    assert any("another arrival process" in each for each in found.findings)
    slow = [served(i, round(at * 1.1e9)) for i, at in enumerate(due_s)]
    off = certified(slow, told(200), n=200, due_s=due_s.tolist())
    assert "The rate of its requests was -9.1% off." in off.findings


def test_a_closed_loop_keeps_as_many_in_flight_as_asked() -> None:
    assert certified(burst(), told(), due_s=None, concurrency=10).findings == ()
    (finding,) = certified(burst(), told(), due_s=None, concurrency=8).findings
    assert finding == "It kept 10 requests in flight; 8 were asked for."


def test_prompts_are_counted_as_ids_or_by_the_tokenizer() -> None:
    rows = [served(i, 0, text="a b", n_prompt_tok=2) for i in range(10)]
    assert certified(rows, told()).offered.prompt_tok is None, "words are no tokens"
    found = certified(rows, told(), count={"a b": 6})
    assert (found.offered.prompt_tok, found.offered.n_as_ids) == ((6, 6, 6), 0)
    assert "Its median prompt has 6 tokens; asked for: 4 to 4." in found.findings


def test_a_client_that_sent_nothing_is_certified_as_that() -> None:
    found = certified([], told(0))
    assert (found.offered.n, found.readings) == (0, ())
    assert found.findings[0] == "It sent 0 requests; 10 were asked for."


def test_a_certificate_survives_json() -> None:
    found = certified(burst(), told(ttft=20.0))
    assert from_json(Certificate, to_json(found)) == found


def waves(n: int, at_once: int, **fields: object) -> list[Served]:
    """A closed loop: the next request comes when a reply has ended, after 260 ms."""
    return [served(i, i // at_once * 261 * MS, connection=i % at_once, **fields) for i in range(n)]


@pytest.mark.parametrize(
    ("printed", "warm", "n_before"),
    [
        (told(24), 0, 0),  # an honest client that sends 24 for 20 prints 24
        (told(20), 0, 4),  # its own count tells the first wave apart
        (Printed("theirs", None, None, {}, {}), 0, 0),
        (Printed("theirs", None, None, {}, {}), 4, 4),  # so does its shape
    ],
)
def test_an_excess_is_never_explained_by_its_order(printed: Printed, warm: int, n_before: int) -> None:
    rows = [served(i, row.arrival_ns - T0_NS, connection=row.connection, n_output_tok=1 if i < warm else 4)
            for i, row in enumerate(waves(24, 4))]  # fmt: skip
    found = certified(rows, printed, n=20, due_s=None, concurrency=4)
    assert (found.offered.n_before, found.offered.n) == (n_before, 24 - n_before)
    assert ("It sent 24 requests; 20 were asked for." in found.findings) == (n_before == 0)
    assert not any("successful requests; there were" in each for each in found.findings)


def test_what_is_closed_at_the_end_does_not_make_a_warm_up_of_the_first_wave() -> None:
    rows = [
        *waves(20, 4),
        *(served(20 + i, 5 * 261 * MS, connection=i, ended="client_closed") for i in range(4)),
    ]
    found = certified(rows, told(20), n=20, due_s=None, concurrency=4)
    assert (found.offered.n, found.offered.n_before, found.offered.n_ok, found.offered.n_hung_up) == (
        24,
        0,
        20,
        4,
    )
    assert found.findings == (
        "It sent 24 requests; 20 were asked for.",
        "It closed 4 requests before the reply was complete.",
    )


def test_a_request_after_a_failure_is_no_retry_where_all_prompts_are_the_same() -> None:
    rows = waves(21, 4, body_hash=7)
    rows[2] = served(2, 0, body_hash=7, **REFUSED)
    found = certified(rows, told(20, 1), n=20, due_s=None, concurrency=4)
    assert found.offered.n_retries == 0
    assert "It sent 21 requests; 20 were asked for." in found.findings


def test_requests_to_a_path_that_is_not_served_are_named() -> None:
    lost = [
        served(i, status=404, n_prompt_tok=None, path="/completions", event_tok=[0] * 5) for i in range(10)
    ]
    found = certified(lost, told(0))
    assert found.offered.unserved == {"POST /completions": 10}
    assert any(
        "10 requests to POST /completions, which is not served: try {url}/v1" in f for f in found.findings
    )
    assert "POST /completions (10)" in text(blocks(found))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([served(i, 0, body_hash=7) for i in range(10)], "9 of 10 requests repeat another"),
        ([served(i, i * 300 * MS) for i in range(10)], "It opened a connection for each request"),
        (
            [served(i, 0, event_due_ns=[T0_NS - 205 * MS] * 5) for i in range(10)],
            "ms late at p99, so its replies were not as scripted",
        ),
    ],
)
def test_what_is_shown_is_judged_too(rows: list[Served], words: str) -> None:
    assert any(words in each for each in certified(rows, told(), due_s=None, concurrency=10).findings)
    assert not any(
        words in each for each in certified(waves(10, 10), told(), due_s=None, concurrency=10).findings
    )


def test_nothing_read_is_a_finding() -> None:
    found = certified(burst(), Printed("theirs", None, None, {}, {}))
    assert found.findings == ("Of 16 numbers that can be certified it printed none.",)
    one = certified(burst(), Printed("theirs", None, None, {"metrics.ttft.p50": 0.2}, {}))
    assert one.findings == ("Of 16 numbers that can be certified it printed 1.",)
    unread = certified(burst(), Printed("theirs", None, None, {}, {}, ("why.",), is_read=False))
    assert (unread.findings, unread.printed.is_read) == (("why.",), False)


@pytest.mark.parametrize(
    ("place", "value", "finding"),
    [
        ("metrics.ttft.mean", 0.2, ""),
        ("metrics.e2e.p99.9", 0.26, ""),
        ("metrics.ttft.max", 0.5, "TTFT max: printed 500.00 ms, true 200.00 ms."),
        ("metrics.ttft.p50", 0.0002, "a thousandth of it: is that its unit?"),
        ("throughput.total_tok_per_s", 80 / 0.2609, ""),
        (
            "throughput.steady_tok_per_s",
            8000.0,
            "Steady tokens per second: printed 8,000.00 /s, at most true",
        ),
        ("throughput.steady_tok_per_s", 100.0, ""),
        ("share.error_rate", 0.0, ""),
        ("share.acceptance", 0.79, "Acceptance: printed 0.79, true 0.00."),
    ],
)
def test_whatever_a_tool_prints_is_compared_with_what_was_true(
    place: str, value: float, finding: str
) -> None:
    findings = certified(burst(), Printed("theirs", 10, 0, {place: value}, {})).findings
    assert len(findings) == bool(finding)
    assert all(finding in each for each in findings)


def test_no_definition_is_claimed_for_a_tool_that_is_not_known() -> None:
    rates = {"throughput.requests_per_s": 50.0}
    (finding,) = certified(burst(), Printed("mine", 10, 0, rates, {})).findings
    assert "by its definition" not in finding
    (finding,) = certified(burst(), Printed("known", 10, 0, rates, {"total": "by send times"})).findings
    assert "by its definition: by send times" in finding


def test_what_cannot_be_counted_says_how_it_can_be() -> None:
    rows = [served(i, 0, text="a b", n_prompt_tok=2) for i in range(10)]
    shown = text(blocks(certified(rows, told(), due_s=None, concurrency=10)))
    assert "not counted: give --tokenizer, or {tokenizer} in the command" in shown
    assert "a closed loop sends when a reply has ended" in shown


def test_report_makes_the_page_of_a_certificate_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = certified(burst(), told(ttft=118.0))
    (tmp_path / "certificate.json").write_text(json_text(to_json(found)))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page == certificate_page(found)
    for said in ("+118.00 ms", "3 of 12 printed times are off", *found.findings):
        assert said in page
    capsys.readouterr()
    (tmp_path / "certificate.json").write_text('{"asked": 1}')
    assert main(["report", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["report", str(tmp_path), "--short"]) == 2
    assert "is a certificate" in capsys.readouterr().err
