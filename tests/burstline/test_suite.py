"""Suites: what is run, in which order, what is refused, and that finished runs are never repeated."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from burstline import cli
from burstline.bench.conclusion import of_summary
from burstline.console import exit_codes
from burstline.measure.record.summary import Summary
from burstline.roofline.model.families import bundled_models
from burstline.suites import execution
from burstline.suites.execution import finished_in, fits, run_suite
from burstline.suites.suite import load_suite, parse_suite, schedule
from burstline.workloads.options import words_of
from burstline.workloads.request import WorkloadError
from tests.burstline.test_compare import another
from tests.burstline.waiting import wait_until
from tests.verdicts import done

ROOT = Path(__file__).parents[2]
SUITES = ROOT / "burstline/suites/shipped"
SHIPPED = sorted(SUITES.glob("*.toml"))
ENGINE = {"engine": "reference"}
WORKLOAD = {"name": "burst", "requests": 20}

SMALL = """
name = "small"
repeats = 2
[[engine]]
name = "one"
engine = "reference"
[[engine]]
name = "two"
engine = "reference"
[[workload]]
name = "burst"
requests = 24
prompt_tokens = 32
output_tokens = 4
"""


def suite(**changes):
    raw = {"name": "s", "engine": [ENGINE], "workload": [WORKLOAD], **changes}
    return parse_suite({key: value for key, value in raw.items() if value is not None}, "s.toml")


def names(slots) -> str:
    return " ".join(slot.engine.name for slot in slots)


def test_engines_are_interleaved_forwards_and_backwards():
    engines = [{"name": name, "engine": "reference"} for name in "ABC"]
    assert names(schedule(suite(engine=engines, repeats=3))) == "A B C C B A A B C"


def test_every_engine_meets_every_model_and_workload_in_every_repeat():
    models = [{"name": name, "path": name} for name in ("small", "large")]
    workloads = [{"name": name} for name in ("burst", "steady")]
    slots = schedule(suite(model=models, workload=workloads, repeats=2))
    assert len({slot.id for slot in slots}) == len(slots) == 8
    cells = [slot.cell for slot in slots]
    assert cells[:4] == ["small, burst", "small, steady", "large, burst", "large, steady"]
    assert cells == cells[::-1]


def test_a_suite_says_how_requests_are_asked_and_which_clients_hang_up():
    engine = {
        "engine": "vllm", "url": "http://a:1,http://b:1", "endpoint": "chat",
        "header": ["X-Team: blue"], "extra_body": '{"min_p": 0.1}', "lora": "one,two",
    }  # fmt: skip
    load = {
        "name": "w",
        "temperature": 0.7,
        "cancel_share": "20%,after=4..8",
        "max_failures": 0.05,
    }
    (slot,) = schedule(suite(engine=[engine], workload=[load]))
    argv = " ".join(slot.argv(Path("out")))
    for words in (
        "--url http://a:1,http://b:1", "--endpoint chat", "--header X-Team: blue",
        '--extra-body {"min_p": 0.1}', "--lora one,two", "--temperature 0.7",
        "--cancel-share 0.2,after=4..8", "--max-failures 0.05",
    ):  # fmt: skip
        assert words in argv
    with pytest.raises(WorkloadError, match="cancel_share: '2': expected a share"):
        suite(workload=[load | {"cancel_share": 2.0}])


def test_a_run_is_a_command_that_a_person_could_type():
    engine = {"engine": "vllm", "engine_python": "/v/python", "port": 8001, "args": ["--enforce-eager"]}
    model = {"name": "m", "path": "models/m", "vocab_size": 32000}
    load = {"name": "w", "requests": 9, "prompt_tokens": "256..768", "rate": 2, "arrival": "poisson"}
    (slot,) = schedule(suite(engine=[engine], model=[model], workload=[load]))
    assert slot.id == "001-vllm-m-w"
    assert slot.argv(Path("out")) == (
        *("run", "--engine", "vllm", "--model", "models/m", "--port", "8001"),
        *("--engine-python", "/v/python"),
        *("--requests", "9", "--prompt-tokens", "256..768", "--vocab-size", "32000"),
        *("--arrival", "poisson", "--rate", "2", "--out", "out", "--", "--enforce-eager"),
    )


@pytest.mark.parametrize(
    ("said", "flags"),
    [(True, ("--container",)), (False, ()), ("vllm/vllm-openai:v1", ("--container", "vllm/vllm-openai:v1"))],
)
def test_an_engine_may_be_started_in_its_own_container_or_in_a_named_one(said, flags):
    (slot,) = schedule(suite(engine=[{"engine": "vllm", "container": said}]))
    assert words_of(slot.engine.at(slot.model, slot.platform)) == ("--engine", "vllm", *flags)


def test_a_list_makes_a_workload_of_each_value_and_lists_go_in_step():
    load = {
        "name": "users",
        "concurrency": [1, 8],
        "requests": [20, 160],
        "slo": ["ttft.p99<=2s", "itl.p99<=1s"],
    }
    rates = {"name": "rates", "requests": 9, "rate": [0.5, 2]}
    shared = {"name": "shared", "requests": 9, "shared_prefix": ["30%", "64,groups=4"]}
    slots = schedule(suite(workload=[load, rates, shared]))
    assert [slot.cell for slot in slots] == [
        "users-concurrency1", "users-concurrency8", "rates-rate0.5", "rates-rate2",
        "shared-shared_prefix30", "shared-shared_prefix64-groups-4",
    ]  # fmt: skip
    assert words_of(slots[1].workload.spec) == ("--requests", "160", "--concurrency", "8")
    assert slots[1].workload.goals.slo == ("ttft.p99<=2s", "itl.p99<=1s")
    assert words_of(slots[2].workload.spec) == ("--requests", "9", "--rate", "0.5")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repeat": 3}, "s.toml: unknown key 'repeat'; did you mean repeats?"),
        ({"name": None}, "s.toml: name is missing; expected a string"),
        ({"name": "a b"}, "expected letters"),
        ({"repeats": "3"}, "repeats must be a whole number, not str '3'"),
        ({"repeats": True}, "repeats must be a whole number, not bool True"),
        ({"repeats": 0}, "expected 1 to 1000"),
        ({"engine": []}, "there is no [[engine]]"),
        ({"engine": {"engine": "vllm"}}, "must be written as [[engine]]"),
        ({"workload": None}, "there is no [[workload]]"),
        ({"engine": [{"name": "mine"}]}, "[[engine]] 1: engine is missing; expected a string"),
        ({"engine": [{}]}, "[[engine]] 1: engine is missing"),
        ({"engine": [{"name": "mine", "args": ["--max-num-seqs", "4"]}]}, "engine is missing"),
        ({"engine": [{"engine": "vlm"}]}, "[[engine]] 1: unknown engine 'vlm'; did you mean vllm?"),
        ({"engine": [{**ENGINE, "arg": ["x"]}]}, "unknown key 'arg'; did you mean args?"),
        ({"engine": [{**ENGINE, "args": "x"}]}, "args must be a list of strings, not str 'x'"),
        ({"engine": [{**ENGINE, "api_key": "sk-1"}]}, "put the key in an environment variable"),
        ({"engine": [{**ENGINE, "args": ["--api-key", "sk-1"]}]}, "args hold a secret"),
        ({"engine": [ENGINE, ENGINE]}, "two [[engine]] are called 'reference'"),
        ({"model": [{"name": "m"}]}, "[[model]] 1: path is missing"),
        ({"workload": [{**WORKLOAD, "requests": "many"}]}, "requests must be a whole number"),
        ({"workload": [{**WORKLOAD, "promt_tokens": 9}]}, "did you mean prompt_tokens?"),
        ({"workload": [{**WORKLOAD, "salt": "5eed"}]}, "unknown key 'salt'"),
        ({"workload": [{**WORKLOAD, "arrival": "gama"}]}, "gama"),
        ({"workload": [{**WORKLOAD, "requests": 0}]}, "[[workload]] 1: --requests 0: expected at least 1"),
        ({"workload": [{**WORKLOAD, "workers": "many"}]}, "1: workers: expected a number"),
        ({"workload": [{**WORKLOAD, "slo": ["ttft.p99=2s"]}]}, "[[workload]] 1: --slo 'ttft.p99=2s'"),
        ({"workload": [{**WORKLOAD, "slo": "ttft.p99<=2s"}]}, "slo must be a list of strings"),
        ({"workload": [{**WORKLOAD, "rate": []}]}, "rate has 0 values"),
        ({"workload": [{**WORKLOAD, "concurrency": [1, 2], "requests": [9]}]}, "must have the same length"),
        ({"workload": [{**WORKLOAD, "concurrency": [1, 1]}]}, "two [[workload]] are called"),
        ({"workload": [{**WORKLOAD, "rate": [1, "x"]}]}, "rate = x: rate: expected requests per second"),
    ],
)
def test_a_slip_is_named_with_its_place(changes, words):
    with pytest.raises(WorkloadError) as error:
        suite(**changes)
    assert words in str(error.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_suites_can_be_run(path):
    shipped = load_suite(path)
    assert shipped.name == path.stem
    n_cells = len(shipped.models) * len(shipped.workloads) * max(1, len(shipped.platforms))
    assert len(schedule(shipped)) == shipped.repeats * len(shipped.engines) * n_cells


def test_the_papers_suite_asks_all_three_engines_for_the_papers_burst():
    paper = load_suite(SUITES / "llm-serving-2311.03687.toml")
    assert [engine.name for engine in paper.engines] == ["vllm", "tgi", "lightllm"]
    assert [model.name for model in paper.models] == ["llama-2-7b", "llama-2-13b", "llama-2-70b"]
    slots = schedule(paper)
    devices = {
        (slot.model.name, slot.platform.name, after("--tensor-parallel-size", slot.argv(Path("o"))))
        for slot in slots
    }
    platforms = ("a800", "rtx-4090", "rtx-3090")
    assert devices == {(model.name, on, "8") for model in paper.models for on in platforms}
    lines = list(fits(slots))
    assert len(lines) == 9
    assert all(": fits, " in line for line in lines), lines
    assert {model.like for model in paper.models} < set(bundled_models())
    (burst,) = paper.workloads
    assert (burst.spec.requests, burst.spec.prompt_tokens) == (1000, "512")


def test_a_dry_run_says_what_does_not_fit_a_platform(tmp_path, capsys):
    text = (SUITES / "llm-serving-2311.03687.toml").read_text()
    there = "resources = { rtx4090 = 1 }\n"
    assert there in text
    one = there + "models = { llama-2-13b = { tensor_parallel_size = 1 } }\n"
    (tmp_path / "s.toml").write_text(text.replace(there, one))
    assert cli.main(["run", str(tmp_path / "s.toml"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "# llama-2-13b, burst, rtx-4090, 1 GPU: does not fit: " in said
    (tmp_path / "s.toml").write_text(text.replace(there, one.replace("llama-2-13b", "llama-3")))
    assert cli.main(["run", str(tmp_path / "s.toml"), "--dry-run"]) == 2
    assert "no [[model]] is 'llama-3'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_secrets_of_a_suite_are_neither_shown_nor_kept(tmp_path, capsys):
    text = """
