"""The steps of CI: what is kept between runs is whole or made anew, and no failure hides another."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("steps", ROOT / ".ci/steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "steps", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    module.LOGS.mkdir()
    return module


def kept(steps: ModuleType, command: str, gigabytes: float = 0.0):
    return steps.Kept("thing", ("sh", "-c", command), (), gigabytes)


def test_what_is_kept_is_made_once_and_what_is_half_made_is_made_anew(steps, tmp_path):
    thing = kept(steps, 'mkdir "$0" && echo "export X=1" && echo made >>"$(dirname "$0")/log"')
    half = thing.folder(tmp_path)
    half.mkdir()
    (half / "rest").touch()
    for _ in range(2):
        folder, printed = steps.make(thing, tmp_path)
        assert printed == "export X=1\n"
        assert not (folder / "rest").exists()
    assert (tmp_path / "log").read_text() == "made\n"


@pytest.mark.parametrize(
    ("command", "gigabytes", "said"),
    [
        (
            "echo trying >&2; echo 'no route to the index' >&2; exit 1",
            0.0,
            "tries again: no route to the index",
        ),
        ("exit 3", 0.0, "no message"),
        ("true", 1e9, "make room"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_tried_again(steps, tmp_path, command, gigabytes, said):
    thing = kept(steps, command, gigabytes)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            steps.make(thing, tmp_path)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_another_script_or_another_command_has_a_folder_of_its_own(steps, tmp_path):
    one, other = kept(steps, "true"), kept(steps, "true ")
    with_source = steps.Kept("thing", one.argv, ("README.md",), 0.0)
    assert len({each.folder(tmp_path) for each in (one, other, with_source)}) == 3


def test_what_no_run_used_for_a_month_goes_when_its_successor_is_made(steps, tmp_path):
    thing = kept(steps, 'mkdir "$0"')
    for name, age_days in (("thing-old", 40), ("thing-new", 2), ("thing2-old", 40)):
        (tmp_path / name).mkdir()
        complete = tmp_path / name / ".complete"
        complete.touch()
        at_s = complete.stat().st_mtime - age_days * 86400
        os.utime(complete, (at_s, at_s))
    folder, _ = steps.make(thing, tmp_path)
    left = {each.name for each in tmp_path.iterdir() if each.is_dir()} - {"logs"}
    assert left == {"thing-new", "thing2-old", folder.name}


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="again"><failure message="x"/></testcase>
<testcase classname="a" name="again"/>
<testcase classname="a" name="bad"><failure message="x"/></testcase>
<testcase classname="a" name="broken"><error message="x"/></testcase>
<testcase classname="a" name="late"><skipped message="undecided: others took 50%"/></testcase>
<testcase classname="a" name="two"><skipped message="no GPU"/></testcase>
<testcase classname="a" name="three"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_a_row_counts_each_test_by_its_last_attempt_and_says_why(steps):
    report = steps.LOGS / "x.xml"
    report.write_text(REPORT)
    row = steps.Row("x")
    steps.count(row, report)
    assert (row.passed, row.failed, row.undecided, row.skipped) == (2, 2, 1, 2)
    assert row.notes == [
        "failed: a::bad",
        "failed: a::broken",
        "1 x a::late: undecided: others took 50%",
        "2 x skipped: no GPU",
    ]


@pytest.mark.parametrize("beside", [False, True])
def test_a_step_that_fails_is_a_row_and_not_the_end(steps, beside):
    bad = steps.step("bad", "echo hello; exit 3", dict(os.environ), beside=beside)
    good = steps.step("good", "true", dict(os.environ), beside=beside)
    none = steps.step("none", "true", dict(os.environ), tests=True, beside=beside)
    assert (bad.passed, bad.failed, bad.notes) == (0, 1, ["exit code 3"])
    assert (good.passed, good.failed) == (1, 0)
    assert (none.failed, none.notes) == (1, ["no test ran"])


def test_a_machine_without_namespaces_says_so_in_one_line(steps, tmp_path, monkeypatch):
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = "no container can run on this machine: unshare: Operation not permitted"
    assert steps.no_containers() == said
    (tmp_path / "unshare").write_text("#!/bin/sh\n")
    assert steps.no_containers() == ""
