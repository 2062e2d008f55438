import re
import shutil
from dataclasses import replace

import pytest

from burstline.console.stdout import SIGNS
from burstline.console.terminal import show
from burstline.measure.record.rundir import open_run
from burstline.measure.record.verdict import Grade, PercentileGrade, State, Verdict
from burstline.reports.blocks import Command, table
from burstline.reports.formats.text import columns, text
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.answer import served
from burstline.reports.page.digest import digest, headline
from burstline.reports.page.files import written
from tests.reports.synthetic_sweep import finished_run


def test_columns_align_words_left_and_numbers_right():
    assert columns([["a", "1"], ["long", "12"]]) == "a      1\nlong  12"
    assert columns([]) == ""


def test_show_says_verdict_numbers_and_outcomes(lossy):
    shown = text(digest(alone(view_of(lossy))))
    assert shown.splitlines()[0] == view_of(lossy).title
    for word in ("TTFT", "p99", "Output throughput", "Device memory, peak", "Of 120 requests: 111 ok"):
        assert word in shown
    assert all(line == line.rstrip() for line in shown.splitlines())


@pytest.mark.parametrize("state", [State.VALID, State.DISTURBED, State.NOT_STATIONARY])
def test_no_run_is_called_steady_that_is_not_stationary(state, tmp_path):
    view = view_of(finished_run(tmp_path, "vllm", 200, rate=20.0))
    for verdict in (Verdict(state), Verdict(State.DISTURBED, also=(state,))):
        told = text(digest(alone(replace(view, summary=replace(view.summary, verdict=verdict)))))
        level = state != State.NOT_STATIONARY
        assert ("due while the load was full and steady" in told) == level
        assert bool(re.search(r"latencies are of \d+, due after the first \d+\n", told + "\n")) != level


def test_show_says_why_a_number_is_absent(hopeless):
    shown = text(digest(alone(view_of(hopeless))))
    assert "FAILED" in shown
    assert "No request succeeded: all 20 requests failed" in shown


def test_a_reason_that_several_numbers_share_is_said_once(lossy):
    lines = text(headline(alone(view_of(lossy)), view_of(lossy))).splitlines()
    reasons = [line[4:] for line in lines if line[2:3] in "¹²³⁴" and line.startswith("  ")]
    assert 0 < len(reasons) == len(set(reasons))


def test_the_headline_is_short_and_names_the_verdict(burst):
    shown = text(headline(alone(view_of(burst)), view_of(burst)))
    assert shown.startswith("Served ")
    assert "\nVALID: " in shown
    assert len(shown.splitlines()) < 15


def test_a_run_whose_summary_was_never_written_is_summarised_on_the_spot(lossy, tmp_path):
    copy = tmp_path / lossy.name
    shutil.copytree(lossy.path, copy)
    (copy / "summary.json").unlink()
    assert text(digest(alone(view_of(open_run(copy))))) == text(digest(alone(view_of(lossy))))


def test_nothing_is_wider_than_the_terminal_and_no_cell_is_lost(lossy, burst):
    for run in (lossy, burst):
        blocks = digest(alone(view_of(run)))
        narrow = text(blocks, 100)
        commands = {block.text for block in blocks if isinstance(block, Command)}
        assert max(len(line) for line in narrow.splitlines() if line not in commands) <= 100
        assert set(text(blocks).split()) == set(narrow.split())


def test_what_no_terminal_shows_has_lines_of_120_letters_at_most(lossy, capsys):
    show(digest(alone(view_of(lossy))))
    for shown in (capsys.readouterr().out, written("text", alone(view_of(lossy)))):
        lines = [line for line in shown.splitlines() if not line.startswith("burstline run ")]
        assert 100 < max(map(len, lines)) <= 120


def test_a_wide_table_goes_on_below_behind_its_first_words():
    titles = ["Load", "Who", *(f"figure {k}" for k in range(9))]
    row = ["8 at a time", "vllm", *("1.001.001.00",) * 9]
    shown = text([table("", titles, [row], text=(0, 1))], 60).splitlines()
    assert [line.split()[:2] for line in shown if line.startswith("Load")] == [["Load", "Who"]] * 3
    assert max(map(len, shown)) <= 60


def test_plain_signs_stand_under_their_titles_as_ours_do(lossy):
    blocks = digest(alone(view_of(lossy)))
    plain = text(blocks, signs=SIGNS)
    assert plain.isascii()
    assert "120 requests of 512 -> " in plain
    lines = {line.split("  ")[0]: line for line in plain.splitlines()}
    (title,) = (line for line in lines.values() if "p50" in line and "p99" in line)
    ttft = next(line for name, line in lines.items() if name.startswith("TTFT"))
    assert re.search(r"\S$", ttft[: title.index("p50") + 3]), (title, ttft)


def test_a_command_stays_whole_however_long_it_is():
    """Broken it would be two commands."""
    command = f"burstline run {'--requests 1000 ' * 12}--salt 5eed"
    assert command in text([Command("Reproduce this run", command)], 60)


def test_an_unreliable_number_says_so_in_the_first_sentence(lossy):
    """`--short` has no table whose footnotes would."""
    contender = alone(view_of(lossy)).cases[0].contenders[0]
    late = {"ttft": {"p50": PercentileGrade(Grade.UNRELIABLE, send_effect_s=0.003)}}
    view = replace(contender.views[0], summary=replace(lossy.summary, grades=late))
    assert "(unreliable)" not in served(contender)
    told = served(replace(contender, views=[view]))
    assert re.search(r"median first token [\d.]+ \w+ \(unreliable\), then [\d.]+ \w+ per token", told)
