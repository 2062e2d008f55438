"""`report --format vllm` against the file that `vllm bench serve` 0.32 wrote of a run at the truth server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burstline.loadgen.record.rundir import open_run
from burstline.reports.formats.vllm_bench import vllm_result

GOLDEN = Path(__file__).parents[1] / "golden"
THEIRS: dict[str, Any] = json.loads((GOLDEN / "vllm_bench/result.json").read_text())
NOT_OURS = {"generated_texts", "queue_times", "rtfx"}
"""What a run does not keep: the replies' text, the wait for the client's own semaphore, hours of audio."""


def statistics(name: str, values_s: list[float], document: dict[str, Any]) -> None:
    ms = np.array(values_s) * 1e3
    assert document[f"mean_{name}_ms"] == pytest.approx(np.mean(ms))
    assert document[f"median_{name}_ms"] == pytest.approx(np.median(ms))
    assert document[f"std_{name}_ms"] == pytest.approx(np.std(ms))
    assert document[f"p90_{name}_ms"] == pytest.approx(np.percentile(ms, 90))
    assert document[f"p99_{name}_ms"] == pytest.approx(np.percentile(ms, 99))


def busiest(document: dict[str, Any]) -> tuple[float, int]:
    """vLLM's own loop over seconds, on the lists of a document."""
    rows = [
        row
        for row in zip(
            document["start_times"],
            document["ttfts"],
            document["itls"],
            document["latencies"],
            document["errors"],
            strict=True,
        )
        if not row[4]
    ]
    begin = min(row[0] for row in rows)
    seconds = int(np.ceil(max(start + latency for start, _, _, latency, _ in rows) - begin)) + 1
    tokens, open_in = np.zeros(seconds), np.zeros(seconds)
    for start, ttft, gaps, latency, _ in rows:
        for at_s in start + ttft + np.concatenate(([0.0], np.cumsum(gaps))):
            tokens[int(at_s - begin)] += 1
        open_in[int(start - begin) : int(start + latency - begin) + 1] += 1
    return tokens.max(), int(open_in.max())


@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_the_figures_follow_from_the_lists_by_vllms_definitions(whose: str) -> None:
    document = THEIRS if whose == "theirs" else vllm_result(open_run(GOLDEN / "runs/4"))
    ok = [k for k, error in enumerate(document["errors"]) if not error]
    n = len(ok)
    assert document["completed"] == n
    assert document["failed"] == document["num_prompts"] - n
    pick = {name: [document[name][k] for k in ok] for name in ("ttfts", "latencies", "itls", "output_lens")}
    statistics("ttft", pick["ttfts"], document)
    statistics("e2el", pick["latencies"], document)
    statistics("itl", [gap for gaps in pick["itls"] for gap in gaps], document)
    rows = zip(pick["latencies"], pick["ttfts"], pick["output_lens"], strict=True)
    statistics("tpot", [(e2e - ttft) / (tok - 1) for e2e, ttft, tok in rows if tok > 1], document)
    assert document["request_throughput"] == pytest.approx(n / document["duration"])
    assert document["total_output_tokens"] == sum(pick["output_lens"])
    assert document["output_throughput"] == pytest.approx(sum(pick["output_lens"]) / document["duration"])
    assert (document["max_output_tokens_per_s"], document["max_concurrent_requests"]) == busiest(document)


def test_the_keys_are_vllms() -> None:
    ours = vllm_result(open_run(GOLDEN / "runs/4"))
    assert set(THEIRS) - set(ours) == NOT_OURS
    assert {name.split("_")[0] for name in set(ours) - set(THEIRS)} <= {"p50", "p95"}, "percentiles alone"
    for name in set(ours) & set(THEIRS) - {"max_concurrency", "request_goodput", "label"}:
        number = isinstance(THEIRS[name], int | float)
        assert isinstance(ours[name], int | float) if number else type(ours[name]) is type(THEIRS[name]), name


def test_a_run_in_which_nothing_succeeded_has_zeros(tmp_path: Path) -> None:
    run = open_run(GOLDEN / "runs/4")
    run.columns.ok[:] = False
    document = vllm_result(run)
    assert (document["completed"], document["mean_ttft_ms"], document["request_throughput"]) == (0, 0.0, 0.0)
    json.dumps(document, allow_nan=False)