name = "small"
[[engine]]
name = "there"
engine = "vllm"
url = "http://user:pa55-of-mine@127.0.0.1:9"
header = ["Authorization: Token k3y-of-mine", "X-Pin: z7Q"]
extra_body = '{"user_token": "t0ken-of-mine"}'
[[workload]]
name = "burst"
requests = 24
"""
    (tmp_path / "s.toml").write_text(text)
    assert cli.main(["run", str(tmp_path / "s.toml"), "--dry-run", "--out", str(tmp_path)]) == 0
    cli.main(["run", str(tmp_path / "s.toml"), "--out", str(tmp_path / "runs")])
    captured = capsys.readouterr()
    written = b"".join(path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert b"127.0.0.1:9" in written
    for secret in ("pa55-of-mine", "k3y-of-mine", "t0ken-of-mine", "z7Q"):
        assert secret not in captured.out + captured.err
        assert secret.encode() not in written


def test_comments_do_not_make_another_suite_but_words_do(tmp_path):
    (tmp_path / "a").write_text(SMALL)
    (tmp_path / "b").write_text("# the same\n" + SMALL)
    (tmp_path / "c").write_text(SMALL.replace("24", "25"))
    a, b, c = (load_suite(tmp_path / name).sha256 for name in "abc")
    assert a == b != c


def test_a_suite_that_an_editor_marked_as_utf_8_is_read(tmp_path):
    path = tmp_path / "suite.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SHIPPED[0].read_bytes())
    assert load_suite(path).name == load_suite(SHIPPED[0]).name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "is not TOML"),
        (None, "cannot be read"),
        ("x = 1", "unknown key 'x'"),
        ("x = " + "[" * 3_000, "is not TOML"),
        ("x = " + "9" * 5_000, "is not TOML"),
        ("a" + ".a" * 100_000 + " = 1", "is not TOML"),
        ("# comment\n" * 100_000, "is not TOML"),
    ],
    ids=range(7),
)
def test_a_file_that_is_no_suite_is_said_in_a_line(tmp_path, capsys, text, words):
    path = tmp_path / "suite.toml"
    if text is not None:
        path.write_text(text)
    assert cli.main(["run", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_flags_beside_a_suite_are_refused_because_they_would_be_ignored(capsys):
    assert cli.main(["run", str(SHIPPED[0]), "--requests", "9", "--engine", "vllm"]) == 2
    said = capsys.readouterr().err
    assert "--engine" in said
    assert "--requests" in said


DRY = {
    "one run": ("--rate 2 --duration-s 30", ["60 requests"], "1 run: 0.5 min of load, and the starts"),
    "no count": ("--rate 10", ["1,000 requests"], "1 run: 1.7 min of load, and the starts"),
    "repeats": ("--rate 2 --duration-s 30 --repeats 3", ["60 requests"], "3 runs: 1.5 min of load"),
    "a sweep": (
        "--concurrency 1,4 --requests 9 --repeats 2",
        ["9 requests", "9 requests"],
        "4 runs: the starts; the load of 4 lasts until all replies are there",
    ),
    "an SLO": (
        "--requests 9 --slo ttft.p99<=1s",
        ["ttft.p99<=1s may not be met", "9 requests"],
        "1 run: the starts; the load of 1 lasts until",
    ),
}


@pytest.mark.parametrize(("flags", "loads", "time"), DRY.values(), ids=DRY)
def test_a_dry_run_without_a_suite_prints_the_plan_and_starts_nothing(flags, loads, time, tmp_path, capsys):
    words = ["run", "--engine", "truth", *flags.split(), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--dry-run"]) == 0
    told = capsys.readouterr().out.splitlines()
    remarks, commands = told[: len(loads) + 1], told[len(loads) + 1 :]
    assert [line.startswith(f"# {load}") for line, load in zip(remarks, loads, strict=False)] == [True] * len(
        loads
    )
    assert remarks[-1].startswith(f"# {time}")
    assert len(commands) == sum("requests" in load for load in loads)
    assert not (tmp_path / "out").exists()
    for command in commands:  # each is a run of its own, and passes its own check
        assert cli.main([*shlex.split(command)[1:], "--dry-run"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == command


def test_a_dry_run_refuses_what_the_run_would(tmp_path, capsys):
    assert cli.main(["run", "--engine", "vllm", "--model", str(tmp_path), "--dry-run"]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_a_dry_run_prints_the_commands_and_starts_nothing(tmp_path, capsys):
    assert cli.main(["run", str(SUITES / "laptop.toml"), "--dry-run", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    lines = [line for line in told if not line.startswith("# ")]
    assert len(lines) == 12
    assert "# 12 runs: " in "\n".join(told)
    assert all(line.startswith("burstline run --engine ") for line in lines)
    assert not list(tmp_path.iterdir())


def test_a_missing_key_is_found_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(WorkloadError, match="OPENAI_API_KEY, which is not set"):
        run_suite(SUITES / "openai-endpoint.toml", tmp_path)
    assert not list(tmp_path.iterdir())


# ---- carrying out, with runs that were made beforehand


@pytest.fixture
def fake_runs(burst_run, monkeypatch):
    """Every call of `burstline run` leaves a finished run in its --out folder; the calls are returned."""
    calls = []

    def called(argv, environment, lock):
        calls.append((argv, environment))
        out = Path(argv[argv.index("--out") + 1])
        another(burst_run.path, out / f"{burst_run.name}-{len(calls)}", len(calls))
        return 0

    monkeypatch.setattr(execution, "called", called)
    return calls


@pytest.fixture
def small(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_finished_runs_are_not_repeated_and_interrupted_ones_are(small, tmp_path, fake_runs, capsys):
    run_suite(small, tmp_path)
    assert len(fake_runs) == 4
    folder = next(tmp_path.glob("small-*"))
    run_suite(small, tmp_path)
    assert len(fake_runs) == 4
    manifest = next((folder / "003-two-burst").glob("*/manifest.json"))
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "status": "interrupted"}))
    shutil.move(manifest.parent, manifest.parent.with_name("interrupted"))
    run_suite(small, tmp_path)
    assert len(fake_runs) == 5
    assert "003-two-burst" in " ".join(fake_runs[-1][0])
    assert "done before" in capsys.readouterr().err


def test_one_report_stands_over_all_runs_and_links_to_each(small, tmp_path, fake_runs, capsys):
    assert run_suite(small, tmp_path) == 0
    folder = next(tmp_path.glob("small-*"))
    page = (folder / "report.html").read_text()
    for slot in schedule(load_suite(small)):
        run = finished_in(folder / slot.id)
        assert run is not None
        assert f'href="{slot.id}/{run.name}/report.html"' in page
    assert "COMPARABLE" in (folder / "report.md").read_text()
    assert str(folder / "report.html") in capsys.readouterr().out
    assert tomllib.loads((folder / "suite.toml").read_text())["name"] == "small"


def test_an_engine_that_fails_does_not_stop_the_others(small, tmp_path, fake_runs, monkeypatch, capsys):
    copying = execution.called
    monkeypatch.setattr(
        execution, "called", lambda argv, *rest: 5 if "-two-" in str(argv) else copying(argv, *rest)
    )
    assert run_suite(small, tmp_path) == 5
    page = next(tmp_path.glob("small-*/report.html")).read_text()
    assert "No finished run: two, burst, repeat 1." in page
    assert "NOTHING TO COMPARE" in page


def test_a_run_that_was_killed_makes_no_suite_a_success(small, tmp_path, fake_runs, monkeypatch):
    copying = execution.called
    killed = -signal.SIGKILL
    monkeypatch.setattr(
        execution, "called", lambda argv, *rest: killed if "003-two" in str(argv) else copying(argv, *rest)
    )
    assert run_suite(small, tmp_path) == exit_codes.ENGINE_FAILED


TARGETED = """
name = "targeted"
repeats = 2
[[engine]]
name = "one"
engine = "vllm"
url = "http://127.0.0.1:1"
[[workload]]
name = "users"
requests = 60
{load}
slo = ["ttft.p90<=1s"]
"""


@pytest.mark.parametrize(
    ("load", "results", "code"),
    [
        ("", "pass pass", 0),
        ("", "pass fail", 3),
        ("", "pass inconclusive", 4),
        ("", "inconclusive fail", 3),
        ("concurrency = [2, 8]", "pass fail fail pass", 0),
        ("concurrency = [2, 8]", "pass fail fail fail", 3),
        ("concurrency = [2, 8]", "inconclusive fail fail pass", 4),
    ],
)
def test_a_suite_fails_where_a_target_is_missed_and_a_sweep_where_no_load_keeps_it(
    load, results, code, tmp_path, fake_runs, monkeypatch, capsys
):
    coming, copying = iter(results.split()), execution.called

    def called(argv, *rest):
        copying(argv, *rest)
        (path,) = Path(argv[argv.index("--out") + 1]).glob("*/summary.json")
        summary = json.loads(path.read_text())
        measured = summary["metrics"]["ttft"]["p50"]
        target = {"target": "ttft.p90<=1s", "result": next(coming), "measured": measured, "reason": "so"}
        path.write_text(json.dumps({**summary, "targets": [target]}))
        return of_summary(Summary.from_json(summary))

    monkeypatch.setattr(execution, "called", called)
    monkeypatch.setattr(execution, "write_all", lambda comparison, folder: folder / "report.html")
    path = tmp_path / "targeted.toml"
    path.write_text(TARGETED.format(load=load))
    assert run_suite(path, tmp_path) == code
    said = capsys.readouterr().err
    assert said.count("ttft.p90<=1s, ") == len(results.split())
    assert ("✕ fail: ttft.p90<=1s" in said) == ("fail" in results)
    # What was judged stands on the disk: the second time nothing runs, and the answer is the same.
    assert run_suite(path, tmp_path) == code
    assert next(coming, None) is None


def test_a_slip_of_the_users_ends_the_suite(small, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "called", lambda *_: 2)
    with pytest.raises(WorkloadError, match="1 of 4"):
        run_suite(small, tmp_path)


def test_an_interrupt_leaves_a_report_of_what_there_is(small, tmp_path, fake_runs, monkeypatch):
    copying = execution.called
    monkeypatch.setattr(
        execution, "called", lambda argv, *rest: copying(argv, *rest) if "001" in str(argv) else 130
    )
    assert run_suite(small, tmp_path) == 130
    assert "No finished run" in next(tmp_path.glob("small-*/report.html")).read_text()


def test_two_cannot_run_the_same_suite_at_once(small, tmp_path, fake_runs):
    suite = load_suite(small)
    folder = tmp_path / f"{suite.name}-{suite.sha256[:8]}"
    folder.mkdir()
    with execution._locked(folder), pytest.raises(WorkloadError, match="is running already"):
        run_suite(small, tmp_path)


def test_a_key_reaches_the_run_by_its_environment_and_is_written_nowhere(tmp_path, fake_runs, monkeypatch):
    path = tmp_path / "keyed.toml"
    path.write_text(SMALL.replace('name = "one"', 'name = "one"\napi_key_env = "MY_KEY"'))
    monkeypatch.setenv("MY_KEY", "sk-do-not-tell")
    monkeypatch.setenv("BURSTLINE_API_KEY", "sk-another")
    run_suite(path, tmp_path)
    keys = {("-one-" in str(argv)): environment.get("BURSTLINE_API_KEY") for argv, environment in fake_runs}
    assert keys == {True: "sk-do-not-tell", False: None}
    assert not any("sk-do-not-tell" in str(argv) for argv, _ in fake_runs)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"sk-do-not-tell" not in file.read_bytes()


def test_a_model_that_is_missing_is_made_once(tmp_path, fake_runs):
    path = tmp_path / "made.toml"
    table = f'[[model]]\nname = "tiny"\npath = "{tmp_path}/models/tiny"\nlike = "tiny"\n'
    path.write_text(SMALL.replace("[[workload]]", table + "[[workload]]"))
    run_suite(path, tmp_path)
    made_at = (tmp_path / "models/tiny/config.json").stat().st_mtime_ns
    run_suite(path, tmp_path)
    assert (tmp_path / "models/tiny/config.json").stat().st_mtime_ns == made_at


# ---- real runs


@pytest.mark.slow
def test_a_suite_that_was_interrupted_goes_on_where_it_was(small, tmp_path):
    command = [sys.executable, "-m", "burstline", "run", str(small), "--out", str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True, cwd=ROOT) as process:
        wait_until(lambda: list(tmp_path.glob("small-*/002-*/*/captures")))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    first = [run.name for run in tmp_path.glob("small-*/001-*/*")]
    again = subprocess.run(command, timeout=200, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done(again.returncode, tmp_path), again.stderr
    assert [run.name for run in tmp_path.glob("small-*/001-*/*")] == first
    folder = next(tmp_path.glob("small-*"))
    finished = [finished_in(folder / slot.id) for slot in schedule(load_suite(small))]
    assert all(run is not None for run in finished)
    assert "No finished run" not in (folder / "report.html").read_text()
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(folder) in line]


PLATFORMS = (
    SMALL
    + """
