"""What vLLM's own arithmetic makes of a run at a server of known truth, against what we print for it."""

from itertools import pairwise

import numpy as np

from burstline.cli import main
from loadgen.metrics.other_tools import vllm_block
from loadgen.record.columns import columns_of
from loadgen.record.rundir import open_run
from servers.truth.rig import truth_server
from servers.truth.script import Script

SCRIPTS = (
    Script(ttft_s=0.05, gaps_s=(0.01,), tok_per_event=(1,)),
    Script(ttft_s=0.08, gaps_s=(0.02, 0.005), tok_per_event=(3, 2, 1)),
    Script(ttft_s=0.02, n_tok=1),
    Script(status=503),
)


def numbers_in(block: str) -> dict[str, float]:
    rows = (line.rsplit(":", 1) for line in block.splitlines() if ":" in line)
    return {label: float(value) for label, value in rows}


def by_vllms_loop(records) -> dict[str, float]:
    """vLLM 0.32's `calculate_metrics`, request by request, as its source has it."""
    ttfts, tpots, itls, e2els, n_out, n_in = [], [], [], [], 0, 0
    for row in records.itertuples():
        if row.http_status != 200:
            continue
        start_s = row.dispatched_ns / 1e9
        times_s = [at_ns / 1e9 for at_ns in row.token_ns]
        n_out, n_in = n_out + int(row.output_tok), n_in + int(row.prompt_tok)
        ttft, latency = times_s[0] - start_s, times_s[-1] - start_s
        if row.output_tok > 1:
            tpots.append((latency - ttft) / (row.output_tok - 1))
        itls += [after - before for before, after in pairwise(times_s)]
        ttfts.append(ttft)
        e2els.append(latency)
    lasted_s = (records["closed_ns"].max() - records["dispatched_ns"].min()) / 1e9
    found = {
        "Successful requests": len(ttfts),
        "Failed requests": len(records) - len(ttfts),
        "Benchmark duration (s)": lasted_s,
        "Total input tokens": n_in,
        "Total generated tokens": n_out,
        "Output token throughput (tok/s)": n_out / lasted_s,
        "Total token throughput (tok/s)": (n_in + n_out) / lasted_s,
        "Request throughput (req/s)": len(ttfts) / lasted_s,
    }
    for name, values in (("TTFT", ttfts), ("TPOT", tpots), ("ITL", itls), ("E2EL", e2els)):
        found[f"Mean {name} (ms)"] = np.mean(values) * 1e3
        found[f"Median {name} (ms)"] = np.median(values) * 1e3
        found |= {f"P{p} {name} (ms)": np.percentile(values, p) * 1e3 for p in (50, 90, 99)}
    return found


def test_a_run_at_the_truth_server_is_printed_as_vllms_own_loop_computes_it(tmp_path, capsys):
    with truth_server(list(SCRIPTS) * 8) as server:
        load = ("--requests", "32", "--prompt-tokens", "20", "--output-tokens", "12")
        main(
            [
                "run",
                "--no-certify",
                "-q",
                "--engine",
                "truth",
                "--url",
                server.url,
                "--out",
                str(tmp_path),
                *load,
            ]
        )
        sent = sum(len(row.token_ns) for row in server.log())
    (path,) = tmp_path.iterdir()
    run = open_run(path)
    block = vllm_block(columns_of(run.record_table))
    assert isinstance(block, str)
    printed = numbers_in(block)
    wanted = by_vllms_loop(run.records)
    assert {name: printed[name] for name in wanted} == {
        name: round(float(v), 2) for name, v in wanted.items()
    }
    assert wanted["Successful requests"] == 24
    assert wanted["Failed requests"] == 8
    # Every event that the server says it sent is in the gaps or opens a request.
    assert sent - 1 == sum(map(len, run.records["token_ns"]))
    assert "Serving Benchmark Result" in (path / "report.html").read_text()
