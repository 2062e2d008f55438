"""`burstline gate`: what is run in which order, what it decides, its files and its exit code."""

import json
import re
import shlex
import shutil
from collections import Counter
from html import unescape
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import burstline
from burstline.cli import main
from burstline.reports.model import gated
from burstline.reports.model.gated import NUMBERS, Rule, judge_series
from burstline.reports.page.gate_blocks import figure
from burstline.suites import gate
from burstline.suites.gate import argv_of
from burstline.workloads.request import WorkloadError
from tests.reports.synthetic_sweep import finished_run

PAIR = ("run --engine vllm", "run --engine vllm --max-num-seqs 4")


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """Contenders that take as much longer as `slower` says, with 1% noise; the runs in their order."""
    draw, order, slower = np.random.default_rng(1), [], {"baseline": 1.0, "candidate": 1.0, "failed": 0}

    def run_in(folder, argv, label):
        order.append(label)
        speed = slower[label] * float(np.exp(draw.normal(0, 0.01)))
        n_failed = slower["failed"] if label == "candidate" else 0
        return finished_run(folder, "vllm", 80, speed=speed, n_failed=n_failed)

    monkeypatch.setattr(gate, "run_in", run_in)
    monkeypatch.chdir(tmp_path)
    return slower, order


def result(folder="runs"):
    """What the gate found; its page says the same, also when `report` writes it again."""
    found = json.loads(Path(folder, "gate-001/gate.json").read_text())
    del found["inputs"]
    page = Path(folder, "gate-001/report.html").read_text()
    Path(folder, "gate-001/report.html").unlink()
    assert main(["report", f"{folder}/gate-001"]) == 0
    assert Path(folder, "gate-001/report.html").read_text() == page
    (inside,) = re.findall(r'<script type="application/json" id="summary">(.*?)</script>', page)
    assert json.loads(inside) == found
    shown = re.sub(r"<[^>]+>", "", page[page.index("<header>") : page.index("</header>")])
    assert found["outcome"] in shown
    assert unescape(shown).count(found["sentence"]) == 1
    for outcome in {"SAME", "BETTER", "WORSE", "UNDECIDED"} - {found["outcome"]}:
        assert outcome not in shown
    assert not re.search(r"\dx (faster|slower)|equally fast", page)
    return found


