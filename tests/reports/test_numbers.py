from dataclasses import replace

import pytest

from burstline.measure.record.summary import MetricFigures
from burstline.measure.record.verdict import Grade, PercentileGrade
from burstline.measure.stats.estimates import ONE_RUN
from burstline.measure.stats.figure import Absent, Estimate
from burstline.measure.stats.serial_correlation import NARROW
from burstline.reports.number_format import Scale, interval, number, point, ratio_text, scale_for
from burstline.reports.page.estimate_tables import latency_table


@pytest.mark.parametrize(
    ("value", "half_width", "shown"),
    [
        (0.0, None, "0"),
        (13.6842, None, "13.7"),
        (13.6842, 0.004, "13.68"),
        (13.6842, 2.0, "13.7"),
        (2171.4, None, "2,170"),
        (2171.4, 0.5, "2,171"),
        (0.214, None, "0.214"),
        (999.96, None, "1,000"),
        (-5.0, None, "−5.00"),
        (float("inf"), None, "∞"),
        (1.11e-16, None, "1.1 × 10⁻¹⁶"),
    ],
)
def test_three_digits_unless_the_interval_allows_a_fourth(value, half_width, shown):
    assert number(value, half_width) == shown


@pytest.mark.parametrize(
    ("unit", "values", "scale"),
    [
        ("s", [0.0213, 0.9], Scale(1e-3, "ms")),
        ("s", [0.2, 28.0], Scale(1.0, "s")),
        ("s", [2e-5], Scale(1e-6, "µs")),
        ("s", [], Scale(1.0, "s")),
        ("s", [0.0], Scale(1.0, "s")),
        ("s", [float("inf"), 0.5], Scale(1e-3, "ms")),
        ("bytes", [7e9], Scale(2.0**30, "GiB")),
        ("fraction", [0.83], Scale(1e-2, "%")),
        ("furlongs", [3.0], Scale(1.0, "furlongs")),
    ],
)
def test_a_row_takes_the_largest_unit_that_its_greatest_value_fills(unit, values, scale):
    assert scale_for(unit, values) == scale


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (8.0, "sessions", "8"),
        (35.0, "requests", "35"),
        (8.0, "tok", "8.00"),
        (16_384.0, "tok", "16,384"),
        (16_384.5, "tok", "16,400"),
    ],
)
def test_a_count_of_whole_things_has_no_decimals(value, unit, shown):
    """ "Sessions 35.0" stood under the title "50 sessions"."""
    assert point(Estimate(value, None, None, None, 1, unit), Scale(1.0, unit)) == shown


def test_a_mean_number_of_requests_keeps_its_decimals():
    assert point(Estimate(4.5, None, None, None, 1, "requests"), Scale(1.0, "requests")) == "4.50"
    assert point(Estimate(8.0, 7.5, 8.5, 0.95, 1, "requests"), Scale(1.0, "requests")) == "8.00"


def test_an_interval_without_an_upper_bound_is_open():
    estimate = Estimate(26.9, 26.5, None, 0.95, 10, "s")
    assert interval(estimate, Scale(1.0, "s")) == "[26.5, ∞)"
    assert interval(replace(estimate, low=None), Scale(1.0, "s")) == ""
    assert point(Absent("why"), Scale(1.0, "s")) == "–"


def test_a_ratio_reads_as_1_only_where_it_is_1():
    values = (1.0, 1.0004, 0.9996, 0.998, 1.148, float("inf"))
    assert [ratio_text(value) for value in values] == ["1.00", "1.0004", "0.9996", "0.998", "1.15", "∞"]


@pytest.mark.parametrize(
    ("note", "remark"),
    [
        (
            "1 run; 260 correlated values have an effective sample size of 12 (" + NARROW + ")",
            "too narrow; run longer (--requests, --sessions or --duration-s).",
        ),
        (ONE_RUN, "three runs do (--repeats 3)."),
        (
            "1 run: the speed stays alike over 3 s; for an interval pass --duration-s 60",
            "No confidence intervals: the speed stays alike over 3 s; for an interval pass --duration-s 60.",
        ),
        ("1 run; 2,000 correlated values have an effective sample size of 700", ""),
    ],
)
def test_a_table_of_latencies_says_what_its_intervals_are_not(note, remark):
    figures = MetricFigures(p50=Estimate(1.0, 0.9, 1.1, 0.95, 260, "s", note))
    shown = latency_table("Latency", {"ttft": figures}, {}).remark
    assert shown.endswith(remark)
    assert bool(shown) == bool(remark)


@pytest.mark.parametrize(
    ("point_s", "moved_s", "note"),
    [(0.010, 0.0004, ""), (0.010, 0.0006, "600 µs"), (0.150, 0.0014, ""), (0.150, 0.0016, "1.60 ms")],
)
def test_what_late_reads_moved_is_told_above_the_tolerance_and_above_5_percent(point_s, moved_s, note):
    figures = MetricFigures(p50=Estimate(point_s, 0.9 * point_s, 1.1 * point_s, 0.95, 260, "s", ""))
    graded = {"tpot": {"p50": PercentileGrade(Grade.OK, 0.0, moved_s)}}
    told = f"the client read late, which may have changed it by {note}; its interval includes that"
    notes = latency_table("Latency", {"tpot": figures}, graded).notes
    assert [each for each in notes if "late" in each] == ([told] if note else [])


@pytest.mark.parametrize(
    ("low", "high", "level", "grade", "told"),
    [
        (0.09, 0.11, 0.95, Grade.OK, "{}; its interval includes that"),
        (0.09, None, 0.95, Grade.OK, "{}; its interval includes that"),
        (None, None, None, Grade.OK, "{}"),
        (0.09, 0.11, 0.95, Grade.UNRELIABLE, "unreliable: {}"),
        (None, None, None, Grade.UNRELIABLE, "unreliable: {}"),
    ],
)
def test_only_an_interval_includes_what_late_reads_moved(low, high, level, grade, told):
    """ "its interval includes that" stood above "One run of this load gives no confidence intervals"."""
    figures = MetricFigures(p50=Estimate(0.1, low, high, level, 260, "s", ONE_RUN))
    graded = {"e2e": {"p50": PercentileGrade(grade, 0.0, 0.004)}}
    notes = latency_table("Latency", {"e2e": figures}, graded).notes
    changed = "the client read late, which may have changed it by 4.00 ms"
    assert [each for each in notes if "late" in each] == [told.format(changed)]
