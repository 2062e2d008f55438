"""Pages over several runs: of a suite, also with one finished run; and each is made again from its runs."""

import shutil

import pytest

from burstline.cli import main
from burstline.reports.model.contenders import comparison_of
from burstline.reports.page.files import write_all, written
from burstline.reports.page.page import page_over, render
from burstline.suites.execution import _report, comparison_of_suite
from tests.browser import kinds
from tests.reports.synthetic_sweep import finished_run


def over_several(kind, folder):
    """The folder of a page over several runs, as `run` writes it, and what it shows."""
    if kind == "suite":
        kinds._write_suite(folder, "one", "One run", [("vllm", "chat", 1, {"n": 40})])
        comparison = comparison_of_suite(folder)
    else:
        users = (16, 4, 4, 16) if kind == "sweep" else (4, 4, 4)
        runs = [finished_run(folder, "vllm", 40, concurrency=n, seed=k) for k, n in enumerate(users)]
        (folder := folder / f"{runs[0].name}-{kind}").mkdir()
        comparison = comparison_of(runs, folder, anyway=True)
    write_all(comparison, folder)
    return folder, comparison


@pytest.mark.parametrize("kind", ["sweep", "repeats", "suite"])
def test_a_page_over_several_runs_is_made_again_from_them(kind, tmp_path, capsys):
    folder, comparison = over_several(kind, tmp_path)
    names = ("report.html", "report.md", "comparison.json")
    before = [(folder / name).read_bytes() for name in names]
    for name in names[:2]:
        (folder / name).unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"Report: {folder / 'report.html'}\n"
    assert [(folder / name).read_bytes() for name in names] == before
    for shape in ("text", "markdown", "json"):
        assert main(["report", str(folder), "--format", shape]) == 0
        assert capsys.readouterr().out == f"{written(shape, comparison)}\n"


@pytest.mark.parametrize("words", ["--short --format markdown", "--format csv --to x", "--tp 2", "--to x"])
def test_what_a_page_over_several_runs_does_not_have_is_refused_with_what_it_has(words, tmp_path, capsys):
    (tmp_path / "comparison.json").write_text("{}")
    assert main(["report", str(tmp_path), *words.split()]) == 2
    said = capsys.readouterr().err
    assert "is for a run, and" in said
    assert "it has only a page, and --format text, json, markdown alone" in said


@pytest.mark.parametrize("text", ["{}", "[]", '{"cells": []}', '{"cells": [{"runs": {"vllm": ["gone"]}}]}'])
def test_a_page_over_several_runs_without_them_is_refused_in_one_line(text, tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path / 'comparison.json'} cannot be read: " in said


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


def test_a_suite_without_a_finished_run_has_a_page_that_says_so(tmp_path, capsys):
    folder, _ = over_several("suite", tmp_path)
    shutil.rmtree(folder / "000")
    assert main(["report", str(folder)]) == 0
    assert "No run finished: there is nothing to compare." in (folder / "report.md").read_text()
    assert "No finished run: vllm, chat, repeat 1." in (folder / "report.md").read_text()
    assert not _report(comparison_of_suite(folder), folder), "it is no comparison that could be relied on"
    assert "No run finished" in capsys.readouterr().out
