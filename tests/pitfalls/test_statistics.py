"""Pitfalls 18, 28 and 29: percentiles, the server's own count, and the same report from the same files."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pandas as pd
import pytest

from burstline.conclude import write_report
from loadgen.rundir import RunDir, open_run
from servers.truth.rig import truth_server
from servers.truth.script import Script
from tests.pitfalls.chain import fired, play, requests
from workloads.seeds import rng

GOLDEN = Path(__file__).parents[1] / "golden" / "run"


def test_18_percentiles_are_those_of_the_times_the_server_sent() -> None:
    ttft_s = rng(0, "test").lognormal(-3.0, 0.5, 300)
    played = play([Script(ttft_s=float(s), gaps_s=(0.0,)) for s in ttft_s], 300, n_output_tok=1)
    figures = played.summary()["metrics"]["ttft"]
    true_s = [(played.sent_ns(i)[0] - played.records[i].due_ns) / 1e9 for i in range(300)]
    for name, p in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95)):
        figure = figures[name]
        assert figure["point"] == pytest.approx(np.quantile(true_s, p), rel=0.1)
        assert figure["low"] < figure["point"] < figure["high"]
    assert "662" in figures["p99"]["absent"], "300 requests are too few for a p99"


def test_28_tokens_that_others_take_from_the_server_are_seen() -> None:
    """The server's counter over the load against what we received: with and without another client."""
    script = Script(ttft_s=0.1, gaps_s=(0.002,))

    def residual_and_codes(n_others: int) -> tuple[float, set[str]]:
        with truth_server(script, thread=True) as truth:

            def ask_too(conn: object) -> None:
                for _ in range(n_others):
                    body = {"prompt": [1], "max_tokens": 40, "stream": True}
                    httpx.post(f"{truth.url}/v1/completions", json=body, trust_env=False)

            before = truth.metrics()
            played = fired(truth, requests(20, 8), meanwhile=ask_too)
            after = truth.metrics()
        summary = played.summary(telemetry=_telemetry(before, after))
        codes = {warning["code"] for warning in summary["verdict"]["warnings"]}
        return summary["conservation"]["output_residual"]["point"], codes

    assert residual_and_codes(0) == (0.0, set())
    residual, codes = residual_and_codes(1)
    assert residual == pytest.approx(40 / 200)
    assert codes == {"conservation"}


def _telemetry(before: Any, after: Any) -> pd.DataFrame:
    name = "truth:generation_tokens_total"
    rows = [(-1, before[name]), (60_000_000_000, after[name])]
    columns = {"source": "engine", "name": "generation_tokens", "note": None}
    return pd.DataFrame([{"at_ns": at_ns, "value": value, **columns} for at_ns, value in rows])


def test_29_a_stored_event_log_gives_the_same_records_for_ever_and_the_same_bytes_each_time(
    tmp_path: Path,
) -> None:
    """24 requests with every kind of ending: plan and captures are stored, nothing that is derived."""
    run = RunDir(Path(shutil.copytree(GOLDEN, tmp_path / "run")))
    records = open_run(run.path).decoded()
    times = records.column("token_ns").to_pylist()
    assert orjson.loads((GOLDEN.parent / "run.json").read_bytes()) == {
        "outcomes": records.column("outcome").to_pylist(),
        "tokens": [len(own) for own in times],
        "first_ns": [own[0] if own else None for own in times],
        "last_ns": [own[-1] if own else None for own in times],
    }
    run.save_records(records)

    def digests() -> list[str]:
        write_report(run)
        names = ("summary.json", "report.html")
        return [hashlib.sha256((run.path / name).read_bytes()).hexdigest() for name in names]

    assert digests() == digests()