def test_a_slower_candidate_fails_the_gate_and_every_file_says_so(servers, capsys):
    slower, order = servers
    slower["candidate"] = 1.15
    assert main(["gate", *PAIR]) == 3
    assert order[:6] == ["baseline", "candidate", "candidate", "baseline", "baseline", "candidate"]
    assert len(order) <= 10
    said = capsys.readouterr().out
    percent = float(re.search(r"E2E p50 worse: \+([\d.]+)%", said)[1])
    assert 10 < percent < 20
    assert result()["outcome"] == "WORSE"
    ratio = result()["numbers"]["E2E p50"]["ratio"]
    assert 1 < ratio["low"] < 1.15 < ratio["high"]
    suite = ET.parse("runs/gate-001/junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    summary = Path("runs/gate-001/summary.md").read_text()
    assert "✕ WORSE" in summary
    assert "| E2E p50 |" in summary
    page = Path("runs/gate-001/report.html").read_text()
    assert page.count('id="pairs-e2e-p50"') == 1
    assert page.index('id="pairs-e2e-p50"') < page.index("</header>")
    assert f"{len(order) // 2} pairs" in page


DAMAGED = {
    "empty": lambda kept: "",
    "a list": lambda kept: "[]",
    "an older gate": lambda kept: json.dumps({k: v for k, v in kept.items() if k != "inputs"}),
    "no runs": lambda kept: json.dumps(kept | {"inputs": kept["inputs"] | {"runs": []}}),
    "no such run": lambda kept: json.dumps(kept).replace("01-baseline/", "01-elsewhere/"),
    "a text as margin": lambda kept: json.dumps(kept).replace(
        '"margin": 0.05, "most"', '"margin": "x", "most"'
    ),
    "no such number": lambda kept: json.dumps(kept).replace('"e2e", "p50"', '"e2e", "p51"'),
}


def test_report_tells_in_one_line_why_a_gates_page_cannot_be_written(servers, capsys):
    assert main(["gate", *PAIR, "--budget-s", "0.001"]) == 4
    file = Path("runs/gate-001/gate.json")
    kept = json.loads(file.read_text())
    capsys.readouterr()
    for name, damage in DAMAGED.items():
        file.write_text(damage(kept))
        assert main(["report", "runs/gate-001"]) == 2, name
        assert len(capsys.readouterr().err.splitlines()) == 1, name
    assert main(["report", "runs/gate-001", "--format", "markdown", "--to", "out"]) == 2
    assert "--format is for a run, and runs/gate-001 is a gate" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_passes_and_so_does_a_faster_one(servers):
    slower, _ = servers
    assert main(["gate", *PAIR]) == 0
    assert result()["outcome"] == "SAME"
    slower["candidate"] = 0.8
    assert main(["gate", *PAIR, "--out", "faster"]) == 0
    assert result("faster")["outcome"] == "BETTER"


def test_python_gates_as_the_command_does_and_keeps_a_command_that_repeats_it(servers, capsys):
    slower, _ = servers
    slower["candidate"] = 1.15
    result = burstline.gate(*PAIR, metric=["ttft.p50", "e2e.p50"], max_runs=12, requests=40, out="here")
    assert isinstance(result, burstline.GateResult)
    assert result.outcome == "WORSE"
    low, high = result.ratios["E2E p50"].low, result.ratios["E2E p50"].high
    assert low < 1.15 < high
    assert result.document == json.loads((result.path / "gate.json").read_text())
    assert str(result).startswith("WORSE: TTFT p50 worse: +")
    again = shlex.split(result.document["inputs"]["command"])
    assert again == [
        *("burstline", "gate", *PAIR, "--metric", "ttft.p50", "--metric", "e2e.p50", "--max-runs", "12"),
        *("--out", "here", "--", "--requests", "40"),
    ]
    assert main(again[1:]) == 3
    assert json.loads(Path("here/gate-002/gate.json").read_text())["inputs"]["command"] == shlex.join(again)
    history = burstline.gate(history="here")
    assert history.document["outcome"] == history.outcome


def test_the_how_tos_gate_runs_as_printed(servers, capsys):
    text = (Path(__file__).parents[2] / "docs/howto/python.md").read_text("utf-8")
    (block,) = (
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "burstline.gate(" in each
    )
    slower, order = servers
    slower["candidate"] = 1.5
    exec(block, {})
    kept = json.loads(Path("runs/gate-001/gate.json").read_text())
    shown = capsys.readouterr().out.splitlines()
    assert len(order) == 6
    assert shown[-1] == "WORSE runs/gate-001/report.html"
    assert [line.rsplit(maxsplit=3)[0] for line in shown[:-1]] == list(kept["numbers"])


@pytest.mark.parametrize(
    ("contenders", "options", "told"),
    [
        (PAIR, {"metric": ["e2e.p51"]}, "metric 'e2e.p51'; expected one of "),
        (PAIR, {"metric": "e2e.p50"}, "metric must be a list of strings, not str 'e2e.p50'"),
        (PAIR, {"margn": 3}, "unknown key 'margn'; did you mean margin?"),
        (PAIR, {"max_runs": 2}, "--max-runs 2: expected 6 to 200"),
        (PAIR, {"num_prompts": 2}, "num_prompts is requests here"),
        (PAIR[:1], {}, "1 given: expected BASELINE and CANDIDATE, or --history FOLDER"),
        (("runs", "http://h:1"), {"history": "."}, "--history judges one run"),
        (PAIR, {"out": 5}, "out must be a folder, not int 5"),
    ],
)
def test_python_refuses_a_gate_before_its_first_run(contenders, options, told, servers, tmp_path):
    with pytest.raises(WorkloadError, match=re.escape(told)):
        burstline.gate(*contenders, **options)
    assert not list(tmp_path.iterdir())


def test_what_the_runs_leave_open_is_an_error_of_its_own(servers, capsys):
    slower, order = servers
    slower["candidate"] = 1.01
    assert main(["gate", *PAIR, "--max-runs", "6", "--margin", "1"]) == 4
    assert len(order) == 6
    assert result()["outcome"] == "UNDECIDED"
    assert "Raise --max-runs" in capsys.readouterr().out
    assert ET.parse("runs/gate-001/junit.xml").getroot().get("errors") == "1"


@pytest.mark.parametrize("pair", [1, 2, 4])
def test_a_run_that_does_not_count_is_told_after_its_pair_and_once(pair, servers, capsys, monkeypatch):
    """The gate goes on: who is there can stop what disturbs it."""
    why = "it is DISTURBED. Others used 80% of this machine's CPU: python (pid 7) 78%"
    bad = f"{pair:02}-baseline"
    monkeypatch.setattr(gated, "_unusable", lambda run, _: why if bad in str(run.path) else None)
    main(["gate", *PAIR, "--max-runs", "8", "--margin", "0.1"])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("After ")]
    assert [why in line for line in said] == [k == pair for k in range(1, 5)]


def test_a_budget_that_allows_no_second_pair_ends_after_the_first(servers):
    _, order = servers
    assert main(["gate", *PAIR, "--budget-s", "0.001"]) == 4
    assert len(order) == 2
    assert result()["outcome"] == "UNDECIDED"


def test_a_candidate_whose_requests_fail_is_worse(servers, capsys):
    slower, order = servers
    slower["failed"] = 60
    assert main(["gate", *PAIR]) == 3
    assert Counter(order) == {"baseline": 1, "candidate": 1}
    assert "Requests of the candidate failed" in capsys.readouterr().out
    assert result()["outcome"] == "WORSE"


def test_a_stored_baseline_is_not_run_again(servers, tmp_path):
    slower, order = servers
    for k in range(4):
        finished_run(tmp_path / "stored", "vllm", 80, speed=1 + k / 200)
    slower["candidate"] = 1.2
    assert main(["gate", "stored", PAIR[1]]) == 3
    assert set(order) == {"candidate"}
    assert result()["outcome"] == "WORSE"


