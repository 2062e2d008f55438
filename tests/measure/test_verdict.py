from dataclasses import replace

import pytest

from burstline.loadgen.capture.drive_report import DriveReport, DurationSpread, MachineUse, NetworkReport
from burstline.measure.record.manifest import Manifest, ServerFacts
from burstline.measure.record.record import lost_a_part
from burstline.measure.record.summary import Summary
from burstline.measure.record.typed_json import to_json
from burstline.measure.record.verdict import Grade, PercentileGrade, Reason, State, Verdict, worst
from burstline.measure.stats.figure import Absent, measured
from burstline.measure.verdict.judge import caveats
from tests.measure.making import judged


def graded(grade="ok", read_s=0.0, send_s=0.0):
    return PercentileGrade(Grade(grade), send_s, read_s)


def verdict_of(**changes):
    facts = {
        "counts": {"planned": 1000, "ok": 1000},
        "grades": {"ttft": {"p50": graded(), "p99": graded()}, "itl": {"p50": graded()}},
        "server_here": True,
    }
    return judged(**{**facts, **changes})


LATE = {"ttft": {"p50": graded("unreliable", 0.03), "p99": graded("unreliable", 0.3)}}
CASES = {
    "all is well": ({}, State.VALID, []),
    "sent late, as graded": ({"grades": {"ttft": {"p99": graded("as-sent", 0, 0.5)}}}, State.VALID, []),
    "read late": ({"grades": LATE}, State.CLIENT_BOUND, ["read-lag"]),
    "read late in what is no headline": (
        {"grades": {"ttfa": {"p99": graded("unreliable", 0.3)}}},
        State.VALID,
        [],
    ),
    "read late in a percentile that nobody reads first": (
        {"grades": {"ttft": {"p90": graded("unreliable", 0.3)}, "itl": {"p99": graded("unreliable", 0.3)}}},
        State.VALID,
        [],
    ),
    "read late in a percentile with an SLO": (
        {"grades": {"itl": {"p99": graded("unreliable", 0.3)}}, "decisive": {("itl", "p99")}},
        State.CLIENT_BOUND,
        ["read-lag"],
    ),
    "the canary objects": (
        {"grades": LATE, "canary_beyond_s": 0.2},
        State.CLIENT_BOUND,
        ["instrument-error"],
    ),
    "read nobody knows how late": (
        {"grades": {"ttft": {"p50": graded("unreliable", None), "p99": graded("unreliable", 0.3)}}},
        State.CLIENT_BOUND,
        ["read-unknown"],
    ),
    "one in a hundred failed": ({"counts": {"planned": 200, "ok": 198, "reset": 2}}, State.VALID, []),
    "more failed": (
        {"counts": {"planned": 200, "ok": 197, "reset": 3}},
        State.FAILED,
        ["too-many-failures"],
    ),
    "as many failed as may": (
        {"counts": {"planned": 200, "ok": 150, "reset": 50}, "max_failures": 0.25},
        State.VALID,
        [],
    ),
    "one failed and none may": (
        {"counts": {"planned": 200, "ok": 199, "reset": 1}, "max_failures": 0.0},
        State.FAILED,
        ["too-many-failures"],
    ),
    "interrupted with many replies": (
        {"counts": {"planned": 1000, "ok": 324, "cancelled": 676}, "status": "interrupted"},
        State.VALID,
        [],
    ),
    "a quota of the client's own": ({"throttled_fraction": 0.02}, State.DISTURBED, ["throttled"]),
    "the client waits for a CPU": ({"waited_fraction": 0.3}, State.DISTURBED, ["cpu-wait"]),
    "the client waits for a CPU that the server takes, which others started here": (
        {
            "waited_fraction": 0.3,
            "others_cpu_fraction": 0.02,
            "server_here": False,
            "server_cpu_s": measured(3.0, "s", ""),
        },
        State.DISTURBED,
        ["server-cpu"],
    ),
    "the client waits for the one core that it shares with the server": (
        {"waited_fraction": 0.3, "cores_allowed": 1, "server_here": True},
        State.DISTURBED,
        ["one-core"],
    ),
    "the client waits for its one core, and the server is elsewhere": (
        {"waited_fraction": 0.3, "cores_allowed": 1, "server_here": False, "url": "http://10.0.0.5:8000"},
        State.DISTURBED,
        ["cpu-wait"],
    ),
    "an error of the client's own ends the load": (
        {"counts": {"planned": 200, "ok": 49}, "death": "internal error", "error_code": "client-failed"},
        State.FAILED,
        ["client-failed"],
    ),
    "others take 80% of the server's machine": (
        {"others_cpu_fraction": 0.8},
        State.DISTURBED,
        ["busy-machine"],
    ),
    "the client waits for a CPU that others use": (
        {"waited_fraction": 0.3, "others_cpu_fraction": 0.2},
        State.DISTURBED,
        ["busy-machine", "cpu-wait"],
    ),
    "the client waits for its one core, and others use some of it": (
        {"waited_fraction": 0.3, "others_cpu_fraction": 0.2, "cores_allowed": 1},
        State.DISTURBED,
        ["one-core"],
    ),
    "others are busy where the server is not": (
        {"others_cpu_fraction": 0.8, "server_here": False},
        State.VALID,
        [],
    ),
    "others are busy where an attached server is watched": (
        {"others_cpu_fraction": 0.8, "server_here": False, "server_cpu_s": measured(3.0, "s", "")},
        State.DISTURBED,
        ["busy-machine"],
    ),
    "others are busy where a server of ours is in a container that is not seen": (
        {"others_cpu_fraction": 0.8, "server_cpu_s": Absent("not watched", "unwatched")},
        State.VALID,
        [],
    ),
    "read late where others took the CPU": (
        {"grades": LATE, "others_cpu_fraction": 0.8},
        State.DISTURBED,
        ["busy-machine", "read-lag"],
    ),
    "no success": ({"counts": {"planned": 9, "ok": 0, "connect": 9}}, State.FAILED, ["no-success"]),
    "ten successes of ten": ({"counts": {"planned": 10, "ok": 10}}, State.VALID, []),
    "ten successes of twelve": (
        {"counts": {"planned": 12, "ok": 10, "reset": 2}},
        State.FAILED,
        ["mostly-failed"],
    ),
    "half failed": ({"counts": {"planned": 100, "ok": 50, "reset": 50}}, State.FAILED, ["too-many-failures"]),
    "two states at once": (
        {"counts": {"planned": 9, "ok": 0, "reset": 9}, "throttled_fraction": 0.5},
        State.FAILED,
        ["no-success", "throttled"],
    ),
    "not comparable": (
        {"others": {State.NOT_COMPARABLE: [Reason("eos", "x", "y")]}},
        State.NOT_COMPARABLE,
        ["eos"],
    ),
    "cold": ({"others": {State.COLD: [Reason("cold", "x", "y")]}}, State.COLD, ["cold"]),
    "not stationary": (
        {"others": {State.NOT_STATIONARY: [Reason("trend", "x", "y")]}},
        State.NOT_STATIONARY,
        ["trend"],
    ),
}


