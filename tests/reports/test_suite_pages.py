"""A suite's page: one engine across platforms, and a suite of which one run is finished."""

import shutil

import pytest

from burstline.reports.page.page import page_over, render
from burstline.suites.execution import comparison_of_suite
from tests.browser import kinds


@pytest.mark.slow
def test_one_engine_on_several_platforms_is_drawn_on_one_axis(tmp_path):
    kinds.SUITES["platforms"](tmp_path)
    comparison = comparison_of_suite(tmp_path)
    (across,) = [each for each in page_over(comparison).sections if each.id == "platforms"]
    engines = [plots.blocks for _, plots in zip(*[iter(across.blocks)] * 2, strict=True)]
    assert [[plot.id for plot in plots] for plots in engines] == [
        [f"p{k}-{metric}-cdf" for metric in ("ttft", "tpot", "e2e")] for k in (0, 1)
    ]
    assert len(engines[0][0].table.columns) == 1 + len(kinds.PLATFORMS)


def test_a_suite_with_one_finished_run_is_still_a_suites_page(tmp_path):
    kinds._write_suite(tmp_path, "one", "One run", [("vllm", "chat", 1, {"n": 40})])
    comparison = comparison_of_suite(tmp_path)
    assert comparison.run is None
    assert "<h1>One run</h1>" in render(comparison)
    assert "runs" in [section.id for section in page_over(comparison).sections]


def test_a_copy_of_another_slots_run_is_no_repeat(tmp_path):
    """Three copies would agree with each other perfectly."""
    kinds._write_suite(tmp_path, "one", "One run", [("vllm", "chat", k, {"n": 40}) for k in (1, 2, 3)])
    for k in (1, 2):
        shutil.rmtree(tmp_path / f"00{k}")
        shutil.copytree(tmp_path / "000", tmp_path / f"00{k}")
    comparison = comparison_of_suite(tmp_path)
    (case,) = comparison.cases
    assert [len(contender.views) for contender in case.contenders] == [1]
    assert comparison.missing == ("vllm, chat, repeat 2", "vllm, chat, repeat 3")
