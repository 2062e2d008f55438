"""`burstline run --repeats`: one page over the runs, intervals between them."""

import argparse
import json
import shlex
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from burstline.bench import repeats
from burstline.bench.run import Ended
from burstline.bench.run_settings import manifest_of
from burstline.cli import main
from burstline.console import exit_codes
from burstline.console.flags import read_options
from burstline.console.server_options import ServerOptions
from burstline.measure.record.manifest import RunClock
from burstline.measure.record.rundir import open_run
from burstline.servers.registry import ENGINES
from burstline.verbs.arguments import add_arguments
from burstline.workloads.load import load_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec
from tests.truth.rig import truth_server
from tests.truth.script import Script

LOAD = ("--requests", "12", "--prompt-tokens", "8", "--output-tokens", "4", "-q")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(url, out, *flags):
    return main(["run", "--engine", "truth", "--url", url, "--out", str(out), *LOAD, *flags])


@pytest.mark.slow
@pytest.mark.measures
def test_three_repeats_give_intervals_between_runs(tmp_path, capsys):
    with truth_server(Script(ttft_s=0.1, gaps_s=(0.01,))) as server:
        code = run(server.url, tmp_path / "runs", "--repeats", "3", "--slo", "ttft.p50<=130ms")
        said = capsys.readouterr().out
    assert "Report over 3 repeats" in said
    # Each run alone cannot tell: 30% is no factor of two.
    assert "inconclusive" in said
    assert code == 0
    assert "pass: ttft.p50<=130ms, 100" in said.rpartition("Report: ")[2]
    folders = sorted(path for path in (tmp_path / "runs").iterdir() if not path.name.endswith("-repeats"))
    runs = [open_run(path) for path in folders]
    assert len({each.manifest.asked.salt for each in runs}) == 3, "no repeat shares a prefix with another"
    (over,) = (tmp_path / "runs").glob("*-repeats")
    (cell,) = json.loads((over / "comparison.json").read_text())["cells"]
    p50 = cell["numbers"]["TTFT p50"]["truth"]
    assert p50["low"] < p50["point"] < p50["high"]
    assert "between runs" in p50["note"]


@pytest.mark.slow
def test_the_server_starts_again_after_so_many_repeats(tmp_path):
    out = tmp_path / "runs"
    flags = ("--repeats", "6", "--restart", "2", "--out", str(out))
    main(["run", "--engine", "truth", *LOAD, *flags])
    runs = [open_run(path) for path in sorted(out.iterdir()) if not path.name.endswith("-repeats")]
    starts = [(run.manifest.server.url, run.manifest.server.ready_s) for run in runs]
    assert [starts.index(start) for start in starts] == [0, 0, 2, 2, 4, 4]


@pytest.mark.slow
def test_two_repeats_are_pooled_without_an_interval(tmp_path, capsys):
    with truth_server(Script(ttft_s=0.05, gaps_s=(0.01,))) as server:
        run(server.url, tmp_path / "runs", "--repeats", "2")
    (over,) = (tmp_path / "runs").glob("*-repeats")
    (cell,) = json.loads((over / "comparison.json").read_text())["cells"]
    assert cell["numbers"]["TTFT p50"]["truth"]["low"] is None


@pytest.mark.usefixtures("without_page")
def test_repeats_are_those_of_this_command_whatever_else_is_written_beside_them(
    burst_run, tmp_path, monkeypatch, capsys
):
    def carry_out(settings, *_, **__):
        for name in (f"ours-{settings.load.spec.salt}", f"of-another-command-{settings.load.spec.salt}"):
            shutil.copytree(burst_run.path, tmp_path / "runs" / name)
        ours = open_run(tmp_path / "runs" / f"ours-{settings.load.spec.salt}")
        clock = RunClock(int(settings.load.spec.salt, 16), 0, "2026-11-30T00:00:00+00:00")
        ours.save_manifest(replace(ours.manifest, clock=clock))
        return Ended(ours, ours.summary, 0)

    monkeypatch.setattr(repeats, "carry_out", carry_out)
    assert run("http://127.0.0.1:9", tmp_path / "runs", "--repeats", "2", "--salt", "7") == 0
    assert "Report over 2 repeats" in capsys.readouterr().out
    (over,) = (tmp_path / "runs").glob("*-repeats")
    (cell,) = json.loads((over / "comparison.json").read_text())["cells"]
    assert {name for names in cell["runs"].values() for name in names} == {"ours-7", "ours-8"}


def asked_by(words):
    """The load that a command of `burstline run` asks for."""
    parser = argparse.ArgumentParser()
    add_arguments("run", parser)
    return read_options(LoadSpec, parser.parse_args(words[2:]))


@pytest.mark.parametrize("flags", ["--repeats 2", "--rate 5,20", "--rate 5,20 --repeats 2"])
def test_the_command_of_each_run_sends_the_prompts_of_that_run(flags, tmp_path, monkeypatch):
    """Its salt is its own: with that of another run, or without a zero in front, prompts differ."""
    each = []

    def carry_out(settings, *_, **__):
        each.append(settings)
        return Ended(SimpleNamespace(path=tmp_path), None, exit_codes.DONE)

    def no_page(_):
        raise WorkloadError("no run was made that a page could be over")

    monkeypatch.setattr(repeats, "carry_out", carry_out)
    monkeypatch.setattr(repeats, "open_run", no_page)
    out = tmp_path / "runs"
    assert run("http://127.0.0.1:9", out, "--salt", "0f8c", "--no-canary", *flags.split()) == exit_codes.USAGE
    assert len({settings.load.spec.salt for settings in each}) == len(each) > 1
    assert each[0].load.spec.salt == "0f8c"
    for settings in each:
        manifest = manifest_of(settings, settings.load, ENGINES["truth"])
        words = shlex.split(manifest.repeat)
        assert asked_by(words) == settings.load.spec
        assert "--no-canary" in words
        assert not {"--repeats", "5,20"} & {*words}


def test_a_server_has_room_for_each_of_its_loads_and_keeps_it():
    small, large = (load_of(LoadSpec(salt="0", concurrency=n, prompt_tokens=str(n))) for n in (8, 96))
    room = ServerOptions().with_room_for(small, large)
    assert (room.n_concurrent, room.n_request_tok) == (96, 96 + 64)
    assert room.with_room_for(small) == room
    assert ServerOptions().with_room_for(small, least=64).n_concurrent == 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--repeats", "1"), "2 to 1000"),
        (("--restart",), "--repeats N"),
        (("--repeats", "3", "--restart"), "was not started by Burstline"),
    ],
)
def test_repeats_that_make_no_sense_are_refused(flags, words, tmp_path, capsys):
    assert run("http://127.0.0.1:9", tmp_path / "runs", *flags) == 2
    assert words in capsys.readouterr().err
