"""A server 20 ms away, in a network namespace of its own: what the page says of the network is true.

Needs root, iproute2 and a TUN device; skipped elsewhere.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from burstline.measure.metrics.definitions import METRICS, latencies
from burstline.measure.record.rundir import open_run
from tests import verdicts
from tests.cluster.lab import Lab, lab

DELAY_S = 0.020
TTFT_S = 0.100
N = 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.measures,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not Path("/dev/net/tun").exists(),
        reason="no root, no iproute2 or no TUN device here",
    ),
]


def run_at(made: Lab, folder: Path, prompt_tok: int, name: str):
    """A run from the first namespace at a truth server in the second, whose packets are 20 ms late."""
    near, far = made.hosts
    script = orjson.dumps([{"ttft_s": TTFT_S, "gaps_s": [0.02]}]).decode()
    serve = [sys.executable, "-m", "tests.truth", "--host", made.address(far), "--port", "8000"]
    with subprocess.Popen(
        made.command(far, [*serve, "--script", script]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=made.env(),
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            assert "8000" in server.stdout.readline()
            load = ["--requests", str(N), "--arrival", "constant", "--rate", "20", "--output-tokens", "8"]
            load += ["--prompt-tokens", str(prompt_tok), "--out", str(folder / name)]
            load += ["-q"]
            url = f"http://{made.address(far)}:8000"
            argv = [sys.executable, "-m", "burstline", "run", "--engine", "truth", "--url", url, *load]
            done = made.run(near, argv)
        finally:
            server.send_signal(signal.SIGTERM)
    assert verdicts.done(done.returncode, folder / name), done.stderr
    (path,) = (folder / name).iterdir()
    return open_run(path)


def test_the_networks_share_of_ttft_is_the_delay_that_was_configured(tmp_path):
    with lab(tmp_path, 2, tag="far", late_ms={1: DELAY_S * 1e3}) as made:
        run = run_at(made, tmp_path, 32, "short")
        long = run_at(made, tmp_path, 16_000, "long")
    client = run.summary.instrument
    assert client.network_rtt_s.point == pytest.approx(DELAY_S, abs=1e-3)
    page = (run.path / "report.html").read_text("utf-8")
    told = re.search(r"adds one TCP round trip, ([0-9.]+) ms, to each TTFT", page)
    assert float(told[1]) == pytest.approx(DELAY_S * 1e3, abs=1)
    service_s = latencies(METRICS["ttft_service"], run.columns)
    assert sorted(service_s)[N // 2] - TTFT_S == pytest.approx(DELAY_S, abs=2e-3), "and so it is seen"
    # 16,000 ids are more than a connection may send at once: the last byte leaves a round trip later.
    short_s, long_s = (each.columns.sent_s - each.columns.dispatched_s for each in (run, long))
    assert short_s.max() < 5e-3
    assert long_s.max() > DELAY_S - 1e-3  # on a connection that has not sent as much before
