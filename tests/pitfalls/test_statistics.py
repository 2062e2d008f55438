"""Pitfalls 18, 28 and 29: percentiles, the server's own count, and the same report from the same files."""

import hashlib
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from burstline.bench.conclusion import write_report
from burstline.measure.record.rundir import open_run
from burstline.measure.record.tables import telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.servers.host.ready import getter
from burstline.servers.host.watch import _gauge_rows
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from tests.pitfalls.chain import fired, requests
from tests.pitfalls.proxy import late_proxy
from tests.truth.rig import TruthRig, truth_server
from tests.truth.script import Script

GOLDEN = Path(__file__).parents[1] / "golden" / "run"


def test_28_tokens_that_others_take_from_the_server_are_seen() -> None:
    """The server's counter over the load against what we received: with and without another client."""

    def residual_and_codes(n_others: int) -> tuple[float, set[str]]:
        with truth_server(SCRIPT, thread=True) as truth:

            def ask_too(conn: object) -> None:
                for _ in range(n_others):
                    body = {"prompt": [1], "max_tokens": 40, "stream": True}
                    httpx.post(f"{truth.url}/v1/completions", json=body, trust_env=False)

            summary = _watched(truth, meanwhile=ask_too)
        codes = {warning["code"] for warning in summary["verdict"]["warnings"]}
        return summary["conservation"]["output_residual"]["point"], codes & {"conservation"}

    assert residual_and_codes(0) == (0.0, set())
    residual, codes = residual_and_codes(1)
    assert residual == pytest.approx(40 / 200)
    assert codes == {"conservation"}


@pytest.mark.measures
def test_28_the_servers_own_histogram_and_the_client_agree_unless_something_stands_between() -> None:
    with truth_server(SCRIPT, thread=True) as truth:
        direct = _watched(truth)
        with late_proxy(truth.url, 0.06) as url:
            behind = _watched(truth, url)
    assert direct["agreement"]["ttft_server_p50_s"]["low"] == 0.1
    assert direct["agreement"]["ttft_gap_s"]["point"] == pytest.approx(0, abs=0.03)
    # It was late by 60 ms at least, and the server knows nothing of it.
    gap_s = behind["agreement"]["ttft_gap_s"]["point"]
    assert 0.06 <= gap_s < 0.12
    warnings = [row for row in behind["verdict"]["warnings"] if row["code"] == "server-view"]
    assert len(warnings) == 1
    warning = warnings[0]
    assert warning["text"] == f"The server's own TTFT is {gap_s * 1e3:.3g} ms shorter than the client's."
    assert "proxy" in warning["advice"]


SCRIPT = Script(ttft_s=0.1, gaps_s=(0.002,))


def _watched(truth: TruthRig, url: str | None = None, **options: Any) -> dict[str, Any]:
    """The summary of 20 requests, at `url` where that is not the server's own, watched as a run is."""
    read = partial(_gauge_rows, ENGINES["truth"], [getter(Target(truth.url, "truth"), timeout_s=5.0)])
    before = read()
    played = fired(replace(truth, url=url or truth.url), requests(20, 8), **options)
    rows = telemetry_table([*before, *read()], played.report.t0_ns or 0)
    return played.summary(telemetry=Telemetry.of(rows))


@pytest.mark.drawn
def test_29_a_stored_event_log_gives_the_same_records_for_ever_and_the_same_bytes_each_time(
    tmp_path: Path,
) -> None:
    """24 requests with every kind of ending: plan and captures are stored, nothing that is derived."""
    run = open_run(Path(shutil.copytree(GOLDEN, tmp_path / "run")))
    records = open_run(run.path).decoded
    times = records.column("token_ns").to_pylist()
    assert orjson.loads((GOLDEN.parent / "run.json").read_bytes()) == {
        "outcomes": records.column("outcome").to_pylist(),
        "tokens": [len(own) for own in times],
        "first_ns": [own[0] if own else None for own in times],
        "last_ns": [own[-1] if own else None for own in times],
    }
    run.save("records.parquet", [records])

    def digests() -> list[str]:
        write_report(run)
        names = ("summary.json", "report.html")
        return [hashlib.sha256((run.path / name).read_bytes()).hexdigest() for name in names]

    assert digests() == digests()
