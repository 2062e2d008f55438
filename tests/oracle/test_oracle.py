"""The whole command against servers of known truth: every headline figure must be what they did."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import orjson
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from burstline import cli
from tests.oracle.draws import WORDS, Draw, draw
from tests.oracle.figures import EDGE_S, LATE_S, Truth, truth
from tests.seeds import SEED
from tests.truth.rig import TruthRig, truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import script_from
from tests.truth.serve import Served

pytestmark = pytest.mark.measures

N = int(os.environ.get("ORACLE_DRAWS", "40"))
"""New draws each time, each kind of load in turn; `make thorough` draws 300."""
KEPT = 0.93
"""The least share of the concurrency asked for that several drivers keep up, in the mean."""
TOKENIZER = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token=WORDS[0]))
TOKENIZER.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def fired(wanted: Draw, folder: Path) -> tuple[Path, list[Served], str]:
    """The run's folder, what its servers logged, and the command that repeats it."""
    scripts = tuple(script_from(row) for row in wanted.scripts)
    folder.mkdir(exist_ok=True)
    words = list(wanted.words)
    if wanted.arrival_times_s:
        times = folder / "times.txt"
        times.write_text("\n".join(f"{at:.4f}" for at in wanted.arrival_times_s))
        words += ["--arrival", f"file:{times}"]
    if wanted.rows:
        data = folder / "rows.jsonl"
        data.write_bytes(b"\n".join(map(orjson.dumps, wanted.rows)))
        words += ["--data", str(data)]
    if wanted.needs_tokenizer:
        TOKENIZER.save(str(folder / "tokenizer.json"))
        words += ["--tokenizer", str(folder)]
    setup = TruthSetup(prefix_cache=wanted.kind == "shared prefixes", bare_list=wanted.bare_list)
    with ExitStack() as stack:
        servers = [stack.enter_context(truth_server(scripts, setup=setup)) for _ in range(wanted.n_servers)]
        url = ",".join(server.url for server in servers)
        words = ["--url", url, "--engine", "truth", *words]
        quiet = ["-q", "--out", str(folder / "runs")]
        code = cli.main(["run", *quiet, *words])
        rows = [row for server in servers for row in server.log()]
    command = f"draw {wanted.seed} ({wanted.kind}): burstline run {shlex.join(words)}"
    assert code in (0, 3, 4), f"exit {code}; {command}"
    (run,) = (folder / "runs").iterdir()
    return run, rows, command


def disagreements(run: Path, rows: list[Served], wanted: Draw) -> list[str]:
    """Each figure of the page that the servers' logs contradict."""
    summary = orjson.loads((run / "summary.json").read_bytes())
    begins, ends = (summary["window"][name]["point"] for name in ("start_s", "end_s"))
    n_counted = summary["metrics"]["ttft"]["p50"].get("n", 0)
    page = (math.inf, math.inf) if begins is None else (begins, ends)
    found = truth(run, rows, page, n_counted, wanted.ttft_slo_s)
    found_wrong = [*_counts(summary, found), *_latencies(summary, found), *_rates(summary, found)]
    asked = dict(zip(wanted.words, wanted.words[1:], strict=False)).get("--concurrency")
    if wanted.kind == "closed workers" and found.rates["concurrency.mean"].high < KEPT * int(asked or 0):
        found_wrong.append(f"concurrency: {asked} asked, servers {found.rates['concurrency.mean']}")
    return found_wrong


def _counts(summary: dict, found: Truth) -> list[str]:
    printed = Counter({k: n for k, n in summary["counts"].items() if k != "planned" and n})
    return [] if printed == found.counts else [f"outcomes: page {printed}, servers {found.counts}"]


def _latencies(summary: dict, found: Truth) -> list[str]:
    wrong = []
    for name, value in found.latencies.items():
        metric, statistic = name.split(".")
        printed = summary["metrics"][metric][statistic]["point"]
        if math.isinf(value) or printed is None:
            if not (math.isinf(value) and printed is None):
                wrong.append(f"{name}: page {printed}, servers {value}")
        elif abs(printed - value) > LATE_S:
            wrong.append(f"{name}: page {printed:.6f}, servers {value:.6f}")
    return wrong


