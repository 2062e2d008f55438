"""What a person sees while a run goes on."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from burstline.bench.progress import Plain, Progress, Rich, Snapshot, progress_for

HALF = Snapshot(1000, 1000, 873, 500, 3, 20.0, tok_per_s=812.4, memory_bytes=4e8)


def test_a_line_says_what_was_sent_answered_done_and_failed():
    assert str(HALF) == (
        "1000/1000 sent, 873 first tokens, 500 done, 3 failed, 812 tok/s, 0.40 GB, about 20 s left"
    )


def test_the_servers_count_of_tokens_is_not_shown_as_that_of_all_replies():
    last = Snapshot(300, 300, 300, 299, 0, 9.0, tok=4580.0)
    assert "4,580 tokens" in str(last)
    assert "tokens" not in str(replace(last, done=300)).replace("first tokens", "")


def test_the_bar_of_a_burst_moves_with_its_tokens():
    burst = Snapshot(1000, 1000, 873, 0, 0, 20.0, planned_tok=64_000, tok=16_000)
    assert (burst.share, burst.left) == (0.25, "")  # the first 20 s were mostly prefill
    assert replace(burst, done=499).left == ""
    assert replace(burst, done=500).left == "about 20 s left"
    assert replace(burst, done=500, tok_per_s=3200.0).left == "about 10 s left"


@pytest.mark.parametrize(
    ("loop", "left"),
    [
        (Snapshot(120, 6, 6, 2, 0, 10.0, tok_per_s=97.0, planned_tok=1920), ""),
        (Snapshot(120, 44, 44, 40, 0, 10.0, tok_per_s=97.0, planned_tok=1920, tok=640), "about 20 s left"),
        (Snapshot(120, 120, 119, 119, 1, 30.0), "about 0 s left"),
    ],
)
def test_a_closed_loop_goes_on_at_the_pace_of_all_that_it_has_served(loop, left):
    """Not at that of its last second, by which 13 s were left where it took 25."""
    assert loop.left == left


def test_a_load_with_a_schedule_takes_at_least_until_its_last_request_is_due():
    """Two thirds of the requests came in the first third of the time."""
    steps = Snapshot(90, 66, 66, 66, 0, 10.0, tok_per_s=144.0, planned_tok=1440, tok=992, last_due_s=30.0)
    assert steps.left == "at least 20 s left"
    behind = replace(steps, sent=90, done=60, elapsed_s=30.0, tok=960, tok_per_s=None)
    assert behind.left == "about 15 s left"


def test_a_load_by_time_says_when_it_ends_and_what_was_not_needed():
    timed = Snapshot(6503, 208, 208, 200, 0, 45.0, until_s=60.0, spare=True)
    assert str(timed) == "208 sent, 208 first tokens, 200 done, 0 failed, 15 s left"
    assert timed.share == 0.75
    over = replace(timed, done=206, failed=2, unsent=6295, elapsed_s=61.0)
    assert str(over) == "208 sent, 208 first tokens, 206 done, 2 failed, 6295 not needed, 0 s left"


def test_a_probe_of_a_search_claims_no_time_and_an_interrupted_load_names_what_was_not_sent():
    probe = Snapshot(3000, 300, 300, 300, 0, 20.0, spare=True, unsent=2612)
    assert str(probe) == "300 sent, 300 first tokens, 300 done, 0 failed, 2612 not needed"
    assert "30/100 sent, 30 first tokens, 28 done, 2 failed, 70 not sent" in str(
        Snapshot(100, 30, 30, 28, 2, 5.0, unsent=70)
    )


def test_runs_at_one_server_say_each_phase_once():
    stream = io.StringIO()
    fresh = Plain(stream)
    for load in ("a", "b"):
        fresh.phase(load)
        fresh.phase("Ready after 5.1 s")
    assert stream.getvalue().split("\n") == ["a", "Ready after 5.1 s", "b", ""]


def test_what_is_not_known_yet_is_left_out():
    assert str(Snapshot(10, 10, 0, 0, 0, 1.0)) == "10/10 sent, 0 first tokens, 0 done, 0 failed"


def test_plain_lines_come_every_ten_seconds_at_most():
    stream = io.StringIO()
    plain = Plain(stream)
    plain.phase("load")
    for tenth in range(200):
        plain.update(Snapshot(10, 10, 0, 0, 0, tenth / 10))
    assert stream.getvalue().count("sent") == 2


def test_a_pipe_gets_plain_lines_and_quiet_gets_nothing():
    assert isinstance(progress_for(False, io.StringIO()), Plain)
    assert type(progress_for(True, io.StringIO())) is Progress


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    rich = Rich(Console(file=stream, force_terminal=True, width=120))
    rich.phase("Burst")
    rich.update(HALF)
    rich.close()
    assert "873 first tokens" in stream.getvalue()
