"""A page stays small however many requests a run has, says what it leaves out, and keeps its promises."""

import re
from dataclasses import replace

import numpy as np
import pytest

from burstline.measure.record.summary import CacheSize, PrefixCache
from burstline.measure.stats.figure import measured
from burstline.reports.blocks import Command, Table
from burstline.reports.figures import first_screen, run_figures
from burstline.reports.model import comparison
from burstline.reports.model.comparison import shown_of, view_of
from burstline.reports.page import sections
from burstline.workloads.spec import LoadSpec
from tests.reports import synthetic
from tests.reports.pages import page_of
from tests.reports.test_page import Page


def test_a_small_run_is_shown_whole_and_a_large_one_in_parts():
    sent, slowest = np.arange(5000)[::-1], np.roll(np.arange(5000), 7)
    whole = shown_of(sent[-2000:], np.arange(2000), [])
    assert whole.all
    assert whole.listed.tolist() == sent[-2000:].tolist()
    part = shown_of(sent, slowest, [17, 18])
    assert not part.all
    assert len(part.even) == len(part.slowest) == comparison.EACH
    assert (part.even[0], part.even[-1]) == (4999, 0)
    assert set(np.abs(np.diff(part.even)).tolist()) <= {6, 7}
    assert part.listed.tolist() == sorted({*part.even, *part.slowest, 17, 18}, reverse=True)
    assert (part.href(17), part.href(2000)) == ("#r17", "")


@pytest.mark.parametrize(
    ("asked", "title"),
    [
        ({}, "This sends the same requests at the same times"),
        ({"rate": 5.0}, "This sends the same requests at the same times"),
        ({"concurrency": 8}, "This sends the same requests, as many at a time"),
        ({"sessions": 8, "concurrency": 4}, "This begins the same sessions, as many at a time"),
        ({"sessions": 8, "rate": 4.0}, "This begins the same sessions at the same times"),
    ],
)
def test_a_command_that_repeats_a_run_says_what_is_the_same(asked, title, single):
    """A closed loop plans no times, and the later turns of a session are sent as its replies come."""
    view = view_of(single)
    manifest = replace(view.manifest, asked=LoadSpec(**asked), repeat="burstline run")
    again = replace(view, run=replace(view.run, manifest=manifest))
    assert sections.again(again)[0] == Command(title, "burstline run")
    early = replace(view, run=replace(view.run, manifest=replace(manifest, ended_s=3.0)))
    assert sections.again(early)[0].caption == f"{title}, then the rest of those planned"


def test_the_outline_of_many_points_keeps_both_ends_of_each_few():
    y = np.random.default_rng(0).normal(size=20_000)
    kept = run_figures.outline(y, 2000)
    assert len(kept) <= 2000
    assert (np.diff(kept) > 0).all()
    for part in np.array_split(np.arange(20_000), 2000 // 3):
        inside = set(part.tolist()) & set(kept.tolist())
        assert {int(part[y[part].argmin()]), int(part[y[part].argmax()])} <= inside
    assert run_figures.outline(y[:2000], 2000).tolist() == list(range(2000))


@pytest.mark.parametrize(("hits", "n"), [([662] * 5, 1), ([200, 400, 662, 662, 662], 5)])
def test_a_cache_curve_that_is_flat_is_one_row(burst, hits, n):
    view = comparison.view_of(burst)
    sizes = tuple(CacheSize(blocks=2**k, hit_tok=measured(h, "tok", "")) for k, h in enumerate(hits))
    tokens = {"prompt_tok": measured(1000, "tok", ""), "infinite_tok": measured(662, "tok", "")}
    summary = replace(view.summary, prefix_cache=PrefixCache(**tokens, by_size=sizes))
    tables = [each for each in sections.served(replace(view, summary=summary)) if isinstance(each, Table)]
    rows = [str(row.cells[0].text) for row in tables[-1].rows if row.cells[0].text.startswith("Curve")]
    assert len(rows) == n
    assert "4 × the engine's cache" in rows[-1]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A thousand requests, thirty failed, on a page that shows at most a hundred whole."""
    return synthetic.finished_run(tmp_path_factory.mktemp("crowded"), synthetic.records(n=1000, n_failed=30))


@pytest.fixture(scope="module")
def html(crowded):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "ALL_UP_TO", 100)
        patch.setattr(comparison, "EACH", 60)
        patch.setattr(first_screen, "DOTS", 90)
        return page_of(crowded)


@pytest.mark.slow
@pytest.mark.drawn
def test_what_is_drawn_and_listed_is_bounded(crowded, html):
    listed = re.findall(r'<tr id="r(\d+)">', html)
    assert len(listed) <= 60 + 60 + 100
    assert len(html) < len(page_of(crowded)) * 0.6
    dots = re.findall(r'd="([^"]+)"[^>]*--c0', html.split('id="over-time"')[1].split("</figure>")[0])
    assert max(path.count("L") for path in dots) < 100


def test_a_large_page_says_what_it_leaves_out(html):
    assert "Each request: 60 of 1,000, evenly spaced" in html
    assert re.search(r"\d+ of 1,000 planned requests in the order of sending: 60 evenly spaced, the 60", html)
    assert "thinned to the fastest, the median and the slowest of each few" in html


def test_every_link_on_a_large_page_leads_somewhere(html):
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for a in page.all("a") if a.get("href", "").startswith("#")}
    assert {target for target in targets if re.fullmatch(r"r\d+", target)}
    assert targets <= set(ids)
    rows = {f"r{k}" for a in page.all("figure") for k in a.get("data-rows", "").split()}
    assert rows
    assert rows <= set(ids)


@pytest.mark.slow
def test_the_page_of_20_000_requests_is_hardly_larger_than_that_of_2_000(tmp_path):
    pages = [
        page_of(synthetic.finished_run(tmp_path, synthetic.records(n=n, output_tok=4)))
        for n in (2000, 20_000)
    ]
    assert len(pages[1].encode()) < 1.2 * len(pages[0].encode()) < 3_000_000
