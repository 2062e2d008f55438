#!/bin/sh
# llmeter 0.2.0: the p99 of fewer than 100 replies can be above the slowest of them.
#
# Expected: a percentile lies between the fastest and the slowest reply.
# Seen: p99 is extrapolated beyond the last reply (Python's `statistics.quantiles`, whose default method takes the
# data for a sample of a wider range). Of 30 replies with 29 TTFTs of 1 s and one of 4 s it is 6.07 s; of 10 with
# one of 2 s it is 2.89 s. From 99 replies on it is one of them, or between two.
# For a benchmark: p99 and the slowest reply must stand side by side, with the number of replies. A server can miss
# an SLO of 5 s for its p99 though every reply met it.
. "$(dirname "$0")/lib.sh"

needs llmeter==0.2.0

check <<'EOF'
from llmeter.endpoints import InvocationResponse
from llmeter.results import Result

from finding import observed


def p99(ttfts_s):
    responses = [
        InvocationResponse(
            "word", id=str(i), time_to_first_token=ttft_s, time_to_last_token=ttft_s + 1,
            num_tokens_input=16, num_tokens_output=16,
        )
        for i, ttft_s in enumerate(ttfts_s)
    ]
    n = len(responses)
    return Result(responses=responses, total_requests=n, clients=1, n_requests=n).stats["time_to_first_token-p99"]


for n, slowest_s, printed_s in ((10, 2.0, 2.89), (30, 4.0, 6.07)):
    found_s = p99([1.0] * (n - 1) + [slowest_s])
    observed(f"{n} replies, the slowest {slowest_s} s: p99 {found_s:.2f} s", round(found_s, 2) == printed_s)
found_s = p99([1.0] * 98 + [2.0])
observed(f"99 replies, the slowest 2.0 s: p99 {found_s:.2f} s", found_s == 2.0)
EOF
