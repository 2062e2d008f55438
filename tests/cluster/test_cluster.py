"""A real Ray cluster in namespaces of this machine: one burst from three nodes, faults, a suite.

Needs root, iproute2, time namespaces and Ray; skipped elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from burstline.loadgen.capture.capture import Reads, read_captures
from burstline.loadgen.driver.job import NAMES
from burstline.measure.record.rundir import open_run
from tests import verdicts
from tests.bench.wire import build
from tests.cluster.lab import SHIFT_S, Lab, can_make_namespaces, lab, sh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="no root, no namespaces or no Ray here"),
    pytest.mark.timeout(600),
]
LATE_MS = 5.0
N_TOKENS = 32
RAY = ("--ray", "10.97.0.1:6380")
QUIET = ("-q",)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three raylets: the head, one whose sending is 5 ms late, one whose clock is 1,000 s ahead."""
    folder = Path("/tmp") / f"bl-ray-{os.getpid()}"  # Ray's socket paths must be short
    folder.mkdir()
    with lab(folder, late_ms={1: LATE_MS}) as made:
        for k, host in enumerate(made.hosts):
            start(made, k, host)
        yield made
    shutil.rmtree(folder, ignore_errors=True)


def start(made: Lab, k: int, host: str, n_nodes: int | None = None) -> None:
    made.start_raylet(host, {f"place{k}": 4, "client": 1}, shifted=k == 2)
    made.wait_for_nodes(n_nodes or k + 1)