@pytest.mark.parametrize(("changes", "state", "codes"), CASES.values(), ids=CASES)
def test_each_case_has_its_state_and_reasons(changes, state, codes):
    verdict = verdict_of(**changes)
    assert (verdict.state, [reason.code for reason in verdict.reasons]) == (state, codes)
    assert all(reason.text and reason.advice for reason in verdict.reasons)


def test_a_reason_names_the_worst_lag_and_what_it_spoils():
    (reason,) = verdict_of(grades=LATE).reasons
    assert reason.text.startswith("The client read replies late, which may have changed TTFT p99 by 300 ms.")
    assert "Unreliable: TTFT p99, TTFT p50." in reason.text
    (reason,) = verdict_of(grades=LATE, canary_beyond_s=0.2).reasons
    assert "200 ms outside the client's own error bounds" in reason.text
    assert "changed TTFT p99 by 300 ms" in reason.text


def test_200_of_200_timed_out_is_failed_with_its_cause():
    timed_out = {"planned": 200, "ok": 0, "timeout": 200}
    verdict = verdict_of(counts=timed_out, cause="no end of the reply within 5 s")
    assert verdict.state == State.FAILED
    assert verdict.reasons[0].text == (
        "None of 200 requests succeeded: 200 timed out. The first error: no end of the reply within 5 s."
    )


