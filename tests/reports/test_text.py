import shutil

from loadgen.record.rundir import open_run
from reports.formats.text import columns, headline, show


def test_columns_align_words_left_and_numbers_right():
    assert columns([["a", "1"], ["long", "12"]]) == "a      1\nlong  12"
    assert columns([]) == ""


def test_show_says_verdict_numbers_and_outcomes(lossy):
    text = show(lossy)
    assert text.splitlines()[0] == lossy.name
    for word in ("TTFT", "p99", "Output throughput", "Device memory, peak", "Of 120 requests: 111 ok"):
        assert word in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_show_says_why_a_number_is_absent(hopeless):
    text = show(hopeless)
    assert "INSUFFICIENT" in text
    assert "no request succeeded" in text


def test_a_reason_that_several_numbers_share_is_said_once(lossy):
    lines = headline(lossy).splitlines()
    reasons = [line.split(": ", 1)[1] for line in lines if line.startswith("  ") and " p" in line]
    assert 0 < len(reasons) == len(set(reasons))


def test_the_headline_is_short_and_names_the_verdict(burst):
    text = headline(burst)
    assert text.startswith("VALID: ")
    assert len(text.splitlines()) < 15


def test_a_run_whose_summary_was_never_written_is_summarised_on_the_spot(lossy, tmp_path):
    copy = tmp_path / lossy.name
    shutil.copytree(lossy.path, copy)
    (copy / "summary.json").unlink()
    assert show(open_run(copy)) == show(lossy)
