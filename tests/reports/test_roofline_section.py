"""The section on the hardware, from the summary's own `roofline`."""

import html
import re
from dataclasses import replace

import pytest

from burstline.measure.record.verdict import State, Verdict
from burstline.reports.blocks import Folded, Side
from burstline.reports.figures.roofline import _Dot, _label_rows, roofline, waterfall
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.number_format import changed, number
from burstline.reports.page.page import render
from burstline.reports.page.roofline_section import REACHED
from burstline.reports.page.roofline_section import metal as section
from burstline.roofline.reconcile import reconcile
from burstline.roofline.reconcile.reconciliation import Bar, NotReconciled
from tests.reports.pages import page_of


@pytest.fixture(scope="module")
def view(metal):
    return view_of(metal)


def of_kind(blocks, kind):
    """Also those that fold or stand side by side."""
    inner = [b for block in blocks if isinstance(block, Side | Folded) for b in block.blocks]
    return [block for block in (*blocks, *inner) if type(block).__name__.lower() == kind]


def test_every_phase_has_its_roofline_its_bounds_and_the_gap_is_shown(view):
    blocks = section(view)
    assert [plot.id for plot in of_kind(blocks, "plot")] == [
        "waterfall",
        "roofline-prefill",
        "roofline-decode",
    ]
    captions = [table.caption for table in of_kind(blocks, "table")]
    assert sum(caption.startswith("What bounds each op") for caption in captions) == 2
    assert any(caption.startswith("What would help") for caption in captions)


def test_a_disturbed_run_says_that_others_have_a_part_in_the_gap(view):
    for state in (State.VALID, State.DISTURBED):
        summary = replace(view.summary, verdict=Verdict(state))
        told = " ".join(note.text for note in of_kind(section(replace(view, summary=summary)), "note"))
        assert ("is in part theirs" in told) == (state == State.DISTURBED)


def test_a_bound_table_names_every_op_with_its_limit(view):
    phase = view.summary.roofline.phases[0]
    table = next(table for table in of_kind(section(view), "table") if "of prefill" in table.caption)
    assert [row.cells[0].text for row in table.rows] == [op.label for op in phase.ops]
    assert [row.cells[6].text for row in table.rows] == [op.limit for op in phase.ops]


@pytest.mark.drawn
def test_dots_that_nobody_measured_are_hollow_only(view):
    found = view.summary.roofline
    phase = found.phases[1]
    plot = roofline(phase, found.device)
    assert plot.table in {table.id for table in of_kind(section(view), "table")}
    assert "should reach" in plot.finding
    ops = tuple(replace(op, achieved_flops_per_s=op.predicted_flops_per_s / 2) for op in phase.ops)
    seen = replace(phase, ops=ops)
    filled = roofline(seen, found.device)
    assert "reaches" in filled.finding
    assert len(filled.drawings[0].body) > len(plot.drawings[0].body)


def with_steps_as_measured(view, slower=1.6):
    """The same run at an engine whose steps were logged, so many times longer than predicted."""

    def logged(use):
        return replace(use, measured=use.reachable / slower)

    found = view.summary.roofline
    phases = tuple(
        replace(row, mfu=logged(row.mfu), mbu=logged(row.mbu), mfu_full=logged(row.mfu_full))
        for row in found.phases
    )
    sentence = reconcile._sentence(phases, found.device, found.waterfall)
    roofline = replace(found, phases=phases, sentence=sentence)
    return replace(view, summary=replace(view.summary, roofline=roofline))


def test_one_ratio_has_one_name_and_one_value_in_sentences_tables_and_pictures(view):
    """MFU, MBU and the share of what these shapes reach, as the page shows them; none is called used."""
    page = html.unescape(render(alone(with_steps_as_measured(view))))
    visible = re.sub(r"<script.*?</script>|<style.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", visible))
    assert not re.search(r"resource|% used", words)
    told = re.findall(r"(M[FB]U) (\d+)% of the specified (?:peak|bandwidth), (\d+)% of what", words)
    cells = re.findall(r"steps: (M[FB]U) of the specified [^–%]+?/s ([\d.]+)%", words)
    reached = re.findall(r"of what these shapes reach [^%]+? ([\d.]+)%", words)
    assert len(cells) == 4
    assert len(told) >= 3, "the headline has one phase, the section both"
    peak = float(re.search(r"specified peak of ([\d.]+) TFLOP/s", words)[1])
    picture = page.split('id="limit"')[1].split("</figure>")[0]
    drawn = set(re.findall(r"(?:prefill|decode) ([\d.]+) TFLOP/s", picture, re.IGNORECASE))
    of_peak = [float(value) for name, value in cells if name == "MFU"]
    assert sorted(float(rate) / peak * 100 for rate in drawn) == pytest.approx(sorted(of_peak), rel=0.01)
    for name, share, of_reached in told:
        assert any(name == row and round(float(value)) == int(share) for row, value in cells)
        assert round(float(reached[0])) == int(of_reached) == round(100 / 1.6)


