"""`--profile` of a run and of a report, and `bound --trace`."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from burstline.bench.requests_apart import check_profile, check_profiler
from burstline.bench.server_session import Site
from burstline.cli import main
from burstline.console.server_options import ServerOptions
from burstline.measure.record.rundir import open_run
from burstline.roofline.reconcile.reconciliation import NotReconciled, Profiled
from burstline.servers.host.ready import Startup
from burstline.servers.identity import Capabilities, Identity
from burstline.servers.messages import EngineError, Target
from burstline.servers.redact import Secret
from burstline.servers.registry import ENGINES
from burstline.workloads.request import WorkloadError
from tests.burstline.answering import answering
from tests.verdicts import done

RECORDED = "tests/golden/profile"
ON_CPU = ("--model", "reference", "--device", f"{RECORDED}/cpu.toml")


@pytest.fixture(scope="module")
def profiled_run(tmp_path_factory):
    """A run of the embedded engine with --profile, on a device that no machine of a test exceeds."""
    out, device = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("device") / "cpu.toml"
    fast = Path(f"{RECORDED}/cpu.toml").read_text().replace("1.0290e+11", "1.0290e+13")
    device.write_text(re.sub(r"(bytes_per_s = \S+e)\+10", r"\1+12", fast))
    load = "--requests 12 --concurrency 4 --prompt-tokens 64 --output-tokens 8"
    argv = ["run", "--engine", "reference", *load.split(), "--profile", "--device", str(device)]
    assert done(main([*argv, "--no-canary", "-q", "--out", str(out)]), out)
    (path,) = out.iterdir()
    return path


@pytest.mark.slow
def test_a_profiled_load_follows_the_load_and_is_in_none_of_its_figures(profiled_run):
    run = open_run(profiled_run)
    assert len(run.record_table.to_pandas()) == 12
    steps = pq.read_table(profiled_run / "steps.parquet").to_pydict()
    assert sum(steps["decode_tok"]) == 12 * 7
    kept = json.loads((profiled_run / "profile.json").read_text())["steps"]
    assert sum(step["prompts"]["n_tok"] for step in kept) == 12 * 64
    assert sum(step["decodes"]["n_tok"] for step in kept) == 12 * 7
    assert isinstance(run.summary.profile, Profiled)
    assert {phase.phase for phase in run.summary.profile.phases} == {"prefill", "decode"}
    page = (profiled_run / "report.html").read_text()
    assert "not the load that was sent" not in page
    assert "How long does each GEMM take?" in page
    assert "A step of decode, module by module" in page
    assert not (profiled_run / "counters").exists()


@pytest.mark.slow
def test_a_page_says_where_the_profiled_steps_are_not_the_load_that_was_sent(profiled_run):
    sent, kept = profiled_run / "profile_load.json", profiled_run / "profile.json"
    was = sent.read_bytes()
    requests = json.loads(was)
    assert [(one["prompt_tok"], one["output_tok"]) for one in requests] == [(64, 8)] * 12
    sent.write_text(json.dumps(requests[:-1]))
    kept.unlink()
    assert main(["report", str(profiled_run)]) == 0
    assert "not the load that was sent: step" in (profiled_run / "report.html").read_text()
    sent.write_bytes(was)
    kept.unlink()
    assert main(["report", str(profiled_run)]) == 0


@pytest.mark.slow
def test_a_report_takes_a_trace_and_keeps_what_it_read(profiled_run, capsys):
    argv = ["report", str(profiled_run), "--profile", f"{RECORDED}/reference.json.gz"]
    assert main(argv) == 0
    page = (profiled_run / "report.html").read_bytes()
    kept = json.loads((profiled_run / "profile.json").read_text())["steps"]
    assert [step["prompts"]["n_tok"] for step in kept][:2] == [512, 0]
    assert main(["report", str(profiled_run)]) == 0
    assert (profiled_run / "report.html").read_bytes() == page
    (profiled_run / "profile.json").write_text("{}")
    assert main(["report", str(profiled_run)]) == 0
    assert isinstance(open_run(profiled_run).summary.profile, NotReconciled)
    (profiled_run / "profile.json").unlink()
    assert main([*argv[:2], "--format", "json", "--profile", "x"]) == 2
    assert main([*argv[:3], "none.json"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_bound_compares_a_trace_with_a_device(capsys):
    argv = ["bound", "--trace", f"{RECORDED}/vllm.json.gz", *ON_CPU]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "Decode: " in text
    assert "8 × 1,376 × 256" in text
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--batch", "4"], "--batch would be ignored"),
        (["--device", "h100", "a100"], "--device with several names"),
    ],
)
def test_what_a_trace_would_ignore_is_refused(more, says, capsys):
    assert main(["bound", "--trace", f"{RECORDED}/vllm.json.gz", *ON_CPU, *more]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "where", "says"),
    [
        ("llamacpp", ServerOptions(profile=Path()), "has no profiler that a client can start"),
        ("vllm", ServerOptions(url=Secret.words("http://h:1"), profile=Path()), "--profile DIR"),
        ("vllm", ServerOptions(profile=Path("x")), "go to the run's folder"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_before_anything_starts(engine, where, says):
    with pytest.raises(WorkloadError, match=says):
        check_profile(ENGINES[engine], where)


def test_a_running_server_without_its_profiler_is_told_with_the_flag_that_it_needs():
    with answering(lambda path, body: (200, {"paths": {"/v1/completions": {}}})) as url:
        parts = Target(url, "m"), Identity("vllm"), None, None, Startup(0.1), Capabilities()
        with pytest.raises(EngineError, match="--profiler-config"):
            check_profiler(Site(ENGINES["vllm"], *parts))
