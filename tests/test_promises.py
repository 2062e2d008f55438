"""README promises nothing without a proof, and `make promises` tells how each proof ended."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests import promises
from tests.promises import ALL, COMMANDS, ELSEWHERE, FIRST_SCREEN, GPU, MAKE_RUN, ROOT, TGI

README = (ROOT / "README.md").read_text("utf-8")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def first_screen(readme: str) -> str:
    """All before the examples but the title and the picture."""
    _, text = readme.split("\n", 1)
    return in_one_line(re.sub(r"!\[.*\]\(.*\)", "", text[: text.index("## Four examples")]))


def commands(readme: str) -> list[str]:
    """What each command does, by its table."""
    _, rows = readme.split("| command | what it does |\n|---|---|\n")
    return [line.split(" | ")[1].removesuffix(" |") for line in rows[: rows.index("\n\n")].splitlines()]


def unproved(readme: str) -> list[str]:
    """What README and the promises do not have in common."""
    wrong = []
    if first_screen(readme) != " ".join(promise.phrase for promise in FIRST_SCREEN):
        wrong.append("first screen")
    if commands(readme) != [promise.phrase for promise in COMMANDS]:
        wrong.append("what it does")
    return wrong + [promise.phrase for promise in ELSEWHERE if promise.phrase not in readme]


def test_readme_is_made_of_the_promises() -> None:
    assert unproved(README) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("The kernel timestamps arrivals.", ""),
        ("sends a load, ", "sends a load, drinks coffee, "),
        ("| start an engine and print its URL |", "| start an engine |"),
        ("| `verify` |", "| `fly` | fly |\n| `verify` |"),
        ("use containers", "use boxes"),
    ],
)
def test_a_phrase_without_a_row_is_found_and_a_row_without_a_phrase(old: str, new: str) -> None:
    assert old in README
    assert len(unproved(README.replace(old, new))) == 1


def test_every_proof_is_a_test_that_is_there() -> None:
    for promise in ALL:
        assert promise.proofs, promise.phrase
        for proof in set(promise.proofs) - {GPU, TGI, MAKE_RUN}:
            path, _, name = proof.partition("::")
            tree = ast.parse((ROOT / path).read_text("utf-8"))
            there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert not name or name.partition("[")[0] in there, proof


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What steps left behind, all of it green."""
    proofs = {proof for promise in ALL for proof in promise.proofs} - {GPU, TGI, MAKE_RUN}
    cases = "".join(case(proof) for proof in sorted(proofs))
    (tmp_path / "unit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    run = tmp_path / "runs/20260101T000000Z-reference-burst-1000x512-64-00000000"
    run.mkdir(parents=True)
    counts = {"planned": 1000, "ok": 1000, "timeout": 0}
    summary = {"counts": counts, "memory": {"server_peak_bytes": {"point": 1e8}}}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "report.html").write_text("page")
    monkeypatch.setattr(promises, "ROOT", tmp_path)
    return tmp_path


def case(proof: str, inside: str = "") -> str:
    path, _, name = proof.partition("::")
    classname = path.removesuffix(".py").replace("/", ".")
    return f'<testcase classname="{classname}" name="{name or "test_any[1]"}">{inside}</testcase>'


def test_the_table_names_each_phrase_its_command_and_that_it_is_green(left: Path, capsys) -> None:
    assert promises.main([str(left)]) == 0
    printed = capsys.readouterr().out
    assert "\nThe kernel timestamps arrivals.\n  green         pytest tests/loadgen/test_reader.py" in printed
    assert "\nTensorRT-LLM,\n  needs a GPU\n" in printed
    assert "\nTGI,\n  needs TGI\n" in printed
    assert printed.endswith(" 0 not\n")


@pytest.mark.parametrize(
    ("inside", "told", "code"),
    [
        ('<failure message="x"/>', "  failed        pytest", 1),
        ('<skipped message="no engine here"/>', "  no engine here  pytest", 1),
        ('<skipped message="undecided: busy"/>', "  undecided: busy  pytest", 0),
        (None, "  did not run   pytest", 1),
    ],
)
def test_a_proof_that_is_not_green_is_told(
    left: Path, capsys, inside: str | None, told: str, code: int
) -> None:
    proof = "tests/loadgen/test_reader.py::test_stamps_are_taken_between_the_sending_and_the_return"
    text = (left / "unit.xml").read_text()
    assert case(proof) in text
    (left / "unit.xml").write_text(text.replace(case(proof), "" if inside is None else case(proof, inside)))
    assert promises.main([str(left)]) == code
    assert f"{told} {proof}" in capsys.readouterr().out


def test_what_this_machine_lacks_breaks_no_promise_and_a_failure_there_does(left: Path, capsys) -> None:
    (promise,) = [promise for promise in ALL if promise.lacking]
    (proof,) = promise.proofs
    text = (left / "unit.xml").read_text()
    for inside, code in (('<skipped message="no daemon"/>', 0), ('<failure message="x"/>', 1)):
        (left / "unit.xml").write_text(text.replace(case(proof), case(proof, inside)))
        assert promises.main([str(left)]) == code
    assert f"{promise.lacking}  pytest {proof}" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["counts", "page", "runs"])
def test_a_burst_that_lost_a_request_or_its_page_is_no_proof(left: Path, broken: str) -> None:
    (run,) = (left / "runs").iterdir()
    if broken == "counts":
        summary = json.loads((run / "summary.json").read_text())
        summary["counts"] |= {"ok": 999, "timeout": 1}
        (run / "summary.json").write_text(json.dumps(summary))
    elif broken == "page":
        (run / "report.html").write_text("")
    else:
        run.rename(run.with_name("20260101T000000Z-reference-closed8-10x512-64-00000000"))
    assert promises.main([str(left)]) == 1
