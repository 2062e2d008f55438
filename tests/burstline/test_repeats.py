"""`burstline run --repeats`: one page over the runs, intervals between them, noise for later runs."""

import json
import re

import pytest

from burstline.bench import noise
from burstline.cli import main
from burstline.loadgen.record.manifest import Manifest, ServerFacts
from burstline.loadgen.record.rundir import open_run
from burstline.servers.identity import Identity
from tests.truth.rig import truth_server
from tests.truth.script import Script

LOAD = ("--requests", "12", "--prompt-tokens", "8", "--output-tokens", "4", "-q")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(url, out, *flags):
    return main(["run", "--engine", "truth", "--url", url, "--out", str(out), *LOAD, *flags])


@pytest.mark.slow
def test_three_repeats_give_intervals_between_runs_and_noise_for_a_later_single_run(tmp_path, capsys):
    with truth_server(Script(ttft_s=0.1, gaps_s=(0.01,))) as server:
        code = run(server.url, tmp_path / "runs", "--repeats", "3", "--slo", "ttft.p50<=130ms")
        said = capsys.readouterr().out
        run(server.url, tmp_path / "single", "--slo", "ttft.p50<=130ms")
    assert "Report over 3 repeats" in said
    # Each run alone cannot tell: 30% is no factor of two.
    assert "inconclusive" in said
    assert code == 0
    assert "pass: ttft.p50<=130ms over 3 runs: the whole interval meets it" in said
    folders = sorted(path for path in (tmp_path / "runs").iterdir() if not path.name.endswith("-repeats"))
    runs = [open_run(path) for path in folders]
    assert len({each.manifest.salt for each in runs}) == 3, "no repeat shares a prefix with another"
    (over,) = (tmp_path / "runs").glob("*-repeats")
    (cell,) = json.loads((over / "comparison.json").read_text())["cells"]
    p50 = cell["numbers"]["TTFT p50"]["truth"]
    assert p50["low"] < p50["point"] < p50["high"]
    assert "between runs" in p50["note"]
    (single,) = (tmp_path / "single").iterdir()
    alone = open_run(single)
    assert alone.manifest.noise == noise.known_for(alone.manifest)
    assert alone.manifest.noise["ttft.p50"].n_runs == 3
    reason = alone.summary.targets[0].reason
    # On a machine busy with other work the grade of the metric comes first.
    assert "A/A noise of 3 runs" in reason or "the client read too late" in reason


@pytest.mark.slow
def test_the_spread_over_fresh_starts_stands_beside_the_spread_over_repeats_of_one_start(tmp_path, capsys):
    out = tmp_path / "runs"
    flags = ("--repeats", "6", "--restart", "2", "--out", str(out))
    main(["run", "--engine", "truth", *LOAD, *flags, "--", "--script", '{"ttft_s": 0.05}'])
    said = capsys.readouterr().out
    runs = [open_run(path) for path in sorted(out.iterdir()) if not path.name.endswith("-repeats")]
    starts = [run.manifest.server.start for run in runs]
    assert [starts.index(start) for start in starts] == [0, 0, 2, 2, 4, 4]
    print(said)
    assert "Spread between runs" in said
    assert "Over fresh starts" in said
    assert "Over repeats of one start" in said
    # The page leaves out a run that the machine disturbed; the stored noise counts all six.
    spread = r"TTFT p50 .* \d starts .* (\d repeats|noise of repeats needs 3 runs of one start)"
    assert any(re.search(spread, line) for line in said.splitlines())
    fresh, repeated = (noise._stored(runs[0].manifest, kind)["ttft.p50"] for kind in ("starts", "repeats"))
    assert (fresh.n_runs, repeated.n_runs) == (3, 4)
    assert noise.known_for(runs[0].manifest)["ttft.p50"] == fresh


@pytest.mark.slow
def test_two_repeats_are_pooled_without_an_interval_and_leave_no_noise(tmp_path, capsys):
    with truth_server(Script(ttft_s=0.05, gaps_s=(0.01,))) as server:
        run(server.url, tmp_path / "runs", "--repeats", "2")
    (over,) = (tmp_path / "runs").glob("*-repeats")
    (cell,) = json.loads((over / "comparison.json").read_text())["cells"]
    assert cell["numbers"]["TTFT p50"]["truth"]["low"] is None
    assert not (tmp_path / "cache" / "burstline" / "noise").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--repeats", "1"), "2 to 1000"),
        (("--restart",), "--repeats N"),
        (("--repeats", "3", "--restart"), "was not started here"),
    ],
)
def test_repeats_that_make_no_sense_are_refused(flags, words, tmp_path, capsys):
    assert run("http://127.0.0.1:9", tmp_path / "runs", *flags) == 2
    assert words in capsys.readouterr().err


def test_stored_noise_is_of_one_system_with_all_its_settings():
    def stored_at(*flags: str, model: str = "m", port: str = "1", **identity):
        server = ServerFacts(model=model, attached=False, argv=("vllm", *flags, "--port", port))
        made = Manifest(engine="vllm", workload="x", server=server, identity=Identity("vllm", **identity))
        return noise._kept_at(made, "starts")

    assert stored_at("--max-num-seqs", "8") == stored_at("--max-num-seqs", "8", port="2")
    others = [
        stored_at(),
        stored_at("-tp", "2"),
        stored_at("-q", "awq"),
        stored_at("--block-size", "32"),
        stored_at(model="other"),
        stored_at(version="2"),
        stored_at(prefix_cache=False),
    ]
    assert len(set(others)) == len(others)
