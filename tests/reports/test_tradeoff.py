"""A sweep: which runs are one, what is said of it, and that what cannot be relied on looks so."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from burstline.measure.record.manifest import Manifest
from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import Grade, PercentileGrade, Reason, State, Verdict
from burstline.measure.stats.figure import Absent, Estimate, measured
from burstline.reports.blocks import Plot
from burstline.reports.figures.scatter import Dot, Region, ScatterCurve, scatter
from burstline.reports.formats.text import markdown, text
from burstline.reports.model import sweeps
from burstline.reports.model.comparison import Comparison
from burstline.reports.model.contenders import comparison_of, differing_factors
from burstline.reports.model.sweep_load import SweepLoad, differ_in_load_alone, load_of
from burstline.reports.model.sweeps import n_devices, sweeps_in
from burstline.reports.number_format import Reach
from burstline.reports.page.answer import answer
from burstline.reports.page.bottleneck import limits_at_the_top, next_of_sweep
from burstline.reports.page.compared import AtLoad, load_figure, tradeoff
from burstline.reports.page.digest import banner, comparison_json, digest
from burstline.reports.page.first_screen import sweep_tiles
from burstline.reports.page.page import render
from burstline.reports.page.sweep_words import (
    all_loads,
    best_loads,
    best_points,
    costs_of,
    knee,
    limits,
    remarks,
)
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.spec import LoadSpec
from tests.reports.synthetic_sweep import finished_run

TARGETS = ("ttft.p50<=60ms", "tpot.p50<=12ms")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    """Two engines at 1, 4 and 16 at a time; the slower one lost some requests at 16."""
    folder = tmp_path_factory.mktemp("sweep")
    return [
        finished_run(folder, engine, n, speed=speed, concurrency=k, targets=TARGETS, n_failed=lost)
        for engine, speed in (("vllm", 1.0), ("tgi", 1.5))
        for k in (16, 1, 4)
        for n in [16 * max(k, 4)]
        for lost in [5 * n // 8 if (engine, k) == ("tgi", 16) else 0]
    ]


@pytest.fixture(scope="module")
def comparison(runs) -> Comparison:
    return comparison_of(runs, runs[0].path.parent)


@pytest.fixture(scope="module")
def page(comparison) -> str:
    return render(comparison)


@pytest.fixture(scope="module")
def sweep(comparison):
    ((sweep, _),) = sweeps_in(comparison.cases)
    return sweep


def test_runs_that_differ_in_their_load_alone_are_a_sweep_in_the_order_of_load(runs, comparison):
    assert list(differing_factors(runs)) == ["engine"]
    assert [cell.name for cell in comparison.cases] == ["concurrency 1", "concurrency 4", "concurrency 16"]
    assert comparison.title == "vllm vs tgi: 3 loads from concurrency 1 to 16"


def manifest(**facts) -> Manifest:
    if (arrival := facts.get("arrival")) is not None:
        facts["arrival"] = parse_arrival(arrival)
    return Manifest(engine="vllm", workload="load", asked=LoadSpec(**facts))


@pytest.mark.parametrize(
    ("change", "swept"),
    [
        ({}, True),
        ({"concurrency": 2}, False),  # the same load twice is a repeat
        ({"concurrency": None}, False),  # a burst has no load
        ({"prompt_tokens": "999"}, False),
        ({"concurrency": None, "arrival": "poisson", "rate": 2}, False),
    ],
)
def test_only_one_workload_at_two_loads_of_one_kind_is_a_sweep(change, swept):
    one = manifest(concurrency=2, requests=9)
    other = manifest(**{"concurrency": 8, "requests": 99, **change})
    assert differ_in_load_alone([one, other]) is swept


def test_a_load_is_named_as_it_was_asked():
    assert str(load_of(manifest(concurrency=8))) == "concurrency 8"
    assert str(load_of(manifest(arrival="poisson", rate=0.5))) == "0.5 req/s"
    assert load_of(manifest(arrival="ramp:0.5..1")) is None


def test_a_point_holds_the_runs_own_numbers(runs, sweep):
    run = next(run for run in runs if run.manifest.engine == "vllm" and run.manifest.asked.concurrency == 4)
    (point,) = [p for p in sweep.of("vllm") if p.load.value == 4]
    tpot = run.summary.metrics["tpot"].p50
    assert point.output.point == run.summary.throughput.output_tok_per_s.point
    speed, *_ = (cost.of(point) for cost in costs_of(sweep))
    assert speed.point == pytest.approx(1 / tpot.point)
    assert (tpot.low, tpot.high) == (speed.low, speed.high) or speed.low == pytest.approx(1 / tpot.high)
    assert sweep.percentile["ttft"] == "p50"  # the target's
    assert sweep.per_device


@pytest.mark.parametrize(
    ("spread", "n_gpus", "n"),
    [({}, 1, 1), ({"data_parallel_size": 4}, 4, 4), ({"pipeline_parallel_size": 2}, 8, 2),
     ({"tensor_parallel_size": 8, "data_parallel_size": 8}, 8, None),
     ({"tensor_parallel_size": None}, 2, None)],
)  # fmt: skip
def test_a_rate_per_gpu_is_over_all_gpus_that_serve(runs, spread, n_gpus, n):
    """Four copies on four GPUs are no faster per GPU than one on one."""
    manifest = runs[0].manifest
    identity = replace(manifest.identity, **{"tensor_parallel_size": 1} | spread)
    seen = replace(manifest, identity=identity, devices=manifest.devices[:1] * n_gpus)
    view = SimpleNamespace(manifest=seen, summary=runs[0].summary)
    assert n_devices(view) == n


def test_a_point_whose_median_alone_is_unreliable_cannot_be_relied_on(comparison):
    """The median is what a sweep tells first."""
    case, spoilt = (
        comparison.cases[0],
        PercentileGrade(Grade.UNRELIABLE, send_effect_s=1.0, read_effect_s=0.0),
    )
    (view,) = case.contenders[0].views
    for p in ("p50", "p95"):
        late = replace(view, summary=replace(view.summary, grades={"ttft": {p: spoilt}}))
        contender = replace(case.contenders[0], views=(late,))
        shown = {"ttft": "p90", "tpot": "p50"}
        point = sweeps._point(contender, load_of(view.manifest), case, shown, per_device=False)
        assert ("CLIENT-BOUND" in point.doubts) == (p == "p50")


@pytest.mark.drawn
def test_what_cannot_be_relied_on_is_hollow_and_named(page, sweep):
    doubtful = [point for point in sweep.points if point.doubts]
    assert {point.load.value for point in doubtful} == {16}
    assert (
        "Hollow points are not compared or not reliable: vllm at concurrency 16 (NOT-COMPARABLE); tgi at"
        in page
    )
    figure = page[page.index('id="tradeoff-speed"') :]
    assert "var(--paper)" in figure[: figure.index("</svg>")]
    assert "tgi at concurrency 16 (" in page


def test_the_targets_are_told_in_words_and_why_no_more_load_meets_them(sweep):
    assert remarks(sweep)[0] == "SLOs: TTFT p50 ≤ 60 ms and TPOT p50 ≤ 12 ms."
    best = r"Highest output that meets all SLOs: \S+ tok/s per GPU at concurrency 4 with vllm"
    assert re.match(best, best_loads(sweep))
    assert "vllm first misses" in limits(sweep)


def test_where_no_load_is_reliable_nothing_is_concluded_but_that(sweep, comparison):
    """Three DISTURBED runs once had a "Highest output", and two CLIENT-BOUND ones a ratio."""
    hollow = replace(sweep, points=tuple(replace(at, doubts=("DISTURBED",)) for at in sweep.points))
    for each in (hollow, replace(hollow, slos=())):
        assert best_loads(each) == "No load is reliable (DISTURBED), so none is the best."
        assert best_points(each) == []
        assert not re.search("level|peak|rises", limits(each))
        plots = [block for block in tradeoff(each, "", {}) if isinstance(block, Plot)]
        assert [plot.finding for plot in plots] == [best_loads(each)]
        level = tuple(replace(at, missed=(), overloaded=False) for at in each.points)
        cases = sweeps_in(comparison.cases)[0][1]
        unknown = "The limit of vllm is unknown, as no load is reliable"
        assert limits(replace(each, points=level)).startswith(unknown)
        tiles = {tile.label: tile for tile in sweep_tiles(replace(each, points=level), cases)}
        assert tiles["What limits it?"].value == "Unknown"
        assert "limited by" not in tiles["What limits it?"].detail
        assert limits_at_the_top(each, cases) == []


def test_where_no_load_is_reliable_the_next_step_makes_one_so(tmp_path):
    runs = [finished_run(tmp_path, "vllm", 99, concurrency=n) for n in (2, 8)]
    ((sweep, cases),) = sweeps_in(comparison_of(runs, tmp_path).cases)
    doubtful = replace(sweep, points=tuple(replace(at, doubts=("DISTURBED",)) for at in sweep.points))
    view = cases[0].contenders[0].views[0]
    verdict = Verdict(State.DISTURBED, (Reason("busy-machine", "Others ran.", "Stop them and run again."),))
    view = replace(view, summary=replace(view.summary, verdict=verdict))
    disturbed = replace(cases[0], contenders=(replace(cases[0].contenders[0], views=(view,)),))
    assert next_of_sweep(doubtful, [disturbed, *cases[1:]]) == "Next: stop them and run again."


def test_a_contender_without_a_reliable_load_is_named_and_not_compared(sweep):
    points = tuple(replace(at, doubts=("FAILED",)) if at.label == "tgi" else at for at in sweep.points)
    told = best_loads(replace(sweep, slos=(), points=points))
    assert told.endswith("with vllm; tgi at no reliable load.")
    assert "x that of" not in told


def test_of_contenders_without_a_load_in_common_no_ratio_is_told(sweep):
    points = tuple(at for at in sweep.points if at.load.value == {"vllm": 4, "tgi": 1}[at.label])
    told = best_loads(replace(sweep, slos=(), points=points))
    assert "with vllm, tgi (" in told
    assert "x that of" in best_loads(replace(sweep, slos=()))


def test_a_figure_of_a_sweep_tells_of_reliable_loads_alone(sweep):
    points = tuple(replace(at, doubts=() if at.load.value == 4 else ("COLD",)) for at in sweep.points)
    speed, *_ = (each for each in tradeoff(replace(sweep, points=points), "", {}) if isinstance(each, Plot))
    assert re.fullmatch(
        r"Speed for a user, at concurrency 4: \S+ tok/s with vllm, \S+ tok/s with tgi\.", speed.finding
    )


@pytest.mark.parametrize(
    ("kind", "loads", "step"),
    [
        ("rate", (2, 100), "loosen TPOT p50 ≤ 2 ms, which is out of"),
        ("concurrency", (8, 16), "try a lower load"),
    ],
)
def test_no_lower_load_is_advised_where_the_lowest_leaves_an_slo_out_of_reach(kind, loads, step, tmp_path):
    """Its own page said that: even alone each request missed it."""
    slow = [finished_run(tmp_path, "vllm", 99, **{kind: load}, targets=("tpot.p50<=2ms",)) for load in loads]
    swept = comparison_of(slow, tmp_path)
    ((sweep, cases),) = sweeps_in(swept.cases)
    assert answer(swept).details[-1].startswith(f"Next: {step}")
    assert sweep_tiles(sweep, cases)[-1].value.startswith(step[:1].upper() + step[1:16])


def test_the_knee_is_the_least_load_that_is_nearly_enough(sweep):
    points = sweep.of("vllm")
    assert knee(points) is points[-1]
    assert knee(points[:1]) is None


@pytest.mark.drawn
def test_the_region_of_the_targets_is_shaded_where_an_axis_shows_them(page):
    for name, target in (("speed", "TPOT p50 ≤ 12 ms"), ("ttft", "TTFT p50 ≤ 60 ms")):
        figure = page[page.index(f'id="tradeoff-{name}"') :]
        assert target in figure[: figure.index("</svg>")]
    figure = page[page.index('id="tradeoff-e2e"') :]
    assert "var(--good)" not in figure[: figure.index("</svg>")]


BRACKET = "fill: var(--muted); opacity: 0.2"


@pytest.mark.drawn
@pytest.mark.parametrize("slo", ["ttft.p90<=50ms", "ttft.p90<=9s"])
def test_load_is_drawn_against_latency_over_the_output_with_the_slo_and_where_the_limit_lies(slo, tmp_path):
    loads = (1, 8, 16, 32)
    swept = [finished_run(tmp_path, "vllm", 140, concurrency=k, targets=(slo,)) for k in loads]
    page = render(comparison_of(swept, tmp_path))
    found = page[page.index('id="tradeoff-ttft"') :]
    figure = found[: found.index("</svg>")]
    for words in ("TTFT p90 (ms", "Output (tok/s per GPU)", "vllm, p50", "Concurrency"):
        assert f">{words}" in figure
    is_limited = slo == "ttft.p90<=50ms"
    assert ("TTFT p90 ≤ 50 ms" in figure) == is_limited
    assert figure.count(BRACKET) == 2 * is_limited, "in both panels, from the load that holds to the next"
    head, *rows = re.findall(r"<tr.*?</tr>", found[: found.index("</table>")], re.DOTALL)
    assert [re.search(r">([\d.]+)<", row)[1] for row in rows] == [str(k) for k in loads]
    assert re.findall(r"<th[^>]*>([^<]+)", head) == [
        "Concurrency", "Contender", "TTFT p90 (ms)", "p50 (ms)", "Output (tok/s per GPU)"
    ]  # fmt: skip


@pytest.mark.drawn
def test_without_an_output_the_latency_is_drawn_alone():
    figures = [(measured(0.02, "s", ""), ""), (Absent("none"), "")]
    rows = [AtLoad(SweepLoad("rate", k), "a", "p50", figures, False) for k in (1.0, 2.0)]
    plot = load_figure("f", "t", "", ["Contender", "E2E p90", "Output"], rows, Region(None, None, ""))
    body = plot.drawings[0].body
    assert "E2E p90 (ms)" in body
    assert "Output" not in body
    assert "could not be drawn" not in body


def test_the_page_of_a_sweep_holds_together(page):
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert page.count("<svg") == page.count('<svg role="img"')
    for figure in re.findall(r'<figure class="plot".*?</figure>', page, re.DOTALL):
        assert "<table" in figure


def test_a_sweep_is_told_in_text_and_for_machines(comparison):
    assert "SLOs: TTFT p50" in text(digest(comparison))
    assert "SLOs: TTFT p50" in markdown(digest(comparison))
    (sweep,) = comparison_json(comparison)["sweeps"]
    assert len(sweep["points"]) == 6
    assert sweep["targets"] == list(TARGETS)


def test_one_engine_at_several_loads_is_no_failed_comparison(runs):
    mine = [run for run in runs if run.manifest.engine == "vllm"]
    alone = comparison_of(mine, mine[0].path.parent)
    assert alone.comparable
    assert banner(alone).state == "SWEEP"
    assert "NOTHING TO COMPARE" not in text(digest(alone)) + markdown(digest(alone))


# ---- the figure


def dot(x: float, y: float, text: str = "1", *, hollow: bool = False) -> Dot:
    return Dot(text, Reach(x * 0.9, x, x * 1.1), Reach(y * 0.9, y, y * 1.1), hollow)


def strokes(dots: tuple[Dot | None, ...]) -> int:
    """Into how many parts the line of a curve is broken."""
    body = scatter("s", 380, [ScatterCurve("a", dots)], ("x", "y")).body
    line = max(re.findall(r'd="([^"]+)"[^>]*fill: none; stroke: var\(--c0\)', body), key=len)
    return line.count("M")


@pytest.mark.drawn
def test_a_line_breaks_where_a_point_is_not_known():
    assert strokes((dot(1, 10), dot(2, 20), dot(3, 25), dot(4, 30))) == 1
    assert strokes((dot(1, 10), dot(2, 20), None, dot(3, 25), dot(4, 30))) == 2


@pytest.mark.drawn
@pytest.mark.parametrize(("last", "kind"), [(2, "x"), (50, "log")])
def test_a_wide_range_gets_a_log_axis_that_says_so(last, kind):
    curve = ScatterCurve("a", (dot(1, 10), dot(last, 20)))
    drawing = scatter("s", 380, [curve], ("x (s{log})", "y"))
    assert drawing.hover is not None
    assert drawing.hover.axis == kind
    assert ("x (s, log)" in drawing.body) == (kind == "log")


@pytest.mark.drawn
def test_a_label_without_room_is_left_out():
    def labels(step: float) -> int:
        curve = ScatterCurve("a", tuple(dot(5 + k * step, 10, f"no. {k}") for k in range(12)))
        return len(re.findall(r">no. \d+</text>", scatter("s", 380, [curve], ("x", "y")).body))

    assert labels(step=0.001) < 7
    assert labels(step=5) == 12


@pytest.mark.drawn
def test_a_region_beyond_the_axes_is_not_drawn():
    curve = ScatterCurve("a", (dot(1, 10), dot(2, 20)))
    shaded = scatter("s", 380, [curve], ("x", "y"), Region(1.5, None, "x>=1.5"))
    assert "x&gt;=1.5" in shaded.body
    assert "x&gt;=9" not in scatter("s", 380, [curve], ("x", "y"), Region(99.0, None, "x>=9")).body


@pytest.mark.parametrize("known", [(), ("output",), ("latency",), ("output", "latency")])
def test_the_table_of_all_loads_announces_intervals_only_where_it_has_some(known, comparison):
    """One run at each load has none: the caption told of brackets that no cell had."""
    (sweep, _), *_ = sweeps_in(comparison.cases)

    def told(figure, of):
        is_known = of in known and isinstance(figure, Estimate)
        ends = {"low": figure.point, "high": figure.point * 1.1, "level": 0.95} if is_known else {}
        return replace(figure, **(ends or {"low": None, "high": None, "level": None}))

    points = [
        replace(
            at,
            output=told(at.output, "output"),
            latency={name: told(figure, "latency") for name, figure in at.latency.items()},
        )
        for at in sweep.points
        if all(isinstance(figure, Estimate) for figure in (at.output, *at.latency.values()))
    ]
    table = all_loads(replace(sweep, points=points), {})
    has_brackets = any("[" in cell.detail for row in table.rows for cell in row.cells)
    assert has_brackets == bool(known)
    assert ("in brackets" in table.caption) == has_brackets