class Truth:
    """The truth server in C, on a host's address."""

    def __init__(self, made: Lab, folder: Path, ttft_ms: float, gap_ms: float, host: int = 0) -> None:
        self.log_path = folder / "truth.log"
        argv = [build("truth"), "0", str(N_TOKENS), str(int(ttft_ms * 1000)), str(int(gap_ms * 1000))]
        self._process = subprocess.Popen(
            made.command(made.hosts[host], [*argv, str(self.log_path), "64", made.address(made.hosts[host])]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = f"http://{made.address(made.hosts[host])}:{self._process.stdout.readline().strip()}"

    def log(self) -> np.ndarray:
        """A row per request, ns: first byte, arrived whole, n events, then when each event was written."""
        self._process.communicate(timeout=30)
        return np.fromfile(self.log_path, dtype=np.int64).reshape(-1, 3 + N_TOKENS)


def burst(made: Lab, url: str, out: Path, *argv: str, n: int = 900) -> list[str]:
    load = ("--requests", str(n), "--prompt-tokens", "64", "--output-tokens", str(N_TOKENS))
    where = ("--url", url, "--engine", "vllm", "--vocab-size", "1000")
    words = [sys.executable, "-m", "burstline", "run", *where, *load, *RAY, "--out", str(out), *QUIET, *argv]
    return made.command(made.hosts[0], words)


def finished(made: Lab, argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, env=made.env(), timeout=180, check=False)


def only_run(out: Path):
    (folder,) = (path for path in out.iterdir() if (path / "manifest.json").exists())
    return open_run(folder)


@pytest.mark.measures
def test_one_burst_from_three_nodes_with_one_clock(cluster, tmp_path):
    truth = Truth(cluster, tmp_path, ttft_ms=300, gap_ms=20)
    out = tmp_path / "runs"
    done = subprocess.run(
        burst(cluster, truth.url, out, "--workers", "3"),
        capture_output=True,
        text=True,
        env=cluster.env(),
        check=False,
    )
    log = truth.log()[1:]  # the first row asks whether the server is ready
    assert verdicts.done(done.returncode, tmp_path / "runs"), done.stderr
    run = only_run(out)
    records = run.record_table.to_pandas()
    assert len(records) == 900
    assert (records["outcome"] == "ok").all(), Counter(records["outcome"])
    assert len(log) == 900

    drivers = run.manifest.drivers
    shifts = sorted((driver.clock.before for driver in drivers), key=lambda offset: offset.ns)
    for offset, true_ns in zip(shifts, (0, 0, SHIFT_S * 10**9), strict=True):
        assert abs(offset.ns - true_ns) <= offset.bound_ns, offset
    canaries = [driver.canary for driver in drivers]
    assert all(canary is not None and canary.n > 10 for canary in canaries), canaries
    bound_ns = max(driver.clock.bound_ns for driver in drivers)
    assert bound_ns >= 1e6 * LATE_MS / 2 * 0.99, "a link that is late one way must widen the bound"

    late_worker = next(k for k, driver in enumerate(drivers) if driver.clock.before.bound_ns > 2e6)
    reported_ms, true_ms = ttfts(run, lambda index: index % 3 != late_worker)
    spread_ms = np.ptp(records["sent_ns"]) / 1e6
    true_spread_ms = np.ptp(log[:, 1]) / 1e6
    print(f"\nclock bounds, us: {[round(driver.clock.bound_ns / 1e3, 1) for driver in drivers]}")
    for p in (50, 99):
        reported, true = np.percentile(reported_ms, p), np.percentile(true_ms, p)
        print(f"TTFT p{p} of both undelayed workers: reported {reported:.3f}, true {true:.3f} ms")
        assert abs(reported - true) <= 1.0
    delayed_ms, undelayed_ms = ttfts(run, lambda index: index % 3 == late_worker)
    share_ms = np.median(delayed_ms - undelayed_ms)
    print(f"TTFT of the late link's worker: network share {share_ms:.2f} ms, of which the link {LATE_MS}")
    assert share_ms >= LATE_MS - 0.5
    print(f"spread: sent {spread_ms:.2f}, arrived {true_spread_ms:.2f} ms, bound {bound_ns / 1e6:.2f} ms")
    assert abs(spread_ms - true_spread_ms) <= bound_ns / 1e6 + LATE_MS + 1.0


STAMPS = re.compile(rb'"t":(\d+),"a":(\d+)')


def ttfts(run, chosen) -> tuple[np.ndarray, np.ndarray]:
    """TTFT in ms of the chosen requests, as recorded and as each first event tells by the server's clock."""
    records = run.record_table.to_pandas()
    first = {i: ns[0] for i, ns in zip(records["index"], records["token_ns"], strict=True)}
    rows = [
        ((first[c.index] - c.sent_ns) / 1e6, (int(told[1]) - int(told[2])) / 1e6)
        for c in read_captures(run.path / "captures")
        if chosen(c.index) and (told := STAMPS.search(Reads.of(c.reads).data))
    ]
    return tuple(np.array(rows).T)


def interrupted(made: Lab, argv: list[str], after_s: float, what) -> tuple[int, float, str]:
    """Start, wait for the load, do `what`; exit code, seconds until the end, what was printed."""
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=made.env(),
        start_new_session=True,
    )
    out = Path(argv[argv.index("--out") + 1])
    end = time.monotonic() + 90
    while not list(out.glob("*/counters")) or not any(_sent(path) for path in out.glob("*/counters")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(after_s)
    began = time.monotonic()
    what(process)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, time.monotonic() - began, printed


def _sent(path: Path) -> bool:
    try:
        return bool(np.fromfile(path, dtype=np.int64)[NAMES.index("sent") :: len(NAMES)].sum())
    except OSError:
        return False


def pids(made: Lab, pattern: str) -> list[int]:
    """Processes of the cluster, not of other work on this machine."""
    done = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split() if int(pid) in made.pids()]


LONG = ("--arrival", "constant", "--rate", "30", "--duration-s", "8")


def long_run(made: Lab, url: str, out: Path) -> list[str]:
    words = burst(made, url, out, "--workers", "3", *LONG)
    at = words.index("--requests")
    return words[:at] + words[at + 2 :]


def kill_one(made: Lab, pattern: str):
    def kill(_: object) -> None:
        os.kill(pids(made, pattern)[0], signal.SIGKILL)

    return kill


@pytest.mark.parametrize("victim", ["burstline.loadgen.driver.drive", "burstline.cluster.agent"])
@pytest.mark.measures
def test_a_worker_that_is_killed_ends_as_outcomes(cluster, tmp_path, victim):
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20)
    argv = long_run(cluster, truth.url, tmp_path / "runs")
    argv.remove("-q")
    code, took_s, printed = interrupted(cluster, argv, 3.0, kill_one(cluster, victim))
    n_served = len(truth.log()) - 1
    outcomes = Counter(only_run(tmp_path / "runs").records["outcome"])
    print(f"\n{victim} killed: exit {code}, {took_s:.1f} s, {dict(outcomes)}, {n_served} served")
    assert sum(outcomes.values()) == 240
    assert outcomes["driver_lost"] > 0
    # What its share had ended in 3 s is home: 30, less what was in flight (0.84 s each) and the last tail.
    assert outcomes["ok"] >= 160 + 0.9 * (30 - 8.4 - 2.5)
    assert code == 4, printed
    assert "is lost" in printed.split("Decoding")[0], "said while the load runs"
    assert took_s < 6 + 10 + 6  # what was left of the load, the limit, the report
    assert not pids(cluster, "burstline.loadgen.driver.drive")


