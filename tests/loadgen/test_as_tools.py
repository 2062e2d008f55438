from dataclasses import replace

import pytest

from loadgen.metrics.other_tools import TOOLS, vllm_block
from loadgen.record.columns import columns_of
from loadgen.record.tables import record_table
from loadgen.stats.estimates import Absent
from tests.loadgen.making import MS, failed, ok

BY_TITLE = {tool.title.split()[0].rstrip(","): of for tool, of in TOOLS}
VLLM_BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     1
Failed requests:                         0
Benchmark duration (s):                  3.55
Total input tokens:                      4
Total generated tokens:                  128
Request throughput (req/s):              0.28
Output token throughput (tok/s):         36.06
Peak output token throughput (tok/s):    50.00
Peak concurrent requests:                1.00
Total token throughput (tok/s):          37.18
---------------Time to First Token----------------
Mean TTFT (ms):                          1010.00
Median TTFT (ms):                        1010.00
P50 TTFT (ms):                           1010.00
P90 TTFT (ms):                           1010.00
P99 TTFT (ms):                           1010.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          20.00
Median TPOT (ms):                        20.00
P50 TPOT (ms):                           20.00
P90 TPOT (ms):                           20.00
P99 TPOT (ms):                           20.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           20.00
Median ITL (ms):                         20.00
P50 ITL (ms):                            20.00
P90 ITL (ms):                            20.00
P99 ITL (ms):                            20.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          3550.00
Median E2EL (ms):                        3550.00
P50 E2EL (ms):                           3550.00
P90 E2EL (ms):                           3550.00
P99 E2EL (ms):                           3550.00
=================================================="""


def one(ttft_s=1.0, gap_s=0.02, n=128, each=1, **changes):
    """Due at 0, handed out at 10 ms; so many tokens, `each` to an event."""
    n_events = n // each
    record = ok(0, ttft_s + 0.01, [gap_s] * (n_events - 1), [each] * n_events)
    return replace(record, dispatched_ns=10 * MS, sent_ns=11 * MS, **changes)


def printed(tool, name, p, *records):
    return BY_TITLE[tool](columns_of(record_table(list(records)))).quantile(name, p)


@pytest.mark.parametrize(
    ("tool", "name", "ms"),
    [
        ("MLPerf", "ttft", 1010.0),
        ("vLLM", "ttft", 1000.0),
        ("guidellm", "ttft", 1000.0),
        ("vLLM", "tpot", 20.0),
        ("guidellm", "tpot", (1000 + 127 * 20) / 128),
        ("guidellm", "itl", 20.0),
        ("AIPerf", "itl", 20.0),
        ("llmperf", "itl", (1000 + 127 * 20) / 128),
        ("vLLM", "e2e", 3540.0),
    ],
)
def test_one_request_of_one_second_and_twenty_milliseconds_a_token(tool, name, ms):
    assert printed(tool, name, 0.5, one()) == pytest.approx(ms / 1e3)


@pytest.mark.parametrize(
    ("tool", "name", "ms"),
    [
        ("vLLM", "itl", 80.0),
        ("vLLM", "tpot", 31 * 80 / 127),
        ("llmperf", "itl", (1000 + 31 * 80) / 32),
    ],
)
def test_four_tokens_to_a_chunk_part_the_tools(tool, name, ms):
    assert printed(tool, name, 0.5, one(gap_s=0.08, each=4)) == pytest.approx(ms / 1e3)


def test_without_a_count_sglang_takes_what_was_asked_and_guidellm_takes_chunks():
    silent = one(n=8, output_tok=None, output_source=None, split="unknown", planned_output_tok=100)
    assert printed("SGLang", "tpot", 0.5, silent) == pytest.approx(7 * 0.02 / 99)
    assert printed("guidellm", "itl", 0.5, silent) == pytest.approx(0.02)
    assert isinstance(printed("vLLM", "tpot", 0.5, silent), Absent)


@pytest.mark.parametrize("tool", BY_TITLE)
def test_none_of_them_lets_failures_count(tool):
    records = [one(), *(replace(failed(k), index=k) for k in range(1, 9))]
    assert printed(tool, "ttft", 0.5, *records) == pytest.approx(1.01 if tool == "MLPerf" else 1.0)


def test_mlperf_takes_a_sample_where_others_interpolate():
    records = [replace(one(ttft_s=1 + k / 10), index=k) for k in range(4)]
    assert printed("MLPerf", "ttft", 0.5, *records) == pytest.approx(1.21)
    assert printed("vLLM", "ttft", 0.5, *records) == pytest.approx(1.15)


def test_the_block_is_set_as_vllm_sets_it():
    record = one(ttft_s=1.01)
    record = replace(record, dispatched_ns=10 * MS, closed_ns=record.token_ns[-1])
    lines = str(vllm_block(columns_of(record_table([record])))).splitlines()
    assert "\n".join(line.rstrip() for line in lines) == VLLM_BLOCK
    assert {len(line) for line in lines} == {50, 51}  # rules of 50; 40, a space and 10 for label and value


def test_a_run_without_success_has_no_block_and_no_latency():
    c = columns_of(record_table([failed(0)]))
    assert isinstance(vllm_block(c), Absent)
    for of in BY_TITLE.values():
        assert isinstance(of(c).quantile("ttft", 0.5), Absent)
