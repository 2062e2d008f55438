"""Every source of a load at a real vLLM: it counts what was planned, and its cache serves what was planned.

`BURSTLINE_ROWS=500` (the default is 40) says how many rows of each format, and four times as many requests
of the Mooncake trace.
"""

import os
from pathlib import Path

import pytest

from burstline.cli import main
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.summarize import summarize_run
from tests.servers.lives import of
from tests.verdicts import done
from tests.workloads import made_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
N_ROWS = int(os.environ.get("BURSTLINE_ROWS", "40"))
N_MOONCAKE = 4 * N_ROWS


@pytest.fixture(params=[of("vllm")])
def url(request, lives) -> str:
    return lives(request.param).url


@pytest.fixture
def folder(lives) -> Path:
    return lives.model


def ran(url: str, folder: Path, out: Path, *load: str) -> Run:
    """The run of such a load at the server."""
    where = ["--engine", "vllm", "--url", url, "--tokenizer", str(folder), "--out", str(out)]
    code = main(["run", "-q", *where, *map(str, load)])
    assert done(code, out)
    (path,) = out.iterdir()
    return open_run(path)


def served_from_cache(run: Run) -> float:
    """The share of prompt tokens that came from vLLM's prefix cache, by its own counters."""
    watched = run.watched.over(float(run.columns.closed_s.max()))
    hits, asked = (watched.grown("engine", name, "tok") for name in ("prefix_hit_tokens", "prompt_tokens"))
    return hits.point / asked.point


@pytest.mark.parametrize("name", [*made_files.DATA, *made_files.TRACES])
def test_vllm_counts_what_was_planned_in_every_row(name, url, folder, tmp_path):
    if name == "datasets":
        pytest.importorskip("datasets")
    if name in made_files.DATA:
        load = ("--data", made_files.DATA[name](tmp_path, N_ROWS), "--output-tokens", "3")
    else:
        load = ("--trace", f"{made_files.TRACES[name](tmp_path, N_ROWS)},speed=4")
    records = ran(url, folder, tmp_path / "runs", *load).records
    assert len(records) == N_ROWS
    assert (records["outcome"] == "ok").all()
    assert set(records["prompt_source"]) == {"usage"}, "the server's own count"
    assert (records["prompt_tok"] == records["planned_prompt_tok"]).all()


@pytest.mark.parametrize("hit", [0.0, 0.3, 0.6, 0.9])
def test_vllms_cache_serves_the_planned_share_within_a_point(hit, url, folder, tmp_path):
    load = ["--requests", "32", "--prompt-tokens", "1900", "--output-tokens", "2", "--concurrency", "4"]
    run = ran(
        url, folder, tmp_path / "runs", *load, "--shared-prefix", f"{hit:.0%}", "--seed", str(round(10 * hit))
    )
    planned, served = run.manifest.load.expected_cached_fraction or 0.0, served_from_cache(run)
    print(f"\n--shared-prefix {hit:.0%}: planned {planned:.4f}, served {served:.4f}")
    assert planned == pytest.approx(hit, abs=0.01)
    assert served == pytest.approx(hit, abs=0.01)
    codes = {warning.code for warning in summarize_run(run).verdict.warnings}
    assert not codes & {"prefix-more", "prefix-less", "prefix-unknown", "prefix-cache"}


def test_a_mooncake_traces_hits_at_vllm_are_those_of_an_infinite_cache(url, folder, tmp_path):
    trace = made_files.mooncake(tmp_path, N_MOONCAKE, gap_s=0.1)
    load = ("--trace", f"{trace},speed=2", "--seed", "77", "--salt", "30")
    run = ran(url, folder, tmp_path / "runs", *load)
    planned, served = run.manifest.load.expected_cached_fraction, served_from_cache(run)
    print(f"\n{N_MOONCAKE} requests of a Mooncake trace: planned {planned:.4f}, served {served:.4f}")
    assert planned > 0.2
    assert served == pytest.approx(planned, abs=0.02)