def test_ray_may_fail_once_the_agents_are_placed(cluster, tmp_path):
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20)
    argv = long_run(cluster, truth.url, tmp_path / "runs")
    code, _, printed = interrupted(cluster, argv, 2.0, kill_one(cluster, "ray::hold_agent"))
    truth.log()
    outcomes = Counter(only_run(tmp_path / "runs").records["outcome"])
    assert outcomes == {"ok": 240}, printed
    assert verdicts.done(code, tmp_path / "runs"), printed


@pytest.mark.measures
def test_a_node_that_no_longer_reaches_home_stops_its_load(cluster, tmp_path):
    """The way back alone is cut: the node still hears us, and its load still reaches the server."""
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20, host=1)
    argv = long_run(cluster, truth.url, tmp_path / "runs")
    argv[argv.index("--duration-s") + 1] = "14"
    cut_ns = []

    def cut(_: object) -> None:
        cut_ns.append(time.monotonic_ns())
        sh(f"ip -n {cluster.hosts[2]} route add blackhole {cluster.address(cluster.hosts[0])}/32")

    try:
        code, took_s, printed = interrupted(cluster, argv, 2.0, cut)
    finally:
        sh(f"ip -n {cluster.hosts[2]} route del blackhole {cluster.address(cluster.hosts[0])}/32")
    arrived_s = (truth.log()[:, 0] - cut_ns[0]) / 1e9
    late = int(((arrived_s > 5) & (arrived_s < 9)).sum())
    outcomes = Counter(only_run(tmp_path / "runs").records["outcome"])
    print(f"\nway home cut: exit {code}, {took_s:.1f} s, {dict(outcomes)}; {late} arrivals from 5 to 9 s")
    assert sum(outcomes.values()) == 420
    assert outcomes["driver_lost"] > 0
    assert min(abs(late - 80), abs(late - 40)) <= 4, "30 a second, less those of one or two workers"
    assert code == 4, printed


@pytest.mark.measures
def test_a_node_that_comes_back_hands_over_what_it_had_captured(cluster, tmp_path):
    """The way back is away for 5 s; meanwhile the node's load reaches the server, until it stops itself."""
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20, host=1)
    argv = long_run(cluster, truth.url, tmp_path / "runs")
    route = f"route {{}} blackhole {cluster.address(cluster.hosts[0])}/32"

    def cut(_: object) -> None:
        sh(f"ip -n {cluster.hosts[2]} {route.format('add')}")
        time.sleep(5)
        sh(f"ip -n {cluster.hosts[2]} {route.format('del')}")

    code, took_s, printed = interrupted(cluster, argv, 2.0, cut)
    n_served = len(truth.log()) - 1
    outcomes = Counter(only_run(tmp_path / "runs").records["outcome"])
    print(f"\nway home away for 5 s: exit {code}, {took_s:.1f} s, {dict(outcomes)}, {n_served} served")
    assert sum(outcomes.values()) == 240
    assert set(outcomes) == {"ok", "driver_lost"}
    # What was in flight when it stopped itself: 0.84 s of 10 or 20 a second.
    assert n_served - 20 <= outcomes["ok"] <= n_served
    assert code == 4, printed
    assert "did not answer for 3 s" in printed
    assert not pids(cluster, "burstline.cluster.agent")
    assert not pids(cluster, "burstline.loadgen.driver.drive")