def _rates(summary: dict, found: Truth) -> list[str]:
    sections = {"good": "goodput"} | {name: name for name in ("concurrency", "sessions", "lengths")}
    wrong = []
    is_short = found.window.high - found.window.low < found.shortest_s
    for name, (low, high) in found.rates.items():
        section, _, own = name.rpartition(".")
        if section.startswith("turn "):
            of_turn = summary["sessions"]["by_turn"][int(section[5:]) - 1]
            figure = of_turn[own]["p50"] if own in ("ttft", "e2e") else of_turn[own]
        else:
            figure = summary[sections.get(section, "throughput")][own]
        printed = figure["point"] if isinstance(figure, dict) else figure
        slack = 1e-9 * max(1.0, high)
        if printed is None and is_short and own.endswith("_per_s"):
            continue
        if printed is None or not low - slack <= printed <= high + slack:
            wrong.append(f"{name}: page {printed}, servers {low:.6g} to {high:.6g}")
    for name, value in zip(("start_s", "end_s"), found.window, strict=True):
        printed = summary["window"][name]["point"]
        if abs(printed - value) > EDGE_S:
            wrong.append(f"window {name}: page {printed:.4f}, servers {value:.4f}")
    return wrong


@pytest.fixture(autouse=True)
def a_page_for_some_draws(request: pytest.FixtureRequest) -> None:
    """Of the draws, which run in this process, one has its page: no figure is read from it here."""
    call = getattr(request.node, "callspec", None)
    if call is not None and call.params["k"] != 0:
        request.getfixturevalue("without_page")


@pytest.mark.parametrize("k", range(N))
def test_the_page_says_what_the_servers_did(k: int, tmp_path: Path) -> None:
    wanted = draw(SEED + k)
    run, rows, command = fired(wanted, tmp_path)
    wrong = disagreements(run, rows, wanted)
    assert cli.main(["verify", str(run)]) == 0, command
    assert not wrong, "\n".join([command, *wrong])


ENDLESS = ("--rate", "40", "--requests", "400", "--prompt-tokens", "8", "--output-tokens", "4..20")
STEADY = script_from({"ttft_s": 0.08, "gaps_s": 0.01, "usage": "final"})


@contextmanager
def begun(folder: Path, server: TruthRig, n: int) -> Iterator[psutil.Popen]:
    """A run in a process of its own, once so many of its requests have come to the server."""
    words = ["run", "--url", server.url, "--engine", "truth", *ENDLESS, "--slo", "ttft<=1s"]
    quiet = ["-q", "--out", str(folder / "runs")]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with psutil.Popen([sys.executable, "-m", "burstline", *words, *quiet], **silent) as process:
        while sum(row.index is not None for row in server.log()) < n:
            time.sleep(0.05)
        yield process


def test_an_interrupted_run_says_what_the_servers_did_until_then(tmp_path: Path) -> None:
    with truth_server(STEADY) as server:
        with begun(tmp_path, server, 120) as process:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        rows = server.log()
    (run,) = (tmp_path / "runs").iterdir()
    wrong = disagreements(run, rows, replace(draw(0), ttft_slo_s=1.0))
    assert cli.main(["verify", str(run)]) == 0
    assert not wrong, "\n".join(wrong)


def test_a_killed_run_says_what_had_come_until_then(tmp_path: Path) -> None:
    """The load's own processes are killed too: what was in flight then has left no trace at the client."""
    with truth_server(STEADY) as server, begun(tmp_path, server, 120) as process:
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(60)
        rows = server.log()
    (run,) = (tmp_path / "runs").iterdir()
    assert cli.main(["report", str(run)]) == 0
    summary = orjson.loads((run / "summary.json").read_bytes())
    served = [row for row in rows if row.index is not None and "done" in row.event_kind]
    ok = summary["counts"]["ok"]
    assert ok <= len(served)
    assert (
        summary["counts"]["planned"]
        == 400
        == ok + summary["counts"].get("cancelled", 0) + summary["counts"]["not_sent"]
    )
    assert ok >= 0.5 * len(served), "the driver writes what has ended a few times a second"
    assert abs(summary["throughput"]["requests_per_s"]["point"] - 40) < 4
    assert abs(summary["metrics"]["ttft"]["p50"]["point"] - 0.08) < LATE_S
    assert "overloaded" not in {reason["code"] for reason in summary["verdict"]["reasons"]}
