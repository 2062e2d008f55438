"""The command where something stands between it and the server, and where it comes late itself."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path

import numpy as np
import psutil
import pytest

from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.verdict import Grade, State
from burstline.measure.stats.figure import known
from tests.burstline.inside import ran
from tests.burstline.test_run import the_run
from tests.seeds import SEED
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.truth.serve import Served
from tests.verdicts import done

pytestmark = pytest.mark.slow
MODELS = {"object": "list", "data": [{"id": "truth", "object": "model", "owned_by": "local"}]}
ADDED = {"min_tokens": None, "skip_special_tokens": True, "spaces": True, "rid": "1", "priority": 0}


@contextmanager
def routing(*workers: str) -> Iterator[tuple[str, list[dict]]]:
    """A router over these URLs, as sglang-router and vllm-router are: its URL, and the bodies that came.

    It lists its workers, drops `continuous_usage_stats` and adds fields; a worker counts in each event only
    where it is asked to.
    """
    turns, lock, bodies = cycle(worker.removeprefix("http://") for worker in workers), threading.Lock(), []

    class Router(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            pages = {"/workers": {"workers": [{"url": url} for url in workers]}, "/v1/models": MODELS}
            body = json.dumps(pages.get(self.path, {})).encode()
            self.send_response(200 if self.path in pages else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                bodies.append(json.loads(json.dumps(body)))
                worker = next(turns)
            options = body.get("stream_options") or {}
            options.pop("continuous_usage_stats", None)
            usage = "cumulative" if options.get("continuous_usage_stats") else "final"
            headers = {"x-burstline-script": json.dumps({"usage": usage})}
            upstream = http.client.HTTPConnection(worker)
            with suppress(OSError):
                upstream.request("POST", self.path, json.dumps({**body, **ADDED}), headers)
                reply = upstream.getresponse()
                self.send_response(reply.status)
                self.send_header("content-type", reply.headers["content-type"])
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                while part := reply.read1():
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")
            upstream.close()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

    with Server(("127.0.0.1", 0), Router) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()


@pytest.mark.usefixtures("without_page")
def test_a_run_through_a_router_says_so_and_counts_what_came(tmp_path: Path) -> None:
    script = Script(ttft_s=0.1, gaps_s=(0.02,))
    load = (
        "--requests",
        "24",
        "--vocab-size",
        "999",
        "--concurrency",
        "4",
        "--prompt-tokens",
        "16",
        "--output-tokens",
        "8",
    )
    with truth_server(script) as one, truth_server(script) as two, routing(one.url, two.url) as (url, bodies):
        code, output = ran(tmp_path / "runs", "--url", url, *load)
        served = [row for truth in (one, two) for row in truth.log() if row.n_prompt_tok == 16]
    assert done(code, tmp_path / "runs"), output
    assert "a gateway is between (via: router with 2 workers)" in output
    run = open_run(the_run(tmp_path / "runs"))
    assert run.manifest.server is not None
    assert any("router with 2 workers" in note for note in run.manifest.server.notes)
    records = run.record_table.to_pandas()
    assert len(records) == 24
    assert (records["outcome"] == "ok").all()
    assert (records["output_tok"] == 8).all()
    assert (records["prompt_tok"] == 16).all()
    tried = [body for body in bodies if (body.get("stream_options") or {}).get("continuous_usage_stats")]
    assert len(tried) == 1, "it was tried once before the load, and not believed"
    assert len(served) == 24
    assert run.summary is not None
    ttft, tpot = (known(run.summary.figure("metrics", name, "p50")) for name in ("ttft", "tpot"))
    assert ttft == pytest.approx(0.1, abs=0.03)
    assert tpot == pytest.approx(0.02, rel=0.1)


STOPPED_S, RUN_S, GAP_S, N_TOK = (0.05, 0.11), (0.01, 0.03), 0.0025, 32
Late = tuple[Run, Sequence[Served]]


def stutter(run: subprocess.Popen[str]) -> None:
    """The load driver of a command stands still for 80 ms of 100, as where the CPU is given to others."""
    rng = np.random.default_rng(SEED)
    with suppress(psutil.Error):
        while run.poll() is None:
            for child in psutil.Process(run.pid).children(recursive=True):
                while child.is_running() and any("driver.drive" in word for word in child.cmdline()):
                    child.send_signal(signal.SIGSTOP)
                    time.sleep(rng.uniform(*STOPPED_S))
                    child.send_signal(signal.SIGCONT)
                    time.sleep(rng.uniform(*RUN_S))
            time.sleep(0.01)


@pytest.fixture(scope="module")
def read_late(tmp_path_factory: pytest.TempPathFactory) -> Late:
    """A run whose client read late, and the truth of its requests."""
    out = tmp_path_factory.mktemp("late")
    words = ["run", "--engine", "truth", "--requests", "240", "--concurrency", "6", "-q", "--out", str(out)]
    words += ["--prompt-tokens", "16", "--output-tokens", str(N_TOK)]
    with truth_server(Script(ttft_s=0.3, gaps_s=(GAP_S,))) as truth:
        command = [sys.executable, "-m", "burstline", *words, "--url", truth.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            threading.Thread(target=stutter, args=(run,), daemon=True).start()
            text, _ = run.communicate(timeout=120)
        served = [row for row in truth.log() if row.n_output_tok == N_TOK]
    assert run.returncode in (0, 4), text
    return open_run(the_run(out)), served


@pytest.mark.measures(State.CLIENT_BOUND, State.DISTURBED)
def test_a_late_client_spoils_no_percentile_that_it_has_right(read_late: Late) -> None:
    """The end of a reply comes right after its last token: how late both were read together is no error."""
    run, served = read_late
    assert run.summary is not None
    true_s = np.median([row.token_ns[-1] - row.arrival_ns for row in served]) / 1e9
    e2e = run.summary.grades["e2e"]["p50"]
    assert known(run.summary.figure("metrics", "e2e", "p50")) == pytest.approx(true_s, abs=0.002)
    assert e2e.grade == Grade.OK
    assert e2e.read_effect_s is not None
    assert e2e.read_effect_s < 0.01
    assert run.summary.verdict.state in (State.CLIENT_BOUND, State.DISTURBED)
    assert not any("E2E p50" in reason.text for reason in run.summary.verdict.reasons)


@pytest.mark.measures(State.CLIENT_BOUND, State.DISTURBED)
def test_how_late_a_token_was_read_counts_from_the_read_before(read_late: Late) -> None:
    """The kernel stamps the last of the tokens that are read together, a few ms before the read."""
    run, served = read_late
    assert run.summary is not None
    [t0_ns] = {each.t0_ns for each in run.manifest.drivers}
    true_ns = {row.index: row.token_ns for row in served}
    rows = list(run.record_table.to_pandas().itertuples())
    late_ns = [np.add(row.token_ns, row.read_lag_ns) + t0_ns - true_ns[row.index] for row in rows]
    for name, share in (("read_lag_p50_s", 0.5), ("read_lag_p99_s", 0.99)):
        shown_s = known(run.summary.figure("instrument", name))
        assert shown_s is not None
        assert np.quantile(np.concatenate(late_ns), share) / 1e9 - 0.002 < shown_s < 2 * STOPPED_S[1]
