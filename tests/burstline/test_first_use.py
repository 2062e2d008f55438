"""What a newcomer types in the first five minutes: words of other tools, units, several loads."""

from __future__ import annotations

import http.server
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import burstline
from burstline.bench import repeats, server_session
from burstline.bench import run as run_module
from burstline.bench.run_settings import Settings
from burstline.cli import Parser, main
from burstline.measure.record.manifest import Manifest, ServerFacts
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import State, Verdict
from burstline.servers.host.ready import send, wait_ready
from burstline.servers.messages import Call, EngineError, Target, target_at
from burstline.servers.redact import Secret
from burstline.servers.registry import BUILT_IN, ENGINES
from burstline.suites import execution
from burstline.verbs import compare, engines
from burstline.verbs.arguments import add_arguments
from burstline.wording import counted, hint, of_others, others
from burstline.workloads.load import load_of
from burstline.workloads.options import per_second, seconds
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec
from tests.burstline.test_compare import another
from tests.truth.rig import truth_server
from tests.truth.script import Script

OTHERS, VALUES = others()["flags"], others()["values"]
ROOT = Path(__file__).parents[2]


def parser_of_run() -> Parser:
    parser = Parser("burstline run", "")
    add_arguments("run", parser)
    return parser


@pytest.mark.parametrize("theirs", sorted(OTHERS))
def test_another_tools_flag_names_one_that_a_run_has(theirs):
    ours, flags = OTHERS[theirs], parser_of_run().flags()
    told = f"--{theirs} is {ours} here" if ours.startswith("--") else f"--{theirs} is not needed: {ours}"
    assert ours.partition(" ")[0] in flags or not ours.startswith("--")
    assert hint(f"--{theirs}", flags) == told


def test_the_page_for_those_who_come_from_other_tools_has_every_row():
    page = (ROOT / "docs" / "howto" / "coming-from.md").read_text()
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| (.*?) \|$", page, re.MULTILINE))
    assert rows == {name: f"`{ours}`" if ours.startswith("--") else ours for name, ours in OTHERS.items()}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["run", "--num-prompts", "3"], "--num-prompts is --requests here"),
        (["run", "--request-rate=3"], "--request-rate is --rate here"),
        (
            ["run", "--target", "u", "--num-prompts", "3", "--concurency", "8"],
            "--target is --url here; --num-prompts is --requests here; did you mean --concurrency?",
        ),
        (["run", "--backend", "vllm"], "is not needed: the engine at --url is recognised"),
        (["run", "--ignore-eos"], "is not needed: each reply gets exactly --output-tokens"),
        (
            ["run", "--data", "prompt_tokens=512,output_tokens=128", "--target=u", "--goodput=ttft:200"],
            "512 --output-tokens 128 here; --target is --url here; --goodput ttft:200 is --slo 'ttft<=200ms'",
        ),
        (
            ["run", "--data", '{"prompt_tokens": 512, "output_tokens": 128}'],
            "is --prompt-tokens 512 --output",
        ),
        (["run", "--url", "http://h:1", "--endpoint", "/v1/completions"], "is --endpoint completions here"),
        (["run", "--profile", "sweep"], "--profile sweep is --rate 1,2,4 here"),
        (["limit", "--rate", "inf", "--slo", "ttft.p90<=1s"], "--rate inf is not needed: without it all"),
        (
            ["run", "config.yml"],
            "config.yml: expected a suite's TOML file; inference-perf's YAML is here",
        ),
        (
            ["--print-completion"],
            "--print-completion '': expected one of bash, zsh, tcsh, fish, powershell; try",
        ),
        (["--print-completion=elvish"], "--print-completion 'elvish': expected one of bash"),
        (["run", "--duration", "30"], "did you mean --duration-s?"),
        (["sweep"], "it is `burstline run --rate 1,2` here"),
        (["run", "--rate", "many"], "expected requests per second such as 10, or 10/s, not 'many'"),
        (["run", "--duration-s", "3x"], "expected seconds such as 30, or 30s, 500ms, 2m, 1h, not '3x'"),
        (
            ["run", "--rate", "1,2", "--concurrency", "1,2"],
            "--rate 1,2: expected one list",
        ),
        (["run", "--rate", "2,2"], "--rate 2,2: expected one list of different loads"),
        (["run", "--engine", "truth", "--rate", "2,0"], "0"),
        (["limit", "--rate", "2,4", "--slo", "ttft.p90<=1s"], "--rate 2,4: expected one value"),
        (["run", "--engine", "vlm"], "unknown engine 'vlm'; did you mean vllm?"),
        (["bound", "--model", "lama-3.1-8b", "--device", "h100"], "did you mean llama-3.1-8b"),
        (["bound", "--model", "llama-3.1-8b", "--device", "b20"], "did you mean b200-sxm"),
    ],
)
def test_a_slip_is_told_with_what_to_write_instead(argv, told, capsys):
    try:
        code = main(argv)
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert told in capsys.readouterr().err