def test_what_an_interruption_cut_off_is_not_looked_for_in_the_servers_log():
    counts = {"planned": 200, "ok": 3, "cancelled": 50, "not_sent": 147}
    assert verdict_of(counts=counts, status="interrupted").reasons[0].advice == "Run it again."


def test_others_that_take_most_of_the_servers_machine_disturb_a_run():
    assert verdict_of(others_cpu_fraction=0.8).state == State.DISTURBED


def test_the_states_have_one_order():
    assert [str(state) for state in State] == [
        "FAILED",
        "CLIENT-BOUND",
        "DISTURBED",
        "NOT-STATIONARY",
        "NOT-COMPARABLE",
        "COLD",
        "VALID",
    ]
    assert worst(["VALID", "NOT-STATIONARY", "DISTURBED"]) == State.DISTURBED
    assert worst(["VALID", "NO SUMMARY"]) == State.FAILED
    assert worst([]) == State.VALID


def test_warnings_take_nothing_from_a_verdict():
    verdict = verdict_of(warnings=(Reason("failures", "1 failed", "look"),))
    assert to_json(verdict) == {
        "state": "VALID",
        "reasons": [],
        "warnings": [{"code": "failures", "text": "1 failed", "advice": "look"}],
    }


@pytest.mark.parametrize(
    ("failures", "is_lost"),
    [
        ({"truncated": 4, "http_503": 3}, True),
        ({"reset": 1, "http_503": 30}, True),
        ({"error_event": 2, "http_503": 2}, True),
        ({"http_503": 3}, False),
        ({"truncated": 4, "http_429": 3}, False),
        ({"truncated": 4, "http_503": 3, "refused": 1}, False),
        ({"truncated": 4}, False),
    ],
)
def test_what_is_unavailable_beside_broken_streams_is_a_lost_worker(
    failures: dict[str, int], is_lost: bool
) -> None:
    counts = {"planned": 83, "ok": 83 - sum(failures.values()), **failures}
    assert lost_a_part(counts) == is_lost
    refuses = any(kind in failures for kind in ("http_503", "http_429", "refused"))
    advice = judged(counts).reasons[0].advice.lower()
    assert ("lower the load" in advice) == (refuses and not is_lost)
    assert ("read the server's log" in advice) == (is_lost or "truncated" in failures)


@pytest.mark.parametrize(("kind", "is_one"), [("truncated", True), ("reset", False), ("http_500", False)])
def test_streams_that_end_early_may_be_those_of_a_server_of_one_stream(kind: str, is_one: bool) -> None:
    """llama-cpp-python in its defaults ends a stream when a second one comes: what helps is said."""
    advice = judged({"planned": 40, "ok": 20, kind: 20}).reasons[0].advice
    assert ("if it ends a stream when another begins, pass --concurrency 1" in advice) == is_one
    assert "Read the server's log" in advice


def test_replies_that_ended_by_themselves_are_told_the_flag_that_lets_them() -> None:
    """R61: forced ends break the replies of some models."""
    assert "pass --ends natural" in judged({"planned": 24, "ok": 10, "short": 14}).reasons[0].advice


def a_machine(host: str | None, others: float = 0.0, n_resent: int = 0) -> DriveReport:
    some = DurationSpread(5, 1, 2, 3)
    known = DriveReport(0, 240, 4, 4, 0, {}, some, None, some, 9, 2, 0, 8, 99, 0.5, 1.0, 77, 4)
    use = MachineUse(2, 0.5, others, 0.0, 1 << 30) if host else None
    return replace(
        known, n_sent=240, host=host, machine=use, network=NetworkReport(240, 50_000, 90_000, n_resent)
    )