[[platform]]
name = "a100"
accelerator = "A100"
gpus = 1
[[platform]]
name = "cpu"
resources = { cpu_node = 1 }
env = { OMP_NUM_THREADS = "1" }
"""
)


@pytest.fixture
def on_platforms(tmp_path):
    path = tmp_path / "platforms.toml"
    path.write_text(PLATFORMS)
    return path


def test_every_platform_gets_every_run_and_is_part_of_its_cell(on_platforms):
    slots = schedule(load_suite(on_platforms))
    assert len(slots) == 8
    assert {slot.cell for slot in slots} == {"burst, a100", "burst, cpu"}
    assert slots[0].id == "001-one-burst-a100"
    assert slots[0].platform.ray_options() == {
        "num_cpus": 1,
        "num_gpus": 1.0,
        "resources": {},
        "accelerator_type": "A100",
    }


def test_platforms_are_refused_where_there_is_no_cluster_to_run_them_on(on_platforms, capsys):
    assert cli.main(["run", str(on_platforms)]) == exit_codes.USAGE
    assert "add --ray to run on a cluster's nodes, or --platform a100" in capsys.readouterr().err


def test_one_platform_of_a_suite_runs_here(on_platforms, tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(execution, "called", lambda argv, env, _: calls.append((argv, env)) or 5)
    code = cli.main(["run", str(on_platforms), "--platform", "cpu", "-q", "--out", str(tmp_path / "out")])
    assert code == exit_codes.ENGINE_FAILED
    assert all(argv[:2] == ["run", "--quiet"] for argv, _ in calls)
    assert len(calls) == 4
    assert all("-cpu" in " ".join(argv) and env["OMP_NUM_THREADS"] == "1" for argv, env in calls)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--platform", "h100"], "--platform h100: not a platform of"),
        (["--workers", "2"], "--workers would be ignored"),
    ],
)
def test_a_slip_about_platforms_is_one_line(on_platforms, capsys, argv, said):
    assert cli.main(["run", str(on_platforms), *argv]) == exit_codes.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "p", "gpu": 1}, "unknown key 'gpu'; did you mean gpus?"),
        ({"name": "p", "resources": 3}, "resources must be a table"),
        ({"name": "p", "resources": {"a": 0}}, "resources.a must be above 0"),
        ({"resources": {"a": 1}}, "name is missing"),
    ],
)
def test_a_platform_that_makes_no_sense_names_its_key(table, said):
    with pytest.raises(WorkloadError, match=said.replace("?", r"\?")):
        suite(platform=[table])


def test_the_settings_of_all_engines_are_their_flags_and_an_engine_may_have_its_own():
    engines = [
        {"engine": "vllm"},
        {"engine": "tgi", "max_num_seqs": 64},
        {"engine": "openai", "url": "http://h:1"},
    ]
    raw = {"max_num_seqs": 256, "dtype": "float16", "prefix_cache": False, "gpu_memory_utilization": 0.9}
    slots = schedule(suite(engine=engines, settings=raw))
    servers = [slot.engine.at(slot.model, slot.platform) for slot in slots]
    vllm, tgi, openai = ((*words_of(server), *words_of(server.settings)) for server in servers)
    same = ("--dtype", "float16", "--prefix-cache", "off", "--gpu-memory-utilization", "0.9")
    assert vllm == ("--engine", "vllm", "--max-num-seqs", "256", *same)
    assert tgi == ("--engine", "tgi", "--max-num-seqs", "64", *same)
    assert openai == ("--engine", "openai", "--url", "http://h:1")


def after(flag, argv):
    """The value of a flag that occurs once."""
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_a_models_settings_replace_those_of_all_and_an_engine_keeps_its_own():
    engines = [
        {"engine": "vllm", "cuda_graphs": 0},
        {"engine": "tgi", "tensor_parallel_size": 4},
        {"engine": "openai", "url": "http://h:1"},
    ]
    models = [
        {"name": "small", "path": "m", "dtype": "bfloat16"},
        {"name": "big", "path": "m", "tensor_parallel_size": 8, "cuda_graphs": 8},
    ]
    of_all = {"tensor_parallel_size": 2, "dtype": "float16"}
    slots = schedule(suite(engine=engines, model=models, settings=of_all))
    words = {(slot.engine.name, slot.model.name): slot.argv(Path("o")) for slot in slots}
    flag = "--tensor-parallel-size"
    assert [after(flag, words["vllm", size]) for size in ("small", "big")] == ["2", "8"]
    assert [after(flag, words["tgi", size]) for size in ("small", "big")] == ["4", "4"]
    assert flag not in words["openai", "big"]
    assert after("--cuda-graphs", words["vllm", "big"]) == "0"
    assert after("--cuda-graphs", words["tgi", "big"]) == "8"
    assert after("--dtype", words["vllm", "small"]) == "float16", "a model's dtype is that of its weights"


def test_a_setting_that_does_not_exist_is_named():
    said = r"\[settings\]: unknown key 'max_seqs'; did you mean max_num_seqs"
    with pytest.raises(WorkloadError, match=said):
        suite(settings={"max_seqs": 4})


def test_a_shipped_suite_is_found_by_name_from_any_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("laptop", "laptop.toml", "suites/laptop.toml"):
        assert cli.main(["run", name, "--dry-run"]) == 0
        assert "--engine reference" in capsys.readouterr().out
    assert cli.main(["run", "labtop", "--dry-run"]) == 2
    assert "did you mean laptop?" in capsys.readouterr().err
    assert cli.main(["run", "nothing-like-it", "--dry-run"]) == 2
    assert "expected one of: laptop, " in capsys.readouterr().err
    (tmp_path / "laptop").write_text("name = 'mine'")
    assert cli.main(["run", "laptop", "--dry-run"]) == 2
    assert "laptop: there is no [[engine]]" in capsys.readouterr().err