def test_every_value_on_the_page_is_answered_as_the_page_says(capsys):
    page = (ROOT / "docs" / "howto" / "coming-from.md").read_text()
    rows = re.findall(r"^\| `(--[\w-]+) (\S.*?)` \| (.*?) \|$", page, re.MULTILINE)
    matched = {
        pattern for pattern in VALUES for flag, value, _ in rows if re.fullmatch(pattern, f"{flag} {value}")
    }
    assert matched == set(VALUES)
    for flag, value, ours in rows:
        told = f"is {ours.strip('`')} here" if ours.startswith("`") else f"is not needed: {ours}"
        assert of_others(flag, value) == f"{flag} {value} {told}"
        with pytest.raises(SystemExit, match="2"):
            main(["run", flag, value])
        assert capsys.readouterr().err.splitlines()[0] == f"burstline run: {flag} {value} {told}"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--data", "q.csv,prompt=question"), ("--rate", "2"), ("--slo", "ttft.p99<=2s"), ("--endpoint", "chat"),
     ("--profile", "traces"), ("--arrival", "poisson"), ("--extra-body", '{"min_p": 0.1}')],
)  # fmt: skip
def test_our_own_values_are_never_taken_for_another_tools(flag, value):
    assert of_others(flag, value) == ""


def test_python_and_a_suite_answer_another_tools_value_too():
    with pytest.raises(WorkloadError, match="is --prompt-tokens 512 --output-tokens 128 here"):
        burstline.run(engine="truth", data="prompt_tokens=512,output_tokens=128")


def test_a_key_or_an_argument_of_another_tool_is_told_in_our_words():
    assert hint("num_prompts", ["requests", "rate"]) == "num_prompts is requests here"
    assert hint("requsts", ["requests", "rate"]) == "did you mean requests?"
    assert hint("zz", ["requests", "rate"]) == "expected one of: requests, rate"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 30.0),
        ("30s", 30.0),
        ("1.5 s", 1.5),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1h", 3600.0),
    ],
)
def test_seconds_may_have_a_unit(text, value):
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "s", "3x", "3 days", "1m30s"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(WorkloadError, match="expected seconds such as"):
        seconds(text)


@pytest.mark.parametrize(("text", "value"), [("10", 10.0), ("10/s", 10.0), ("2.5req/s", 2.5)])
def test_a_rate_may_have_a_unit(text, value):
    assert per_second(text) == value


def test_a_sweep_has_a_run_for_each_load_each_with_its_own_command(monkeypatch, tmp_path):
    given: list[Settings] = []
    monkeypatch.setattr(repeats, "run_several", lambda loads, *_, **__: given.extend(loads) or 0)
    assert (
        main(
            ["run", "--engine", "reference", "--concurrency", "8,16", "--requests=40", "--out", str(tmp_path)]
        )
        == 0
    )
    assert [each.load.spec.concurrency for each in given] == [8, 16]
    assert len({each.load.spec.salt for each in given}) == 1
    assert given[1].again().startswith("burstline run --engine reference")
    assert " --concurrency 16 " in given[1].again()


def test_a_sweep_goes_forwards_then_backwards_and_ends_when_it_is_interrupted(monkeypatch, tmp_path):
    order: list[tuple[int | None, str]] = []
    nothing = Summary(counts={}, metrics={}, verdict=Verdict(State.VALID))

    def once(settings: Settings, *_: object, **__: object) -> run_module.Ended:
        order.append((settings.load.spec.concurrency, settings.load.spec.salt))
        run = RunDir(tmp_path, Manifest(engine="vllm", workload="burst"))
        return run_module.Ended(run, nothing, 130 if len(order) == 4 else 0)

    monkeypatch.setattr(repeats, "carry_out", once)
    loads = [Settings(out=tmp_path, load=load_of(LoadSpec(salt="0", concurrency=n))) for n in (1, 2)]
    assert repeats.run_several(loads, 3, restart_after=None) == 130
    assert order == [(1, "0"), (2, "1"), (2, "2"), (1, "3")]


