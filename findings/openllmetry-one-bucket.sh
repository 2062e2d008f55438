#!/bin/sh
# opentelemetry-instrumentation-openai 0.62.4 (OpenLLMetry) with opentelemetry-sdk 1.45.2: histograms of seconds
# have the buckets of milliseconds.
#
# Expected: boundaries that tell 50 ms from 1 s, as OpenTelemetry's conventions for GenAI metrics give.
# Seen: `gen_ai.server.time_to_first_token` and `gen_ai.client.operation.duration` are in seconds, and their
# boundaries are the SDK's defaults: 0, 5, 10, 25 ... 10,000. All that takes less than 5 s is in one bucket.
# For a benchmark: a quantile by interpolation, as Prometheus makes it, is 2.5 s for p50 and 4.95 s for p99,
# whether the first token comes after 10 ms or 800 ms. Give the histograms a view with boundaries of your own
# before comparing a dashboard with a benchmark. Mean values (sum by count) are right.
. "$(dirname "$0")/lib.sh"

needs opentelemetry-instrumentation-openai==0.62.4 opentelemetry-sdk==1.45.2 openai==3.57.0

check <<'EOF'
from finding import ChatServer, observed
from openai import OpenAI
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

NAMES = ("gen_ai.server.time_to_first_token", "gen_ai.client.operation.duration")


def histograms(*first_s):
    """The two histograms after two streams from each server; their first tokens come after these times."""
    reader = InMemoryMetricReader()
    OpenAIInstrumentor().instrument(meter_provider=MeterProvider([reader]))
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    for seconds in first_s:
        client = OpenAI(base_url=ChatServer(first=seconds).url, api_key="none")
        for _ in range(2):
            assert sum(1 for _ in client.chat.completions.create(**ask)) == 13
    scopes = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {metric.name: metric for scope in scopes for metric in scope.metrics}
    return {name: (found[name].unit, found[name].data.data_points) for name in NAMES}


def quantile(bounds, counts, share):
    """By linear interpolation within the bucket."""
    rank, below = share * sum(counts), 0
    for n, low, high in zip(counts, (0, *bounds), bounds):
        if below + n >= rank and n:
            return low + (high - low) * (rank - below) / n
        below += n
    return bounds[-1]


for name, (unit, points) in histograms(0.01, 0.8).items():
    bounds = points[0].explicit_bounds
    counts = [sum(column) for column in zip(*(point.bucket_counts for point in points))]
    p50, p99 = quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99)
    mean = sum(point.sum for point in points) / sum(counts)
    text = f"first tokens after 0.01 s and 0.8 s: {name} in {unit}, boundaries {bounds[:3]}, {counts[1]} of"
    same = unit == "s" and bounds[:3] == (0, 5, 10) and counts[1] == sum(counts) == 4
    observed(f"{text} {sum(counts)} in one bucket, mean {mean:.2f}, p50 {p50:.2f}, p99 {p99:.2f}", same)
EOF