UNSEEN = "processes that are small, have ended or run in another container or virtual machine"
WHO = {
    "an old run": (None, "80% of this machine's CPU."),
    "none that was seen": ({}, f"80% of this machine's CPU: {UNSEEN}."),
    "one": ({"python (pid 7)": 0.78}, "80% of this machine's CPU: python (pid 7) 78%."),
    "the three that took most": (
        {"a (pid 1)": 0.01, "b (pid 2)": 0.2, "c (pid 3)": 0.4, "d (pid 4)": 0.1},
        "80% of this machine's CPU: c (pid 3) 40%, b (pid 2) 20%, d (pid 4) 10%.",
    ),
    "less than half of it": ({"a (pid 1)": 0.3}, f"80% of this machine's CPU: a (pid 1) 30%, {UNSEEN}."),
}


@pytest.mark.parametrize(("others", "said"), WHO.values(), ids=WHO)
def test_who_used_the_cpu_is_named(others: dict[str, float] | None, said: str) -> None:
    (reason,) = verdict_of(others_cpu_fraction=0.8, others_cpu=others).reasons
    assert reason.text == f"Processes other than the client and the server used {said}"
    summary = Summary({"ok": 240, "planned": 240}, {}, Verdict(State.VALID))
    busy = replace(summary.instrument, others_cpu_fraction=measured(0.8, "1", ""))
    manifest = Manifest(engine="openai", workload="load", others_cpu=others)
    (warning,) = caveats(replace(summary, instrument=busy), manifest)
    assert warning.text == f"Processes other than the client used {said}"
    assert Manifest.from_json(manifest.to_json()) == manifest


ELSEWHERE = {
    "idle": ([a_machine("n1"), a_machine("n2", 0.2, 2)], []),
    "full machines": ([a_machine("n1", 0.98), a_machine("n2", 1.0)], ["98% of n1's CPU, 100% of n2's CPU."]),
    "a full machine, perhaps the server's": ([a_machine("n1", 0.98), a_machine("n2")], []),
    "a network that loses": (
        [a_machine("n1", n_resent=56), a_machine("n2")],
        ["n1 sent 56 TCP segments again for 240 requests"],
    ),
    "one machine, to a server elsewhere": ([a_machine(None, n_resent=56)], []),
}


@pytest.mark.parametrize(("drivers", "said"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_disturbed_a_machine_of_the_load_is_named(drivers: list[DriveReport], said: list[str]) -> None:
    verdict = judged({"ok": 480, "planned": 480}, drivers=tuple(drivers))
    assert (verdict.state == State.DISTURBED) == bool(said)
    for words in said:
        assert words in verdict.reasons[0].text


@pytest.mark.parametrize(
    ("n_resent", "url", "is_said"),
    [(56, "http://127.0.0.1:8000", True), (0, "http://127.0.0.1:8000", False), (2, "http://[::1]:1", False),
     (56, "http://10.0.0.7:8000", False), (56, "http://localhost:8000/v1", True)],
)  # fmt: skip
def test_what_the_loopback_sends_again_is_a_full_listen_queue(n_resent: int, url: str, is_said: bool) -> None:
    """R20: nothing else is lost there."""
    drivers = (a_machine(None, n_resent=n_resent),)
    resent = measured(float(n_resent), "segments", "") if n_resent else None
    summary = Summary({"ok": 240, "planned": 240}, {}, Verdict(State.VALID))
    summary = replace(summary, instrument=replace(summary.instrument, network_retransmits=resent))
    manifest = Manifest(engine="openai", workload="load", drivers=drivers, server=ServerFacts(url=url))
    said = [each for each in caveats(summary, manifest) if each.code == "listen-queue"]
    assert bool(said) == is_said
    assert not said or "56 segments of 240 requests" in said[0].text
