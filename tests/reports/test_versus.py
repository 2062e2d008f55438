"""Runs side by side: what one number of several runs is, who may be called best, and how it is drawn."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.comparable import COMPARABLE, Comparability
from loadgen.stats import Absent
from reports.compare import banner, render
from reports.compare_text import markdown, text
from reports.overlay import overlay
from reports.versus import Cell, Comparison, Headline, over_runs


def figure(point: float, low: float | None = None, high: float | None = None, level: float | None = 0.95):
    return {"point": point, "low": low, "high": high, "level": level, "n": 100, "unit": "s"}


def test_one_run_is_its_own_estimate():
    assert over_runs([figure(2, 1, 3)]) == figure(2, 1, 3)


def test_several_runs_are_the_middle_one_with_the_intervals_of_all():
    shown = over_runs([figure(5, 4, 6), figure(1, 0.5, 2), figure(3, 2, 9)])
    assert (shown["point"], shown["low"], shown["high"], shown["n"]) == (3, 0.5, 9, 3)


def test_a_bound_that_one_run_lacks_is_lacking():
    assert over_runs([figure(5, 4, None), figure(1, 0.5, 2)])["high"] is None


def test_plain_readings_have_their_range_for_an_interval():
    shown = over_runs([figure(5, level=None), figure(1, level=None), figure(3, level=None)])
    assert (shown["point"], shown["low"], shown["high"]) == (3, 1, 5)


def test_what_one_run_lacks_all_lack():
    lacking = {"point": None, "absent": "not said"}
    assert over_runs([figure(1), lacking]) is lacking


class View:
    """As much of a view as a number needs."""

    def __init__(self, number) -> None:
        self.manifest: dict = {}
        self.summary = {"x": number}


def cell(numbers: dict[str, list], *, comparable: bool = True) -> Cell:
    gate = Comparability(COMPARABLE if comparable else "NOT-COMPARABLE", (), (), ())
    views = {label: tuple(View(number) for number in values) for label, values in numbers.items()}
    return Cell("", tuple(numbers), views, (), gate, Absent(""), {})  # type: ignore[arg-type]


FASTER, MORE = Headline("x", ("x",), "lower"), Headline("x", ("x",), "higher")


@pytest.mark.parametrize(
    ("a", "b", "headline", "best"),
    [
        ([figure(1, 0.9, 1.1)], [figure(2, 1.9, 2.1)], FASTER, "A"),
        ([figure(1, 0.9, 1.1)], [figure(2, 1.9, 2.1)], MORE, "B"),
        ([figure(1, 0.5, 1.95)], [figure(2, 1.9, 2.1)], FASTER, None),  # they overlap
        ([figure(1, 0.9, None)], [figure(2, 1.9, 2.1)], FASTER, None),  # A has no upper bound
        ([figure(1, level=None)], [figure(2, level=None)], FASTER, None),  # readings without intervals
        ([figure(1, level=None)] * 3, [figure(2, level=None)] * 3, FASTER, "A"),  # but of three runs
        ([figure(1, 0.9, 1.1)], [{"point": None, "absent": "x"}], FASTER, None),
        ([figure(1, 0.9, 1.1), figure(3, 2.9, 3.1)], [figure(2, 1.9, 2.1)] * 2, FASTER, None),
    ],
)
def test_best_is_who_is_best_beyond_doubt(a, b, headline, best):
    assert cell({"A": a, "B": b}).best(headline) == best


def test_nobody_is_best_where_the_work_differed():
    numbers = {"A": [figure(1, 0.9, 1.1)], "B": [figure(2, 1.9, 2.1)]}
    assert cell(numbers, comparable=False).best(FASTER) is None


def test_nobody_is_best_alone():
    assert cell({"A": [figure(1, 0.9, 1.1)]}).best(FASTER) is None


def test_the_worst_cell_stands_in_the_banner_and_says_which_it_is():
    good = replace(cell({"A": [figure(1)]}), name="small")
    bad = replace(cell({"A": [figure(1)]}, comparable=False), name="large")
    assert banner(Comparison("t", (good, bad))).state == "NOT-COMPARABLE"
    assert banner(Comparison("t", (good,))).state == COMPARABLE


def test_a_comparison_without_any_cell_says_that_there_is_nothing():
    nothing = Comparison("t", (), missing=("vllm, burst, repeat 1",))
    assert "No finished run: vllm, burst, repeat 1." in render(nothing)
    assert "No finished run" in text(nothing)
    assert markdown(nothing).endswith("\n")


# ---- the figure


def test_curves_of_failed_requests_end_below_the_top_and_small_samples_give_no_tail():
    series = {"A": np.array([1.0] * 30 + [np.inf] * 10), "B": np.linspace(1, 2, 40)}
    plot = overlay("e", "End to end", "E2E", series)
    assert plot is not None
    rows = {row.cells[0].text: [cell.text for cell in row.cells[1:]] for row in plot.table.rows}
    assert rows["90 %"] == ["∞", "1.90"]
    assert rows["99 %"] == ["–", "–"]


def test_one_contender_with_successes_is_no_comparison():
    assert overlay("e", "t", "E2E", {"A": np.ones(9), "B": np.full(9, np.inf)}) is None


def test_the_colour_of_a_contender_does_not_depend_on_the_others_successes():
    values = np.linspace(1, 2, 30)
    both = overlay("e", "t", "E2E", {"A": np.full(30, np.inf), "B": values, "C": values + 1})
    assert both is not None
    assert "var(--c1)" in both.drawings[0].body
    assert "var(--c0)" not in both.drawings[0].body
