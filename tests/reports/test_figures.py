import re

import numpy as np
import pytest

from burstline.measure.stats.figure import Estimate, measured
from burstline.measure.stats.quantiles import quantile_of
from burstline.reports.figures import drawing as look
from burstline.reports.figures import ecdf, first_screen, run_figures
from burstline.reports.figures.contenders import Ratio, forest
from burstline.reports.figures.run_figures import Panel
from burstline.reports.number_format import number

pytestmark = pytest.mark.drawn


def values_of(plot) -> list[list[str]]:
    return [[cell.text for cell in row.cells] for row in plot.table.rows]


def curve(values_s, known=None):
    """The distribution of one contender."""
    return ecdf.ecdf(
        "e",
        "End to end",
        "E2E",
        [ecdf.Curve("", values_s, {p: measured(value, "s", "") for p, value in (known or {}).items()})],
    )


def test_the_ecdf_its_table_and_its_sentence_have_the_estimators_percentiles():
    values = np.arange(1.0, 101.0)
    median_s = quantile_of(values, 0.5)
    plot = curve(values, {0.5: median_s})
    by_share = dict(values_of(plot))
    assert by_share["50%"] == number(median_s) == "50.5"
    assert by_share["90%"] == number(quantile_of(values, 0.9))
    assert "half within 50.5 s" in plot.finding
    assert "p50  50.5" in plot.drawings[0].body


@pytest.mark.parametrize(("n", "least"), [(10, 75), (11, 50), (63, 75), (64, 90), (130, 95), (662, 99)])
def test_the_table_of_a_distribution_leaves_out_what_all_tables_leave_out(n, least):
    """150 requests have no p99 there, for want of 662: "99%" was one by another name. Low ones alike."""
    by_share = dict(values_of(curve(np.arange(1.0, n + 1)))[:-1])
    told = {float(share.rstrip("%")) for share, value in by_share.items() if value != "–"}
    assert max(told, default=0) == (0 if n < 11 else least)
    assert min(told, default=0) == (0 if n < 11 else 100 - least)


def test_several_distributions_of_too_few_requests_have_no_medians_in_their_sentence():
    curves = [ecdf.Curve(name, np.arange(1.0, n), {}) for name, n in (("few", 6), ("more", 12))]
    assert ecdf.ecdf("e", "End to end", "E2E", curves).finding == "E2E p50: 6.00 s for more."
    assert ecdf.ecdf("e", "End to end", "E2E", curves[:1] * 2).finding == ""


def test_failures_are_the_gap_below_one():
    plot = ecdf.ecdf(
        "e", "End to end", "E2E", [ecdf.Curve("", np.r_[np.arange(1.0, 91.0), np.full(10, np.inf)], {})]
    )
    assert values_of(plot)[-1] == ["90.0%", "90.0"]
    assert dict(values_of(plot))["95%"] == "∞"
    assert "10 of 100 failed" in plot.finding
    assert "10 not served" in plot.drawings[0].body


def test_an_ecdf_labels_only_the_percentiles_that_it_is_given():
    plot = curve(np.arange(1.0, 901.0), {0.9: 810.1})
    assert "p90" in plot.drawings[0].body
    assert not re.search("p50|p99", plot.drawings[0].body)
    assert "half" not in plot.finding


@pytest.mark.parametrize("values", [[], [np.nan], [1.0], [np.inf, np.inf]])
def test_an_ecdf_of_nothing_is_none(values):
    assert ecdf.ecdf("e", "t", "E2E", [ecdf.Curve("", np.array(values, dtype=float), {})]) is None


def test_an_ecdf_of_zeros_is_drawn_without_a_warning():
    plot = ecdf.ecdf("e", "t", "TPOT", [ecdf.Curve("", np.zeros(8), {})])
    assert plot is not None
    assert plot.drawings[0].hover.last == 1


def test_a_long_ecdf_is_thinned_but_keeps_both_ends():
    plot = curve(np.arange(1.0, 20_001.0))
    path = max(re.findall(r' d="([^"]+)"', plot.drawings[0].body), key=len)
    assert path.count("L") < 2 * (ecdf.MOST_STEPS + 120)
    assert "fastest 1.00 s" in plot.finding
    assert "slowest 20,000 s" in plot.finding


def test_an_slo_stands_in_the_distribution_where_it_lies_within():
    values = [ecdf.Curve("", np.arange(1.0, 101.0), {})]
    plot = ecdf.ecdf("e", "t", "E2E", values, {"p90 ≤ 50 s": 50.0, "≤ 1,000 s": 1000.0})
    assert "SLO p90 ≤ 50 s</text>" in plot.drawings[0].body
    assert "1,000" not in plot.drawings[0].body


def test_the_timeline_draws_what_its_table_says():
    edges = np.array([0.0, 0.5, 1.0])
    panels = [
        Panel("Requests", "", {"a": np.array([1.0, 2.0]), "b": np.array([np.nan, 3.0])}),
        Panel("Memory", "bytes", {"server": np.array([2.0**30, 2.0**31])}),
        Panel("Output tokens", "tok/s", {"": np.array([1.0, 2.0])}),
    ]
    plot = run_figures.timeline(edges, panels, [(0.5, "here")], "found")
    assert [column.title for column in plot.table.columns] == [
        "From (s)", "Requests: a", "Requests: b", "Memory: server (GiB)", "Output tokens (tok/s)",
    ]  # fmt: skip
    assert values_of(plot) == [["0", "1.00", "–", "1.00", "1.00"], ["0.5", "2.00", "3.00", "2.00", "2.00"]]
    assert "here" in plot.drawings[0].body