@pytest.mark.measures
def test_ctrl_c_stops_every_worker_and_leaves_the_report(cluster, tmp_path):
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20)
    argv = long_run(cluster, truth.url, tmp_path / "runs")
    code, took_s, printed = interrupted(
        cluster, argv, 2.0, lambda process: os.killpg(process.pid, signal.SIGINT)
    )
    truth.log()
    run = only_run(tmp_path / "runs")
    outcomes = Counter(run.record_table.to_pandas()["outcome"])
    print(f"\nCtrl-C: exit {code}, {took_s:.1f} s, {dict(outcomes)}")
    assert code == 130, printed
    assert sum(outcomes.values()) == 240
    assert (run.path / "report.html").exists()
    assert took_s < 15
    assert not pids(cluster, "burstline.loadgen.driver.drive")
    assert not pids(cluster, "burstline.cluster.agent")


@pytest.mark.measures
def test_ctrl_c_is_heard_at_any_moment(cluster, tmp_path):
    """While Ray is imported, connects and places, and while drivers start.

    Not before: a busy machine may take a second until the first line of ours has run.
    """
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20)
    took = []
    for k, after_s in enumerate((1.5, 2.0, 2.5, 3.5, 4.5, 6.0)):
        argv = long_run(cluster, truth.url, tmp_path / str(k))
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=cluster.env()
        )
        time.sleep(after_s)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        took.append(round(time.monotonic() - began, 1))
        assert process.returncode == 130, printed
        assert "Traceback" not in printed
    print(f"\nCtrl-C at six moments: ended after {took} s")
    truth.log()
    assert max(took) < 10
    assert not pids(cluster, "burstline.loadgen.driver.drive")
    assert not pids(cluster, "burstline.cluster.agent")


def test_workers_auto_are_one_on_each_node_and_each_machine_is_on_the_page(cluster, tmp_path):
    truth = Truth(cluster, tmp_path, ttft_ms=20, gap_ms=2)
    done = finished(cluster, burst(cluster, truth.url, tmp_path / "runs", "--workers", "auto", n=90))
    truth.log()
    assert verdicts.done(done.returncode, tmp_path / "runs"), done.stderr
    run = only_run(tmp_path / "runs")
    assert [driver.n_sent for driver in run.manifest.drivers] == [30, 30, 30]
    for driver in run.manifest.drivers:
        assert driver.machine is not None
        assert 0 <= driver.machine.others_fraction <= driver.machine.busy_fraction <= 1.05
    page = (run.path / "report.html").read_text()
    assert "The machines of the load" in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--workers", "40"), "the cluster has no room for 40 workers"),
        (("--workers", "1", "--ray", f"{RAY[1]},tpu=1"), "the cluster has no room for 1 workers"),
        (("--workers", "1", "--ray", f"{RAY[1]},tpu"), "expected ADDRESS,NAME=NUMBER"),
    ],
)
def test_a_cluster_that_cannot_do_it_is_one_line(cluster, tmp_path, flags, said):
    truth = Truth(cluster, tmp_path, ttft_ms=20, gap_ms=2)
    done = subprocess.run(
        burst(cluster, truth.url, tmp_path / "runs", *flags, n=40),
        capture_output=True,
        text=True,
        env=cluster.env(),
        check=False,
    )
    truth.log()
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("burstline:")]) == 1


