"""One frame for all pages: each names its load, its speeds and its bands, and has four answers."""

import re
from dataclasses import replace

import pytest

from burstline.measure.record.manifest import ServerFacts
from burstline.measure.record.rundir import open_run
from burstline.measure.stats.estimates import Estimate
from burstline.measure.stats.significance import Answer, Look
from burstline.reports.model.comparison import Member
from burstline.reports.model.gated import BASELINE, CANDIDATE, NUMBERS, Rule, compared, judge_pairs
from burstline.reports.page.gate_blocks import _change, gate_blocks, gate_page
from burstline.reports.page.page import coded
from burstline.servers.identity import Identity
from tests.browser.kinds import Pages
from tests.reports.synthetic_sweep import finished_run
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
        r"What changed\? E2E p50 \+\S+, TTFT p50 \S+ "
        r"E2E p50: baseline [\d.,]+ m?s, candidate [\d.,]+ m?s\. "
        r"TTFT p50: baseline [\d.,]+ m?s, candidate [\d.,]+ m?s",
        shown,
    )


DIFFERENT = {
    "max-num-seqs: baseline 2, candidate 8": lambda k: {"identity": Identity("vllm", max_num_seqs=(2, 8)[k])},
    "version: baseline 1.2, candidate 1.3": lambda k: {"identity": Identity("vllm", ("1.2", "1.3")[k])},
    "baseline and candidate differ in no known setting": lambda k: {},
    "URL: baseline http://a:1, candidate http://b:2": lambda k: {
        "server": ServerFacts(url=("http://a:1", "http://b:2")[k])
    },
}


@pytest.mark.parametrize("words_of_both", DIFFERENT)
def test_a_gate_says_what_its_baseline_and_its_candidate_are(tmp_path, words_of_both):
    """Both were the same engine under the same load, and only `compare` said what set them apart."""
    members = []
    for k, label in enumerate((BASELINE, CANDIDATE)):
        run = finished_run(tmp_path, "vllm", 80, seed=k)
        run.save_manifest(replace(run.manifest, **DIFFERENT[words_of_both](k)))
        members.append(Member(label, open_run(run.path), "", 0))
    rule = Rule((NUMBERS["e2e.p50"],), 0.05, 20)
    judged = judge_pairs(members, rule)
    shown = header(gate_page(judged, gate_blocks(judged, "burstline gate"), compared(members, rule)))
    assert words_of_both in shown.replace(" : ", ": ")


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
