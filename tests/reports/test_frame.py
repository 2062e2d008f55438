"""One frame for all pages: each names its load, its speeds and its bands, and has four answers."""

import re

import pytest

from burstline.measure.stats.estimates import Estimate
from burstline.measure.stats.significance import Answer, Look
from burstline.reports.page.gate_blocks import _change
from burstline.reports.page.page import coded
from tests.browser.kinds import Pages
from tests.reports.test_predictions import words
from tests.reports.test_sentences import TABLE

pytestmark = pytest.mark.drawn


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pages = Pages(tmp_path_factory.mktemp("pages"))
    return lambda kind: pages[kind].read_text()


def header(html: str) -> str:
    return words(html[: html.index("</header>")])


def test_a_gate_names_its_load_and_the_speeds_of_both(page):
    shown = header(page("gate"))
    assert re.search(r"80 requests of \d+ → \d+ tokens", shown)
    assert re.search(
        r"What changed\? E2E p50 \+\S+, TTFT p50 \S+ baseline [\d.,]+ m?s, candidate [\d.,]+ m?s", shown
    )


def test_a_series_names_its_engine_its_model_and_its_days(page):
    shown = header(page("series"))
    assert re.search(
        r"newest run of a series 12 runs of one series \d+ requests of .* vllm 1.2 llama-2-7b", shown
    )
    assert re.search(r"\d{1,2} [A-Z][a-z]+ 20\d\d", shown)
    assert "Newest run" in words(page("series"))


@pytest.mark.parametrize(
    ("kind", "key"), [("gate", "margin"), ("series", "expected"), ("limit", "grey: the limit")]
)
def test_a_band_is_named_in_its_picture(page, kind, key):
    html = page(kind)
    drawn = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert any(f">{key}<" in svg for svg in drawn)


def test_an_interval_of_no_width_is_not_printed():
    def look(low: float | None, high: float | None) -> Look:
        ratio = Estimate(1.2, low, high, 0.95, 3, "1", "")
        return Look(Answer.DIFFERENT, ratio)

    assert _change(look(1.2, 1.2)) == "+20%"
    assert _change(look(1.1, 1.3)) == "+20% [+10%, +30%]"
    assert _change(look(None, None)) == "+20%"


@pytest.mark.parametrize("kind", ["sweep", "rates"])
def test_a_sweep_has_four_cards(page, kind):
    html = page(kind)
    assert html.count("<dt>") == 4
    shown = header(html)
    assert re.search(r"At what load\? [\d.,]+ req/s · [\d.,]+ output tok/s at ", shown)
    assert re.search(r"What next\? \w", shown)


def test_the_name_of_an_option_stays_in_one_line():
    whole = '<span class="whole">{}</span>'.format
    assert coded("with max-num-seqs 32") == f"with {whole('max-num-seqs')} 32"
    assert coded("raise `--max-num-seqs`.") == f"raise <code>{whole('--max-num-seqs')}</code>."
    assert coded("/a/b-c-d/e memory-bound a-b-c.json") == "/a/b-c-d/e memory-bound a-b-c.json"


def test_what_is_more_is_not_said_in_times_higher():
    assert not re.search(r"\dx (higher|lower|more|less)", TABLE.read_text("utf-8"))
