#!/bin/sh
# ddsketch 3.0.1, hdrhistogram 0.10.8 and prometheus_client 0.26.0: latencies that they cannot hold.
#
# Expected: an error, or a sample that is counted and makes the percentiles worse.
# Seen: 40 replies of 1 s and 60 failures. DDSketch files a NaN under zero: the median is 0 s. HdrHistogram drops
# a value above its highest and says so only by returning False: with 60 replies of 75 s and a highest value of
# 60 s, p99 is 1 s of 40 samples. prometheus_client's Histogram counts no NaN, and one is enough to make its sum
# NaN for good.
# For a benchmark: more failures, or slower ones, look faster. Count what a sketch was given, compare it with what
# it holds, and keep failures apart.
. "$(dirname "$0")/lib.sh"

needs ddsketch==3.0.1 hdrhistogram==0.10.8 prometheus_client==0.26.0

check <<'EOF'
import math

from ddsketch import DDSketch
from finding import observed
from hdrh.histogram import HdrHistogram
from prometheus_client import CollectorRegistry, Histogram

sketch = DDSketch()
for value in [1.0] * 40 + [math.nan] * 60:
    sketch.add(value)
p50 = sketch.get_quantile_value(0.5)
observed(f"DDSketch, 40 x 1 s and 60 x NaN: count {sketch.count:.0f}, p50 {p50} s", (sketch.count, p50) == (100, 0))

histogram = HdrHistogram(1, 60_000, 3)
taken = sum(histogram.record_value(ms) for ms in [1_000] * 40 + [75_000] * 60)
p99, count = histogram.get_value_at_percentile(99), histogram.get_total_count()
text = f"HdrHistogram to 60 s, 40 x 1 s and 60 x 75 s: count {count}, p99 {p99} ms"
observed(text, taken == count == 40 and abs(p99 - 1_000) <= 1)

registry = CollectorRegistry()
metric = Histogram("latency_seconds", "seconds", registry=registry)
for value in [1.0] * 40 + [math.nan]:
    metric.observe(value)
count, total = (registry.get_sample_value(f"latency_seconds_{part}") for part in ("count", "sum"))
text = f"prometheus_client, 40 x 1 s and 1 x NaN: count {count:.0f}, sum {total}"
observed(text, count == 40 and math.isnan(total))
EOF
