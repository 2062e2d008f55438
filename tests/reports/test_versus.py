"""Runs side by side: what one number of several runs is, who may be called best, and how it is drawn."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from burstline.measure.record.manifest import Manifest
from burstline.measure.record.summary import MetricFigures, Summary, Throughput
from burstline.measure.record.verdict import State, Verdict
from burstline.measure.stats.estimates import Absent, Estimate
from burstline.measure.stats.significance import MARGIN, Answer, Contrast
from burstline.measure.verdict.comparable import COMPARABLE, Comparability
from burstline.reports.figures.ecdf import Curve, ecdf
from burstline.reports.formats.text import markdown, text
from burstline.reports.model.comparison import (
    HEADLINES,
    Case,
    Comparison,
    Contender,
    Headline,
    contrasts_of,
)
from burstline.reports.model.contenders import comparison_of
from burstline.reports.page.answer import answer
from burstline.reports.page.digest import banner, digest
from burstline.reports.page.page import render
from burstline.reports.page.side_by_side import remarks, side_by_side, times_of
from burstline.suites.execution import comparison_of_suite
from tests.reports.synthetic_sweep import finished_run


def figure(point: float, low: float | None = None, high: float | None = None, level: float | None = 0.95):
    return Estimate(point, low, high, level, 100, "s")


PATH = ("throughput", "requests_per_s")


def test_one_run_is_its_own_estimate():
    assert Contender("A", [View(figure(2, 1, 3))]).figure(*PATH) == figure(2, 1, 3)


def test_two_runs_are_their_geometric_mean_without_an_interval():
    shown = Contender("A", [View(figure(4, 3, 5)), View(figure(1, 0.5, 2))]).figure(*PATH)
    assert (shown.point, shown.low, shown.high, shown.n) == (pytest.approx(2), None, None, 2)


def test_what_one_run_lacks_all_lack():
    lacking = Absent("not said")
    assert Contender("A", [View(figure(1)), View(lacking)]).figure(*PATH) == lacking


class View:
    """As much of a view as a number needs."""

    def __init__(self, number) -> None:
        self.manifest = Manifest(engine="x", workload="x")
        throughput = Throughput(requests_per_s=number)
        self.summary = Summary(counts={}, metrics={}, verdict=Verdict(State.VALID), throughput=throughput)


def case(numbers: dict[str, list], contrasts=None, *, comparable: bool = True) -> Case:
    gate = Comparability(COMPARABLE if comparable else "NOT-COMPARABLE", (), (), ())
    contenders = tuple(
        Contender(label, tuple(View(number) for number in values)) for label, values in numbers.items()
    )
    return Case("", contenders, gate, {}, contrasts or {})


FASTER, MORE = Headline("x", PATH, "lower"), Headline("x", PATH, "higher")


def test_three_runs_and_more_are_their_geometric_mean_with_an_interval_that_knows_how_they_differ():
    shown = (
        case({"A": [figure(5, 4.9, 5.1), figure(4, 3.9, 4.1), figure(6, 5.9, 6.1)]})
        .named("A")
        .figure(*FASTER.path)
    )
    assert shown.point == pytest.approx(120 ** (1 / 3))
    assert shown.low < 4
    assert shown.high > 6
    assert "of 3 runs" in shown.note


def contrast(ratio: float, answer: Answer = Answer.DIFFERENT) -> dict:
    estimate = Estimate(ratio, ratio / 1.05, ratio * 1.05, 0.95, 6, "1")
    more = 4 if answer == Answer.INCONCLUSIVE else None
    return {PATH: Contrast(answer, estimate, 0.01, 0.07, 0.02, more)}


UNTOLD = Answer.INCONCLUSIVE


@pytest.mark.parametrize(
    ("contrasts", "headline", "best"),
    [
        ({("A", "B"): contrast(2)}, FASTER, "A"),
        ({("A", "B"): contrast(2)}, MORE, "B"),
        ({("A", "B"): contrast(0.5)}, FASTER, "B"),
        ({("A", "B"): contrast(2, UNTOLD)}, FASTER, None),
        ({("A", "B"): contrast(1.01, Answer.SAME)}, FASTER, None),
        ({("A", "B"): {PATH: Absent("why")}}, FASTER, None),
        ({("A", "B"): {}}, FASTER, None),
        ({}, FASTER, None),
        ({("A", "B"): contrast(2), ("A", "C"): contrast(3), ("B", "C"): contrast(1, UNTOLD)}, FASTER, "A"),
        ({("A", "B"): contrast(2), ("A", "C"): contrast(3), ("B", "C"): contrast(1, UNTOLD)}, MORE, None),
        ({("A", "B"): contrast(2), ("A", "C"): contrast(3), ("B", "C"): contrast(1.5)}, MORE, "C"),
    ],
)
def test_best_is_who_is_different_from_every_other_and_better(contrasts, headline, best):
    labels = dict.fromkeys(label for pair in contrasts for label in pair) or ("A", "B")
    assert case({label: [figure(1)] for label in labels}, contrasts).best(headline) == best


def test_nobody_is_best_alone():
    assert case({"A": [figure(1, 0.9, 1.1)]}).best(FASTER) is None


@pytest.mark.parametrize(
    ("found", "shown"), [(0.07, "can detect 7%"), (4.0, "can detect 5.00×"), (1e20, "can detect 1,000×")]
)
def test_what_is_inconclusive_says_how_large_a_difference_it_would_detect(found, shown):
    (untold,) = contrast(1.1, UNTOLD).values()
    numbers = {"A": [figure(1)], "B": [figure(1)]}
    compared = case(numbers, {("A", "B"): {HEADLINES[0].path: replace(untold, detectable=found)}})
    for view in compared.views:
        metrics = {"ttft": MetricFigures(p50=figure(1))}
        view.summary = replace(view.summary, metrics=metrics, throughput=Throughput())
    (row,) = side_by_side(compared).rows
    assert row.cells[4].text == "1.10x faster"
    assert "inconclusive" in row.cells[4].detail
    assert shown in row.cells[4].detail


def test_what_the_words_rest_on_is_said_beside_them():
    known = " ".join(remarks([contrast(2, UNTOLD)]))
    assert "Same: the interval lies within 3%" in known
    assert "80% power" in known
    assert "assumed" not in known
    (single,) = contrast(2, UNTOLD).values()
    unknown = " ".join(remarks([{PATH: replace(single, noise=None)}]))
    assert "no difference is called significant" in unknown
    assert not list(remarks([{PATH: Absent("")}]))


def test_the_banner_of_several_cells_says_how_many_compare_and_which_do_not():
    good = replace(case({"A": [figure(1)], "B": [figure(1)]}), name="small")
    bad = replace(case({"A": [figure(1)]}, comparable=False), name="large")
    shown = banner(Comparison("t", (good, bad)))
    assert shown.state == "1 OF 2 COMPARABLE"
    assert shown.sentence.startswith("Not ranked: large.")
    assert banner(Comparison("t", (bad, bad))).state == "NOT-COMPARABLE"
    assert banner(Comparison("t", (good,))).state == COMPARABLE


def test_a_comparison_without_any_cell_says_that_there_is_nothing():
    nothing = Comparison("t", (), missing=("vllm, burst, repeat 1",))
    assert "No finished run: vllm, burst, repeat 1." in render(nothing)
    assert "No finished run" in text(digest(nothing))
    assert markdown(digest(nothing)).endswith("\n")


def test_the_fastest_is_compared_with_each_other_contender():
    names = ("t", "m")
    contrasts = {
        pair: {(name,): contrast(ratio)[PATH] for name in names}
        for pair, ratio in ((("A", "B"), 0.8), (("A", "C"), 1.6), (("B", "C"), 2.0))
    }
    of_three = case({"A": [figure(1)], "B": [figure(1)], "C": [figure(1)]}, contrasts)
    for label, seconds in (("A", 5.0), ("B", 4.0), ("C", 8.0)):
        (view,) = of_three.named(label).views
        view.summary = replace(view.summary, metrics={"e2e": MetricFigures(p50=figure(seconds))})
    pairs = dict(of_three.pairs())
    assert list(pairs) == [("B", "A"), ("B", "C")]
    ratios = pairs["B", "C"]["t",].ratio
    assert (ratios.point, ratios.low) == (pytest.approx(0.5), pytest.approx(0.5 / 1.05))
    assert pairs["B", "A"]["t",].ratio.point == pytest.approx(0.8)


@pytest.mark.parametrize("attached", [True, False])
def test_a_suite_says_that_engines_were_started_anew_only_where_they_were(tmp_path, attached):
    run = finished_run(tmp_path / "000", "vllm", 20)
    manifest = run.path / "manifest.json"
    facts = json.loads(manifest.read_text())
    facts["server"]["attached"] = attached
    manifest.write_text(json.dumps(facts))
    slots = [{"id": "000", "engine": "vllm", "cell": "chat", "repeat": 1}]
    (tmp_path / "suite.json").write_text(json.dumps({"name": "s", "description": "", "slots": slots}))
    comparison = comparison_of_suite(tmp_path)
    assert comparison is not None
    assert ("restarted" in " ".join(comparison.facts)) is not attached


# ---- the figure


def test_curves_of_failed_requests_end_below_the_top_and_small_samples_give_no_tail():
    series = {"A": np.array([1.0] * 30 + [np.inf] * 10), "B": np.linspace(1, 2, 40)}
    plot = ecdf("e", "End to end", "E2E", [Curve(who, values, {}) for who, values in series.items()])
    assert plot is not None
    rows = {row.cells[0].text: [cell.text for cell in row.cells[1:]] for row in plot.table.rows}
    assert rows["75%"] == ["∞", "1.75"]
    assert rows["90%"] == rows["99%"] == ["∞", "–"]


def curves(**series) -> list[Curve]:
    return [Curve(who, values, {}) for who, values in series.items()]


def test_a_contender_without_successes_has_no_curve_and_is_in_the_table():
    plot = ecdf("e", "t", "E2E", curves(A=np.linspace(1, 2, 30), B=np.full(30, np.inf)))
    assert plot is not None
    assert "var(--c1)" not in plot.drawings[0].body
    assert [cell.text for cell in plot.table.rows[4].cells] == ["50%", "1.50", "∞"]
    assert ecdf("e", "t", "E2E", curves(A=np.full(9, np.inf), B=np.full(9, np.inf))) is None


@pytest.mark.drawn
def test_the_colour_of_a_contender_does_not_depend_on_the_others_successes():
    values = np.linspace(1, 2, 30)
    both = ecdf("e", "t", "E2E", curves(A=np.full(30, np.inf), B=values, C=values + 1))
    assert both is not None
    assert "var(--c1)" in both.drawings[0].body
    assert "var(--c0)" not in both.drawings[0].body


def test_each_engine_that_its_batch_limits_is_named_with_its_own_flag(tmp_path):
    speeds = {"vllm": 1.0, "tgi": 1.35}
    runs = [
        finished_run(tmp_path, engine, 120, speed=speed * noise, seed=k)
        for k, noise in enumerate((0.98, 1.0, 1.02))
        for engine, speed in speeds.items()
    ]
    *_, limit, then = answer(comparison_of(runs, tmp_path)).details
    assert limit.startswith("vllm and tgi were each limited by the batch limit of 64 requests: at most 64 of")
    assert limit.endswith("Why the engines differ in speed was not measured.")
    assert then.startswith(
        "Next: raise --max-num-seqs of vllm and --max-batch-size of tgi to about 77, which"
    )


@pytest.mark.parametrize(
    ("slower", "words"),
    [
        (1.01, "vllm and tgi are equally fast (E2E p50 within 1%); output throughput the same within 1%;"),
        (1.1, "vllm is 1.10x faster than tgi (E2E p50); output throughput 1.10x as high;"),
    ],
)
def test_of_one_run_each_a_difference_within_the_margin_is_no_difference(slower, words):
    """175 and 176 tok/s were "1.01x as low", which is within what the page calls the same."""
    levels = {"vllm": 1.0, "tgi": slower}
    said = answer(Comparison("", (case_of_levels(levels),))).sentence
    assert said.startswith(words)


def test_what_is_lower_is_so_by_percent():
    """`11.0x as low` says nothing to most; the interval is in the words of its number."""
    ratio = Estimate(0.25, 0.2, 0.4, 0.95, 6, "1")
    contrast = Contrast(Answer.DIFFERENT, ratio, 0.01, 0.1, 0.1, None)
    times = times_of(contrast, "Output", "higher")
    assert (times.text, times.interval) == ("75% lower", "95% CI [60%, 80%]")
    open_still = replace(contrast, ratio=replace(ratio, high=1.25))
    assert times_of(open_still, "Output", "higher").interval == "95% CI [-25%, 80%]"


# ---- the first sentence and its table

TITLE = {
    "E2E p50": ("metrics", "e2e", "p50"),
    "TTFT p50": ("metrics", "ttft", "p50"),
    "TPOT p50": ("metrics", "tpot", "p50"),
    "output throughput": ("throughput", "output_tok_per_s"),
}
"""What the sentence compares, by its words."""


def unit_of(path: tuple[str, ...], value: float) -> Estimate:
    return replace(figure(value), unit="s" if path[0] == "metrics" else "tok/s")


def case_of_levels(levels: Mapping[str, float]) -> Case:
    """Contenders of one run each, whose times are so many times a second."""
    contenders = []
    for label, level in levels.items():
        known = {path: unit_of(path, level if path[0] == "metrics" else 1 / level) for path in TITLE.values()}
        view = View(figure(1))
        metrics = {path[1]: MetricFigures(p50=f) for path, f in known.items() if path[0] == "metrics"}
        output = Throughput(output_tok_per_s=known["throughput", "output_tok_per_s"])
        view.summary = replace(view.summary, metrics=metrics, throughput=output)
        contenders.append(Contender(label, (view,), known))
    contrasts = contrasts_of(contenders, {label: [] for label in levels})
    return Case("", tuple(contenders), Comparability(COMPARABLE, (), (), ()), {}, contrasts)


def random_case(rng: np.random.Generator) -> Case:
    """Two contenders of one or three runs, each better in some numbers; some runs scatter, some do not."""
    n, noise = int(rng.choice([1, 3])), float(rng.choice([0.001, 0.01, 0.1]))
    contenders = []
    for label in ("4", "32"):
        level = {path: float(rng.choice([1.0, 1.0, 1.004, 1.5, 3.0])) for path in TITLE.values()}
        runs = [{path: own * np.exp(rng.normal(0, noise)) for path, own in level.items()} for _ in range(n)]
        views = [View(figure(run["throughput", "output_tok_per_s"])) for run in runs]
        for view, run in zip(views, runs, strict=True):
            figures = {path: unit_of(path, value) for path, value in run.items()}
            metrics = {path[1]: MetricFigures(p50=f) for path, f in figures.items() if path[0] == "metrics"}
            output = Throughput(output_tok_per_s=figures["throughput", "output_tok_per_s"])
            view.summary = replace(view.summary, metrics=metrics, throughput=output)
        means = {path: float(np.exp(np.mean([np.log(run[path]) for run in runs]))) for path in level}
        known = {path: unit_of(path, mean) for path, mean in means.items()}
        contenders.append(Contender(label, tuple(views), known))
    contrasts = contrasts_of(contenders, {"4": [], "32": []})
    return Case("", tuple(contenders), Comparability(COMPARABLE, (), (), ()), {}, contrasts)


def test_no_first_sentence_of_500_random_pairs_contradicts_its_table():
    """Its ratios are those of the table, and it names each number in which the faster one is worse."""
    rng, seen = np.random.default_rng(11), set()
    for _ in range(500):
        compared = random_case(rng)
        said = answer(Comparison("", (compared,))).sentence
        shown = side_by_side(compared)
        titles = [column.title for column in shown.columns]
        rows = {
            row.cells[0].text.rstrip(" ↑↓"): dict(zip(titles, row.cells, strict=True)) for row in shown.rows
        }
        rows["output throughput"] = rows.pop("Output")
        (versus,) = (title for title in titles if " vs " in title)
        first, second = versus.split(" vs ")
        alone = "one run each does not show the noise" in said
        level = {
            name: first_of.point / second_of.point
            for name, path in TITLE.items()
            for first_of, second_of in [[compared.named(who).figure(*path) for who in (first, second)]]
        }
        faster, *rest = re.split(r"; (?=but|output|with|one run)", said)
        assert first in faster
        told = {"E2E p50": faster} | {name: part for part in rest for name in TITLE if name in part}
        assert second in faster
        ranked = re.match(rf"{first} is (\S+x faster) than {second} ", said)
        for name in TITLE:
            row = rows[name]
            apart = abs(np.log(level[name])) > np.log1p(MARGIN)
            is_sure = "different" in row[versus].detail or (alone and apart)
            one, other = (float(row[who].text.removeprefix("★ ").replace(",", "")) for who in (first, second))
            if one == other:
                continue  # as printed
            is_better = one > other if name == "output throughput" else one < other
            if name == "E2E p50":
                assert bool(ranked) == is_sure
                assert not ranked or (ranked[1] == row[versus].text and is_better), said
                continue
            but = f"{name} is {row[versus].text}" in told.get(name, "")
            if is_sure and ranked:
                assert but is not is_better, (said, name)
            seen.add((bool(ranked), but))
            if name in told and not (same := re.search(r"equal|the same within (\S+)%", told[name])):
                assert row[versus].text in told[name], (said, name)
            elif name in told and same[1]:
                assert float(same[1]) <= 100 * MARGIN, (said, name)
    assert len(seen) == 4