ENGINES_OF_A_DUEL = """
name = "duel"
[[engine]]
engine = "reference"
[[engine]]
engine = "vllm"
engine_python = "/nonsense/python"
[[model]]
name = "m"
path = "{model}"
[[workload]]
name = "burst"
requests = 4
slo = ["ttft.p50<=1s"]
[[workload]]
name = "timed"
duration_s = 60
rate = 2
"""


def test_a_suite_tells_what_is_missing_before_its_first_run_and_in_its_dry_run(tmp_path, monkeypatch, capsys):
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    suite = tmp_path / "duel.toml"
    suite.write_text(ENGINES_OF_A_DUEL.format(model=model))
    monkeypatch.setattr(execution, "called", lambda *_: pytest.fail("a run was begun"))
    assert main(["run", str(suite), "--out", str(tmp_path / "runs")]) == 2
    assert "vllm: /nonsense/python does not run as a Python interpreter" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["run", str(suite), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "# cannot run here: vllm: /nonsense/python does not run" in told
    assert "# burst: 4 requests of 512 → 64 tokens, all at once, SLOs ttft.p50<=1s\n" in told
    assert "# ttft.p50<=1s may not be met in one run: p50 needs at least 11 requests, 4 are planned\n" in told
    assert (
        "# 4 runs: 2.0 min of load, and the starts; the load of 2 lasts until all replies are there" in told
    )


def test_a_dry_run_tells_which_models_are_made_and_makes_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = 'path = "made"\nlike = "reference"\nformat = "gguf"'
    Path("made.toml").write_text(ENGINES_OF_A_DUEL.replace('path = "{model}"', asked))
    assert main(["run", "made.toml", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "# made is made first: the shape of reference, random weights (gguf)\n" in told
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:8000", "--url 127.0.0.1:8000: it has no scheme; try --url http://127.0.0.1:8000"),
        ("localhost/v1", "it has no scheme; try --url http://localhost/v1"),
        ("nonsense", "expected something like http://127.0.0.1:8000"),
    ],
)
def test_a_url_without_a_scheme_is_told_with_one(url, told, capsys):
    assert main(["run", "--url", url]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions", "/v1/models"]
)
def test_a_url_may_end_in_a_path_of_the_api(path):
    assert target_at(f"http://h:8000/gateway{path}").url == "http://h:8000/gateway"


def test_nothing_at_a_url_leaves_no_run_and_one_cause(tmp_path, capsys):
    assert main(["run", "--url", "http://127.0.0.1:9", "--ready-s", "1", "--out", str(tmp_path)]) == 5
    told = capsys.readouterr().err
    assert "Expected a running" in told
    assert "--url http://127.0.0.1:9;" in told
    assert "Decoding" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_advice_to_search_with_an_slo_needs_no_load_to_begin_at(tmp_path, capsys):
    """A run advised `burstline limit` with --slo; that asked one request, and then for --rate."""
    words = ["--slo", "ttft.p90<=1s", "--budget-s", "10", "--output-tokens", "4", "--prompt-tokens", "16"]
    with truth_server(Script(ttft_s=0.1)) as server:
        assert main(["limit", "--url", server.url, *words, "--out", str(tmp_path)]) in (0, 4)
    told = capsys.readouterr()
    assert re.search(r"One request took 0.1\d* s: the search begins at \d\d requests per second", told.err)
    assert "The limit of " in told.out


@pytest.mark.parametrize(("key", "told"), [(None, "it wants a key"), ("k-1", "its key is wrong")])
def test_a_refused_key_names_its_variable(key, told):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = Target(f"http://127.0.0.1:{server.server_port}", "m", Secret(key) if key else None)
    try:
        with pytest.raises(EngineError, match=rf"{told}: export BURSTLINE_API_KEY="):
            wait_ready(ENGINES["openai"], None, target, timeout_s=5)
        with pytest.raises(EngineError, match=r"does not speak TLS .*try http:// instead"):
            send(replace(target, url=target.url.replace("http:", "https:")), Call("GET", "/", headers=()), 5)
    finally:
        server.shutdown()
        server.server_close()


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_error(401)

    do_GET = do_POST

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("argv", "told"),
    [(["serve"], "expected one engine"), (["serve", "truth", "--engine", "vllm"], "expected one engine"),
     (["serve", "--engine", "vlm"], "unknown engine 'vlm'; did you mean vllm?")],
)  # fmt: skip
def test_serve_takes_its_engine_as_the_other_verbs_do(argv, told, capsys):
    assert main(argv) == 2
    assert told in capsys.readouterr().err