def test_each_phase_is_named_by_its_steps_and_what_is_reachable_is_called_a_prediction(view):
    """Decode figures are of decode-only steps; an engine may beat what calibrated kernels should reach."""
    found = view.summary.roofline
    prefill, decode = found.phases
    fast = replace(decode.mbu, measured=2 * decode.mbu.reachable)
    phases = (replace(prefill, n_mixed=3), replace(decode, mbu=fast))
    summary = replace(view.summary, roofline=replace(found, phases=phases))
    blocks = section(replace(view, summary=summary))
    shares = of_kind(blocks, "table")[0]
    names = [row.cells[0].text.partition(":")[0] for row in shares.rows]
    assert [name for name in dict.fromkeys(names) if name != REACHED] == [
        "Prefill and mixed steps",
        "Decode-only steps",
    ]
    assert "As predicted" in [column.title for column in shares.columns]


def test_a_share_that_is_not_known_is_a_dash():
    assert number(float("nan")) == "–"


def test_a_phase_without_products_has_no_roofline(view):
    found = view.summary.roofline
    assert roofline(replace(found.phases[0], ops=()), found.device) is None


@pytest.mark.drawn
def test_the_waterfall_goes_back_where_a_part_was_faster_than_predicted():
    bars = [Bar("ceiling", 2.0, ""), Bar("kernels", 1.0, ""), Bar("host", -0.5, "")]
    plot = waterfall(bars, 2.5, seen=True)
    assert "largest part of the difference is kernels" in plot.finding
    assert [row.cells[1].text for row in plot.table.rows] == ["2.00", "1.00", "−0.500", "2.50"]
    assert "var(--bad)" in plot.drawings[0].body


def test_the_limit_stands_beside_the_answer_one_click_from_each_product(view):
    page = render(alone(view))
    first = page[: page.index("</header>")]
    figure = re.search(r'<figure class="plot" id="limit".*?</figure>', first, re.DOTALL)[0]
    (target,) = set(re.findall(r'href="#([^"]+)"', figure))
    table = re.search(rf'<table id="{target}".*?</table>', page, re.DOTALL)[0]
    for column in ("M × N × K", "FLOPs", "Bytes", "FLOP/B", "Bound", "Predicted", "Measured"):
        assert f">{column}" in table


def test_what_keeps_a_run_from_its_limit_is_a_clause_on_the_first_screen_and_whole_with_the_hardware(view):
    why = "this CPU is not calibrated (two rounds differ by 41%): run `burstline calibrate` (20 s, once)"
    page = render(alone(replace(view, summary=replace(view.summary, roofline=NotReconciled(why)))))
    first, rest = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).split("</header>")
    assert "No roofline: this CPU is not calibrated." in first
    assert "differ by 41%" not in first
    assert rest.count("differ by 41%") == 1
    assert 'id="limit"' not in page


def test_a_run_that_was_never_held_against_its_hardware_has_no_section(burst):
    page = page_of(burst)
    assert 'id="hardware"' not in page
    assert 'id="limit"' not in page


def test_names_on_one_line_have_room_beside_each_other():
    dots = [
        _Dot(name, at, 1e12, None)
        for name, at in (("attention", 1.0), ("qkv", 60.0), ("o", 61.0), ("down", 62.0))
    ]
    rows = _label_rows(dots, (0.25, 250.0), 900)
    assert rows == [0, 0, 1, 2]


def test_a_short_name_between_two_long_ones_frees_no_room_under_it():
    dots = [_Dot(name, at, 1e12, None) for name, at in (("lm_head", 57.3), ("o", 60.2), ("qkv", 78.8))]
    assert _label_rows(dots, (0.25, 250.0), 900) == [0, 1, 1]


@pytest.mark.parametrize(("share", "told"), [(0.724, "+72%"), (-0.15, "−15%"), (-0.0001, "0%")])
def test_what_rounds_to_nothing_has_no_sign(share, told):
    assert changed(share) == told
