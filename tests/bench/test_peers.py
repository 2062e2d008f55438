"""The readers of `peers.py`, on results as the tools write them (20 requests of 32 tokens, shortened)."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from peer_tools import TOOLS, Load, Reported
from peer_truth import Truth
from peers import beside, table


def in_percentiles(p50, p99):
    return {"successful": {"percentiles": {"p50": p50, "p99": p99}}}


SGLANG = {
    "completed": 20,
    "median_ttft_ms": 303.05,
    "median_itl_ms": 19.99,
    "p99_itl_ms": 24.57,
    "median_e2e_latency_ms": 926.98,
    "p99_e2e_latency_ms": 928.07,
}
SAID_BY_SGLANG = Reported(20, 303.05, 19.99, 24.57, 926.98, 928.07)
SAID = "its verdict on the run: VALID; its headline TTFT, from when a request was due: 500.00 ms at p50"
WRITTEN = {
    "burstline": (
        "runs-of-today/summary.json",
        {
            "verdict": {"state": "VALID"},
            "counts": {"planned": 20, "ok": 20},
            "metrics": {
                "ttft": {"p50": {"point": 0.5}},
                "ttft_service": {"p50": {"point": 0.25}},
                "itl": {"p50": {"point": 0.02}, "p99": {"point": None, "absent": "too few"}},
                "e2e_service": {"p50": {"point": 0.75}, "p99": {"point": 1.0}},
            },
        },
        Reported(20, 250, 20, None, 750, 1000, SAID),
    ),
    "vllm bench serve": (
        "result.json",
        {
            "completed": 20,
            "failed": 0,
            "p50_ttft_ms": 308.92,
            "p50_itl_ms": 20.0,
            "p99_itl_ms": 23.85,
            "p50_e2el_ms": 929.74,
            "p99_e2el_ms": 934.68,
        },
        Reported(20, 308.92, 20.0, 23.85, 929.74, 934.68),
    ),
    "sglang serving": ("result.json", SGLANG, SAID_BY_SGLANG),
    "sglang rust_client": ("result.json", SGLANG, SAID_BY_SGLANG),
    "guidellm": (
        "result.json",
        {
            "benchmarks": [
                {
                    "metrics": {
                        "request_totals": {"successful": 20, "errored": 0, "incomplete": 0, "total": 20},
                        "time_to_first_token_ms": in_percentiles(304.4, 311.7),
                        "inter_token_latency_ms": in_percentiles(19.94, 20.06),
                        "request_latency": in_percentiles(0.5, 0.75),
                    }
                }
            ]
        },
        Reported(20, 304.4, 19.94, 20.06, 500, 750),
    ),
    "aiperf": (
        "profile_export_aiperf.json",
        {
            "request_count": {"unit": "requests", "avg": 20.0},
            "time_to_first_token": {"unit": "ms", "p50": 305.61, "p99": 308.78},
            "inter_token_latency": {"unit": "ms", "p50": 9.88, "p99": 9.9},
            "inter_chunk_latency": {"unit": "ms", "p50": 20.0, "p99": 23.92},
            "request_latency": {"unit": "ms", "p50": 927.96, "p99": 928.9},
        },
        Reported(20, 305.61, 20.0, 23.92, 927.96, 928.9),
    ),
}


@pytest.mark.parametrize("name", TOOLS)
def test_what_a_tool_wrote_is_read_in_ms(name, tmp_path):
    file, result, said = WRITTEN[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(result))
    assert TOOLS[name].read(tmp_path) == said


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_is_told_the_server_the_load_and_where_to_write(name, tmp_path):
    load = Load("http://127.0.0.1:5", 1009, 512, 127, tmp_path / "model", "hub/name", tmp_path / "out")
    said = " ".join(TOOLS[name].command(load, Path("/bin")))
    for word in ("http://127.0.0.1:5", "1009", "512", "127", str(load.out), "truth"):
        assert word in said
    assert str(load.tokenizer) in said or load.hub_name in said


def test_the_truth_is_of_the_burst_alone_and_of_requests_that_ended():
    warm_up = np.array([0, 1])
    token_ns = [
        warm_up,
        *(np.array([5, 7, 13]) * 10**6 + 10**8 * (i > 1) for i in range(3)),
        np.array([10**9]),
    ]
    arrived_ns = np.array([-1, 1, 2, 10**8, 10**9 - 1])
    truth = Truth(arrived_ns - 1, arrived_ns, token_ns).last(4)
    assert truth.as_reported(3, False).n_ok == 3
    assert truth.as_reported(3, False).itl_p50 == 4
    assert truth.as_reported(3, True).itl_p99 == pytest.approx(4)
    assert truth.most_in_flight == 2
    assert truth.n_events == 10


def test_a_tool_that_is_not_there_has_its_remark_for_a_row():
    full = ["ours 1", beside(2.0, 1.0), beside(None, 1.0), *"12345678"]
    lines = table([full, ["theirs", "not installed"]], markdown=True).splitlines()
    assert "| 2.00 / 1.00 (+100.00%) | - / 1.00 |" in lines[2]
    assert lines[3] == "| theirs | not installed |"
    assert len({line.count("|") for line in lines[:3]}) == 1
    assert "theirs  not installed" in table([full, ["theirs", "not installed"]], markdown=False)