def test_a_folder_of_runs_stands_for_its_runs(burst_run, tmp_path):
    for k in (1, 2):
        another(burst_run.path, tmp_path / "setting" / f"run-{k}", k)
    (tmp_path / "setting" / "page").mkdir()
    (tmp_path / "setting" / "page" / "comparison.json").write_text("{}")
    found = compare.runs_in(tmp_path / "setting")
    assert [path.name for path in found] == ["run-1", "run-2"]
    assert compare.runs_in(tmp_path / "setting" / "page") == []
    assert compare.runs_in(tmp_path) == found


def test_the_help_of_run_in_python_shows_every_option():
    told = burstline.run.__doc__ or ""
    for name in ("engine", "url", "max_num_seqs", "rate", "prompt_tokens", "slo", "device"):
        assert re.search(rf"^    {name}: .", told, re.MULTILINE), name


@pytest.mark.parametrize("verb", ["run", "serve", "limit"])
def test_the_engines_in_the_help_are_those_that_engines_lists(verb, capsys, monkeypatch):
    monkeypatch.setattr(engines, "engine_at", lambda _: None)
    monkeypatch.setattr(engines, "_installed", lambda _: "-")
    assert main(["engines"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    shown = re.search(r"or that of the server at --url: ([\w, -]+?)(?= --| options|$)", told)
    assert shown
    assert shown[1].split(", ") == listed == list(BUILT_IN)


def test_a_start_tells_each_state_once(monkeypatch):
    said: list[str] = []
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr(server_session.time, "monotonic", lambda: next(clock))
    told = server_session._every(10.0, 600.0, said.append)
    for waited_s, state in ((10, "reserved_cpus=[]"), (20, "reserved_cpus=[]"), (30, "warming up, 2 s")):
        told(waited_s, state)
    states = ["reserved_cpus=[]", "still starting", "warming up, 2 s"]
    assert said == [f"  {10 * k} s of at most 600: {state}" for k, state in enumerate(states, 1)]


def test_a_start_tells_how_long_the_last_one_took(tmp_path):
    """A newcomer who sees "warming up, 91 s" asks how long that usually lasts."""
    facts = [ServerFacts(ready_s=95.2, attached=False), ServerFacts(ready_s=0.1), ServerFacts()]
    for k, server in enumerate(facts):
        run = RunDir.create(tmp_path, Manifest(engine="vllm", workload=f"load{k}", server=server))
        run.path.rename(tmp_path / f"2026010{k}T000000Z-vllm-load-0000000{k}")
    (tmp_path / "20260109T000000Z-vllm-load-00000009").mkdir()
    ours = tmp_path / "20260110T000000Z-vllm-load-00000010"
    assert run_module._last_start(ours, "vllm") == ": the last start took 95.2 s"
    assert run_module._last_start(ours, "sglang") == ""


def test_devices_may_be_named_by_one_flag_or_by_a_flag_each(capsys):
    told = []
    for devices in (
        ["--device", "h100-sxm5-80g", "b200-sxm"],
        ["--device=h100-sxm5-80g", "--device=b200-sxm"],
    ):
        assert main(["bound", "--model", "llama-3.1-8b", *devices]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert "H100-SXM5-80G" in told[0]


def test_a_count_of_one_is_singular() -> None:
    assert [counted(n, "reply") for n in (0, 1, 2_000)] == ["0 replies", "1 reply", "2,000 replies"]
    assert [counted(n, "request") for n in (1, 2)] == ["1 request", "2 requests"]