def test_a_server_that_a_worker_cannot_reach_is_told_before_anything_is_sent(cluster, tmp_path):
    here = subprocess.Popen(
        cluster.command(cluster.hosts[0], [build("truth"), "8177", "4", "20000", "2000"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    argv = burst(cluster, "http://127.0.0.1:8177", tmp_path / "runs", "--workers", "3", n=9)
    done = finished(cluster, argv)
    here.communicate()
    assert done.returncode == 5, done.stdout + done.stderr
    assert "cannot reach http://127.0.0.1:8177" in done.stderr


SUITE = """
name = "two-platforms"
[[platform]]
name = "one"
resources = { place1 = 1 }
[[platform]]
name = "two"
resources = { place2 = 1 }
[[engine]]
engine = "reference"
[[workload]]
name = "small"
requests = 20
prompt_tokens = 16
output_tokens = 4
"""


def test_a_suite_of_two_platforms_runs_side_by_side_and_only_once(cluster, tmp_path):
    suite = tmp_path / "two.toml"
    suite.write_text(SUITE)
    argv = [
        sys.executable,
        "-m",
        "burstline",
        "run",
        str(suite),
        *RAY,
        "--out",
        str(tmp_path / "out"),
    ]
    first = cluster.run(cluster.hosts[0], argv, timeout_s=300)
    assert verdicts.done(first.returncode, tmp_path / "out"), first.stdout + first.stderr
    (folder,) = (tmp_path / "out").iterdir()
    runs = sorted(folder.glob("*/*/manifest.json"))
    assert len(runs) == 2
    assert (folder / "report.html").exists()
    before = [path.stat().st_mtime_ns for path in runs]
    again = cluster.run(cluster.hosts[0], argv, timeout_s=120)
    assert again.stderr.count("done before") == 2
    assert [path.stat().st_mtime_ns for path in runs] == before


@pytest.mark.measures
@pytest.mark.parametrize("n_workers", [3, 2, 1])
def test_a_rate_adds_up_over_nodes_and_its_union_is_poisson(cluster, tmp_path, n_workers):
    truth = Truth(cluster, tmp_path, ttft_ms=20, gap_ms=1)
    argv = burst(cluster, truth.url, tmp_path / "runs", "--workers", str(n_workers), n=600)
    done = finished(cluster, [*argv, "--arrival", "poisson", "--rate", "100"])
    arrived_s = np.sort(truth.log()[1:, 0]) / 1e9
    assert verdicts.done(done.returncode, tmp_path / "runs"), done.stderr
    run = only_run(tmp_path / "runs")
    assert len(arrived_s) == 600
    due_s = np.sort(run.record_table.to_pandas()["due_ns"].to_numpy()) / 1e9
    gaps_s = np.diff(due_s)
    law = stats.kstest(gaps_s, "expon", args=(0, gaps_s.mean()))
    true, planned = (len(gaps_s) / np.ptp(times_s) for times_s in (arrived_s, due_s))
    print(f"\n{n_workers} nodes: {true:.1f}/s of {planned:.1f}/s; exponential gaps: p {law.pvalue:.2f}")
    assert true == pytest.approx(planned, rel=0.02)
    assert law.pvalue > 0.01


def test_sessions_over_two_nodes_keep_their_order(cluster, tmp_path):
    host = cluster.hosts[0]
    url = f"http://{cluster.address(host)}:8178"
    argv = burst(cluster, url, tmp_path / "runs", "--workers", "2", "--sessions", "8", "--turns", "3")
    at = argv.index("--requests")
    del argv[at : at + 2]
    argv[argv.index("vllm")] = "truth"
    where = ["--host", cluster.address(host), "--port", "8178"]
    serve = cluster.command(host, [sys.executable, "-m", "burstline", "serve", "truth", *where])
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=cluster.env()) as server:
        assert server.stdout is not None
        assert "serves truth at" in server.stdout.readline()
        done = finished(cluster, [*argv, "--think-s", "0.1"])
        server.send_signal(signal.SIGINT)
    assert verdicts.done(done.returncode, tmp_path / "runs"), done.stderr
    run = only_run(tmp_path / "runs")
    assert Counter(run.record_table.to_pandas()["outcome"]) == {"ok": 24}
    assert [driver.n_sent for driver in run.manifest.drivers] == [12, 12]
    sent = run.record_table.to_pandas().sort_values("index")["sent_ns"].to_numpy().reshape(8, 3)
    assert (np.diff(sent, axis=1) > 0.1e9).all()


def test_ten_thousand_streams_over_three_workers(cluster, tmp_path):
    truth = Truth(cluster, tmp_path, ttft_ms=3000, gap_ms=500)
    done = finished(cluster, burst(cluster, truth.url, tmp_path / "runs", "--workers", "3", n=10_000))
    truth.log()
    assert verdicts.done(done.returncode, tmp_path / "runs"), done.stderr
    run = only_run(tmp_path / "runs")
    outcomes = Counter(run.record_table.to_pandas()["outcome"])
    print(f"\n10,000 streams: {dict(outcomes)}")
    for driver in run.manifest.drivers:
        cpu_us = 1e6 * driver.cpu_s / (driver.n_planned * N_TOKENS)
        print(
            f"  {driver.host}: {driver.peak_rss_bytes / 2**20:.0f} MiB at most, {cpu_us:.1f} us CPU an event"
        )
    assert sum(outcomes.values()) == 10_000
    assert outcomes["ok"] == 10_000


@pytest.mark.measures
def test_a_raylet_that_is_killed_ends_as_outcomes(cluster, tmp_path):
    """The cluster has one node less afterwards, until it is started again."""
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20)
    argv = long_run(cluster, truth.url, tmp_path / "runs")
    code, took_s, printed = interrupted(cluster, argv, 2.0, lambda _: cluster.kill_raylet(cluster.hosts[1]))
    truth.log()
    outcomes = Counter(only_run(tmp_path / "runs").records["outcome"])
    print(f"\nraylet killed: exit {code}, {took_s:.1f} s, {dict(outcomes)}")
    start(cluster, 1, cluster.hosts[1], n_nodes=3)
    assert sum(outcomes.values()) == 240
    assert (
        40 <= outcomes["driver_lost"] <= 75 or 80 <= outcomes["driver_lost"] <= 150
    )  # of one or two workers
    assert code == 4, printed
    assert took_s < 6 + 10 + 6  # what was left of the load, the limit, the report


@pytest.mark.measures
def test_a_node_that_is_lost_ends_within_ten_seconds(cluster, tmp_path):
    """The cluster has one node less afterwards."""
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20)
    argv = long_run(cluster, truth.url, tmp_path / "runs")

    def part(_: object) -> None:
        cluster.unplug(cluster.hosts[2])

    code, took_s, printed = interrupted(cluster, argv, 2.0, part)
    truth.log()
    outcomes = Counter(only_run(tmp_path / "runs").records["outcome"])
    print(f"\nlink down: exit {code}, {took_s:.1f} s, {dict(outcomes)}")
    assert sum(outcomes.values()) == 240
    assert (
        40 <= outcomes["driver_lost"] <= 75 or 80 <= outcomes["driver_lost"] <= 150
    )  # of one or two workers
    assert code == 4, printed
    assert took_s < 6 + 10 + 6  # what was left of the load, the limit, the report


@pytest.mark.measures
def test_a_head_that_is_killed_takes_nothing_along(cluster, tmp_path):
    """Last in this file: there is no cluster afterwards."""
    truth = Truth(cluster, tmp_path, ttft_ms=200, gap_ms=20)
    argv = long_run(cluster, truth.url, tmp_path / "runs")
    argv[argv.index("--workers") + 1] = "2"
    code, took_s, printed = interrupted(cluster, argv, 2.0, kill_one(cluster, "gcs_server"))
    truth.log()
    outcomes = Counter(only_run(tmp_path / "runs").records["outcome"])
    print(f"\nhead killed: exit {code}, {took_s:.1f} s, {dict(outcomes)}")
    assert outcomes == {"ok": 240}
    assert verdicts.done(code, tmp_path / "runs"), printed
    assert took_s < 6 + 10 + 6
