"""Pages of predictions: `bound` and `study` have one in the frame of all, and `report` makes it again."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from burstline.cli import main

BOUND = ("bound", "--model", "llama-2-7b", "--device", "h100", "--prompt", "200", "--output", "50")
SEVERAL = ("bound", "--model", "llama-2-13b", "--device", "a100", "h100", "rtx4090", "--output", "50")
STUDY = ("study", "training", "--model", "llama-2-7b", "--zero", "3", "--sequence-parallel", "--tp", "2")
NAMED = {"bound": BOUND, "several": SEVERAL, "study": STUDY}

pytestmark = pytest.mark.drawn


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) / "out" for name in NAMED}
    for name, argv in NAMED.items():
        assert main([*argv, "--out", str(made[name])]) == 0
    return made


def words(html: str) -> str:
    text = re.sub(r"<(script|style|svg)\b.*?</\1>|<[^>]+>", " ", html, flags=re.DOTALL)
    return " ".join(text.replace("&#39;", "'").replace("&gt;", ">").split())


@pytest.mark.parametrize("name", NAMED)
def test_report_makes_the_page_of_a_prediction_again_byte_for_byte(folders, name, capsys):
    page = folders[name] / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert main(["report", str(folders[name])]) == 0
    assert page.read_bytes() == before
    capsys.readouterr()
    assert main(["report", str(folders[name]), "--short"]) == 2
    assert "is a prediction: it has only a page" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMED)
def test_the_page_says_what_the_terminal_says(folders, name, capsys):
    assert main(list(NAMED[name])) == 0
    title, said, *_ = capsys.readouterr().out.split("\n\n")
    html = (folders[name] / "report.html").read_text()
    shown = words(html)
    assert f"<h1>{title}" in html
    for sentence in said.splitlines():
        assert " ".join(sentence.split()) in shown
    for question in ("How fast?", "At what load?", "What limits it?", "What next?"):
        assert question in shown
    assert "✓ FITS" in shown or "! 2 OF 3 FIT" in shown
    assert html.index('class="tiles"') < html.index('<figure class="plot"') < html.index('id="part0"')


def test_a_prediction_is_reproduced_by_the_command_on_its_page(folders, capsys):
    for name in NAMED:
        kept = json.loads((folders[name] / "prediction.json").read_text())
        argv = shlex.split(kept["command"])
        assert argv[0] == "burstline"
        assert main([*argv[1:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == kept["document"]


@pytest.mark.parametrize(
    "broken", ["{}", "[]", "", '{"title": 1}', "null", '{"title": "x", "verdict": {"state": "FITS"}}']
)
def test_a_damaged_prediction_is_one_line(tmp_path, capsys, broken):
    (tmp_path / "prediction.json").write_text(broken)
    assert main(["report", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_each_value_of_a_prediction_that_is_of_another_kind_is_one_line(folders, tmp_path, capsys):
    whole = json.loads((folders["bound"] / "prediction.json").read_text())
    for key in whole:
        for instead in (None, "x", 3, [3], {"x": {"y": "z"}}):
            (tmp_path / "prediction.json").write_text(json.dumps({**whole, key: instead}))
            ended = main(["report", str(tmp_path)])
            lines = capsys.readouterr().err.splitlines()
            assert (ended, len(lines)) in ((0, 0), (2, 1)), (key, instead, lines)


@pytest.mark.parametrize("argv", [BOUND, STUDY])
def test_a_folder_with_something_in_it_is_not_written_into(tmp_path, capsys, argv):
    (tmp_path / "mine").write_text("")
    assert main([*argv, "--out", str(tmp_path)]) == 2
    assert "is not empty; name another folder" in capsys.readouterr().err


def test_a_trace_has_no_page_of_a_prediction(tmp_path, capsys):
    assert main([*BOUND[:5], "--trace", "x.json", "--out", str(tmp_path / "out")]) == 2
    assert "--out would be ignored" in capsys.readouterr().err


def test_the_rooflines_of_one_device_are_of_both_phases_and_of_several_of_decode(folders):
    one, several = ((folders[name] / "report.html").read_text() for name in ("bound", "several"))
    assert re.findall(r'<figure class="plot" id="([^"]+)"', one) == [
        "d0-roofline-decode",
        "d0-roofline-prefill",
    ]
    assert re.findall(r'<figure class="plot" id="([^"]+)"', several) == [
        "d0-roofline-decode",
        "d1-roofline-decode",
    ]
    assert "RTX4090: llama-2-13b does not fit" in words(several)


def test_a_method_that_does_not_fit_is_beyond_the_line_of_what_a_device_has(folders):
    page = (folders["study"] / "report.html").read_text()
    assert "a device has" in page
    assert re.findall(r'<figure class="plot" id="([^"]+)"', page) == ["time", "memory"]


def test_an_answer_without_a_page_does_not_wait_for_drawing():
    code = "import sys; from burstline.cli import main; main({!r}); print('matplotlib' in sys.modules)"
    for argv in (BOUND, STUDY):
        done = subprocess.run(
            [sys.executable, "-c", code.format(list(argv))], capture_output=True, text=True, check=True
        )
        assert done.stdout.endswith("False\n")
