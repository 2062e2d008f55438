"""Lengths come from the distribution that was asked for, and from no other."""

from pathlib import Path

import numpy as np
import pytest

from burstline.workloads.lengths import draw_both, parse_lengths, parse_seconds
from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError

CSV = Path(__file__).parents[1] / "data" / "workloads" / "lengths.csv"


def drawn(text: str, n: int = 50_000):
    return parse_lengths(text, "--prompt-tokens").draw(n, rng(0, "x"))


def test_a_normal_distribution_has_its_mean_and_deviation_and_no_heap_at_its_ends():
    lengths = drawn("normal:512,128")
    assert lengths.mean() == pytest.approx(512, abs=3)
    assert lengths.std() == pytest.approx(128, rel=0.02)
    cut = drawn("normal:512,128,400..600")
    assert (cut.min(), cut.max()) == (400, 600)
    assert (cut == 400).mean() < 0.01


def test_a_lognormal_distribution_has_the_mean_and_deviation_of_the_lengths_themselves():
    lengths = drawn("lognormal:512,400", 200_000)
    assert lengths.mean() == pytest.approx(512, rel=0.01)
    assert lengths.std() == pytest.approx(400, rel=0.03)


def test_zipf_falls_with_the_rank():
    counts = np.bincount(drawn("zipf:1,10..13", 120_000), minlength=14)[10:]
    assert (counts / counts[0]).tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=0.05)


def test_lengths_of_one_file_come_from_the_same_rows():
    prompt = parse_lengths(f"file:{CSV}", "--prompt-tokens")
    output = parse_lengths(f"file:{CSV}", "--output-tokens")
    rows = {tuple(map(int, line.split(","))) for line in CSV.read_text().splitlines()[1:]}
    assert set(zip(*(x.tolist() for x in draw_both(prompt, output, 500, 0)), strict=True)) <= rows


def test_a_longer_draw_begins_with_the_shorter_one():
    assert drawn("lognormal:99,50", 500)[:9].tolist() == drawn("lognormal:99,50", 9).tolist()


@pytest.mark.parametrize(
    "text",
    ["normal:512", "normal:nan,1", "normal:5,0", "zipf:1.2", "zipf:1,9..2", "lognormal:x,1", "gauss:1,2",
     "normal:100,1,200..300", "normal:5,1e300"],
)  # fmt: skip
def test_a_silly_distribution_is_refused(text):
    with pytest.raises(WorkloadError, match="--prompt-tokens"):
        parse_lengths(text, "--prompt-tokens")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "expected one named prompt_tokens"),
        ("prompt_tokens\n5\nmany\n", "row 3"),
        ("prompt_tokens\n5\n0\n", "row 3"),
        ("", "the file is empty"),
        (None, "No such file"),
        ("prompt_tokens,b\n5,1\n5\n", "row 3 is not CSV: expected as many values as columns"),
        ('prompt_tokens\n"5\n', "row 2 is not CSV: unexpected end"),
    ],
)
def test_a_silly_file_of_lengths_names_its_row(tmp_path, content, words):
    file = tmp_path / "lengths.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(WorkloadError, match=words):
        parse_lengths(f"file:{file}", "--prompt-tokens")


def test_times_are_typed_in_seconds_and_kept_in_milliseconds():
    assert parse_seconds("0.5..3", "--think-s").high == 3000
    assert parse_seconds("normal:2,.5", "--think-s").draw(1000, rng(0, "x")).mean() == pytest.approx(
        2000, rel=0.05
    )
    assert parse_seconds("0", "--think-s").draw(2, rng(0, "x")).tolist() == [0, 0]
    with pytest.raises(WorkloadError, match="--think-s soon"):
        parse_seconds("soon", "--think-s")