@pytest.mark.slow
def test_several_numbers_are_judged_and_one_worse_fails(servers):
    slower, _ = servers
    slower["candidate"] = 1.3
    assert main(["gate", *PAIR, "--metric", "ttft.p50", "--metric", "output_tok_per_s"]) == 3
    assert set(result()["numbers"]) == {"TTFT p50", "Output"}


@pytest.mark.slow
def test_a_history_names_its_first_bad_run_and_draws_the_series(servers, tmp_path, capsys):
    draw = np.random.default_rng(2)
    names = []
    for k in range(14):
        speed = float(np.exp(draw.normal(0, 0.01))) * (1.2 if k >= 11 else 1.0)
        names.append(finished_run(tmp_path / "nightly", "vllm", 60, speed=speed).name)
    finished_run(tmp_path / "nightly", "tgi", 60)
    (tmp_path / "nightly" / "not-a-run").mkdir()
    # The newest is of another engine: by itself it is no series.
    assert main(["gate", "--history", "nightly"]) == 4
    assert "14 of 15 runs do not count" in capsys.readouterr().out
    slower, order = servers
    slower["candidate"] = 1.2

    def run_in(folder, argv, label):
        order.append(label)
        return finished_run(folder, "vllm", 60, speed=1.2)

    gate.run_in = run_in
    assert main(["gate", "--history", "nightly", PAIR[1], "--out", "judged"]) == 3
    assert order == ["candidate"]
    found = result("judged")
    assert found["first_bad"]["E2E p50"] == names[11]
    drawn = Path("judged/gate-001/history-e2e-p50.svg").read_text()
    assert names[11] in drawn
    assert main(["gate", "--history", str(tmp_path), "--metric", "ttft.p50", "--out", "x"]) in (0, 3, 4)


def test_copies_of_runs_are_no_more_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = finished_run(tmp_path / "nightly", "vllm", 60)
    for k in range(7):
        shutil.copytree(run.path, tmp_path / "nightly" / f"copy-{k}")
    assert main(["gate", "--history", "nightly"]) == 4
    assert result()["outcome"] == "UNDECIDED"
    said = capsys.readouterr()
    assert "1 runs can be used; 5 before the newest are needed" in said.out
    assert said.err.count("again: it counts once") == 7
    assert len(gate.stored_runs(tmp_path / "nightly")) == 1


def test_a_history_judges_the_run_that_is_named_however_old_it_is(servers, tmp_path, capsys):
    slow, draw = finished_run(tmp_path / "old", "vllm", 60, speed=1.2), np.random.default_rng(2)
    for _ in range(12):
        finished_run(tmp_path / "nightly", "vllm", 60, speed=float(np.exp(draw.normal(0, 0.01))))
    assert main(["gate", "--history", "nightly", str(slow.path)]) == 3
    assert "WORSE" in capsys.readouterr().out
    assert main(["gate", "--history", ".", str(slow.path)]) == 3  # also where it lies among the others


def test_the_band_of_a_history_lies_around_what_the_earlier_runs_let_expect(tmp_path):
    speeds = np.array([1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.3, 1.31, 1.29])
    runs = [finished_run(tmp_path, "vllm", 60, speed=float(speed)) for speed in speeds]
    judged = judge_series(runs, Rule((NUMBERS["e2e.p50"],), 0.05, 10))
    assert judged.numbers[0].first_bad == 6
    assert judged.numbers[0].outcome == judged.outcome == "WORSE"
    rows = [[cell.text for cell in row.cells] for row in figure(judged.numbers[0], judged.runs).table.rows]
    assert rows[4][3:] == ["–", "–"]
    usual = float(rows[0][2])
    for row in rows[5:]:
        low, high = (float(end) / usual for end in row[3:])
        assert low < 1.0 < high < 1.3
        assert (low * high) ** 0.5 == pytest.approx(1.0, abs=0.02)


def test_flags_of_both_go_before_those_of_the_engine():
    assert argv_of("http://a:1", ("--rate", "2")) == ["run", "--url", "http://a:1", "--rate", "2"]
    words = argv_of("burstline run --engine vllm -- --block-size 16", ("--rate", "2"))
    assert words == ["run", "--engine", "vllm", "--rate", "2", "--", "--block-size", "16"]


@pytest.mark.parametrize(
    "text", ["vllm", "compare a b", "run --out x", "run --repeats=3", "run laptop", "run 'x", ""]
)
def test_what_is_no_contender_is_refused(text):
    with pytest.raises(WorkloadError):
        argv_of(text, ())


@pytest.mark.parametrize(
    "words",
    [
        ["http://a:1"],
        ["a", "b", "c"],
        ["--history", "nowhere"],
        [*PAIR, "--margin", "0"],
        [*PAIR, "--max-runs", "2"],
        [*PAIR, "--budget-s", "-1"],
        ["--history", ".", "a", "b"],
    ],
)
def test_mistakes_are_told_in_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["gate", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