def test_a_gauge_is_drawn_as_its_readings_and_what_the_client_counts_as_bins():
    edges, seen = np.arange(9.0), {}
    gauge = np.where(np.arange(8) % 3 == 1, 3.0, np.nan)
    panels = [Panel("Requests", "", {"in flight": np.arange(8.0), "running": gauge})]
    token = look.witness.set(lambda name, figure: seen.setdefault(name, figure.axes[0]))
    try:
        run_figures.timeline(edges, panels, [], "found")
    finally:
        look.witness.reset(token)
    line, dots = seen["timeline"].get_lines()
    np.testing.assert_array_equal(line.get_xydata(), [[1.5, 3], [4.5, 3], [7.5, 3]])
    assert dots.get_xdata()[::3] == pytest.approx([1.5, 4.5, 7.5], abs=0.01)
    assert len(seen["timeline"].patches) == 1


def over_time(ttft_s, bounds=None):
    x = np.arange(float(len(ttft_s)))
    return first_screen.over_time(
        x, "due (s)", {"TTFT": ttft_s}, bounds or {}, [], "found", title="t", wide=960
    )


def test_latency_over_time_has_rolling_percentiles_crosses_and_the_slo():
    ttft_s = np.r_[np.arange(1, 100) * 0.01, np.inf]
    body = over_time(ttft_s, {"TTFT": {"p90 ≤ 1 s": 1.0}}).drawings[0].body
    assert {"p50 of 16", "p90", "failed", "SLO p90 ≤ 1 s"} <= set(re.findall(r">([^<>]+)</text>", body))
    far = over_time(ttft_s, {"TTFT": {"p90 ≤ 1 h": 3600.0}}).drawings[0].body
    assert "SLO p90 ≤ 1 h is above" in far


def test_where_time_goes_are_the_means_of_each_group():
    parts = {"queue + prefill": np.array([1.0, 3.0, 9.0]), "decode": np.array([1.0, 1.0, 1.0])}
    plot = first_screen.time_split(parts, {"p50": np.array([0, 1]), "p99": np.array([2])}, "found", "")
    assert values_of(plot) == [["queue + prefill", "2.00", "9.00"], ["decode", "1.00", "1.00"]]


def test_few_requests_are_dots_and_an_interval_without_an_end_is_an_arrow():
    def shown(known):
        return first_screen.ranges({"TTFT": known}, {"TTFT": np.array([0.2, 0.3])}, {}, "")

    assert "200 to 300 ms" in shown({}).drawings[0].body
    open_end = Estimate(0.2, 0.1, None, 0.95, 99, "s")
    bodies = [shown({"p50": each}).drawings[0].body for each in (open_end, measured(0.2, "s", ""))]
    assert "● p50 200 ms" in bodies[0]
    assert bodies[0].count("<use") == bodies[1].count("<use") + 1


def test_two_figures_on_one_page_share_no_id():
    one, two = (
        ecdf.ecdf(name, "t", "E2E", [ecdf.Curve("", np.arange(1.0, 30.0), {})]) for name in ("one", "two")
    )
    ids = [set(re.findall(r' id="([^"]+)"', plot.drawings[0].body)) for plot in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_every_request_over_time_is_a_visible_stroke():
    paths = re.findall(r'd="([^"]+)"[^>]*--c0', over_time(np.full(40, 0.5)).drawings[0].body)
    assert max(path.count("H") for path in paths) >= 40


def test_a_path_keeps_its_points_where_it_is_level():
    figure, (panel,) = look.canvas(300, 200)
    (line,) = panel.plot([0, 1, 2, 2, 3], [1, 1, 2, 2.5, 2.5], color=look.SERIES[1])
    body = look.drawn(figure, "short", panel).body
    x, y = panel.transData.transform(line.get_xydata()).T
    (path,) = re.findall(r'd="([^"]+)"[^>]*--c1', body)
    at, points = [], []
    for command, numbers in re.findall(r"([MLH])([^MLH]+)", path):
        at = [float(numbers), at[1]] if command == "H" else [float(each) for each in numbers.split()]
        points.append(at)
    assert "H" in path
    np.testing.assert_allclose(points, np.c_[x, 200 - y], atol=0.01)


def test_text_in_a_figure_takes_the_font_of_the_page():
    assert "font-family" not in over_time(np.full(4, 0.5)).drawings[0].body


def test_a_figure_says_the_same_number_as_its_table():
    ratio = Ratio("TTFT p50", 1.08, 1.0005, 1.16, (), True, "1.08x faster", "99% CI [1.0005, 1.16]")
    plot = forest("f", ("a", "b"), [ratio], "", explain=False)
    assert all("[1.0005, 1.16]" in drawing.body for drawing in plot.drawings)
    assert values_of(plot)[0][2] == "99% CI [1.0005, 1.16]"


def test_a_request_stands_in_the_lowest_free_lane():
    due_s, ended_s = np.array([0.0, 1.0, 2.0, 3.0, 9.0]), np.array([5.0, 2.0, 4.0, np.nan, 10.0])
    assert run_figures._lanes(due_s, ended_s).tolist() == [1, 2, 2, 3, 1]
