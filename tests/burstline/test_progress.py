"""What a person sees while a run goes on."""

import io

from rich.console import Console

from burstline.bench.progress import Plain, Progress, Rich, Snapshot, progress_for

HALF = Snapshot(1000, 1000, 873, 500, 3, 20.0, tok_per_s=812.4, memory_bytes=4e8)


def test_a_line_says_what_was_sent_answered_done_and_failed():
    assert str(HALF) == (
        "1000/1000 sent, 873 first tokens, 500 done, 3 failed, 812 tok/s, 0.40 GB, 20 s left"
    )


def test_the_bar_of_a_burst_moves_with_its_tokens():
    burst = Snapshot(1000, 1000, 873, 0, 0, 20.0, planned_tok=64_000, tok=16_000)
    assert (burst.share, burst.left_s) == (0.25, 60.0)
    assert Snapshot(1000, 1000, 0, 0, 0, 20.0, planned_tok=64_000).left_s is None


def test_what_is_not_known_yet_is_left_out():
    assert str(Snapshot(10, 10, 0, 0, 0, 1.0)) == "10/10 sent, 0 first tokens, 0 done, 0 failed"


def test_plain_lines_come_every_five_seconds_at_most():
    stream = io.StringIO()
    plain = Plain(stream)
    plain.phase("load")
    for tenth in range(100):
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
