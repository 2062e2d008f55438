#!/bin/sh
# mlcommons-loadgen 6.0.17 (MLPerf's load generator): runs with the default settings repeat the same load.
#
# Expected: in the Server scenario, with Poisson arrivals, each run draws its own arrivals and samples.
# Seen: all seeds are 0 until a configuration file sets them. Two runs send the same samples in the same order at
# the same times.
# For a benchmark: the spread over repeats holds the server's noise alone. It says nothing about other arrivals or
# prompts, so an interval from it is too narrow for the load in general, and a prefix cache left warm by one run
# serves the next. Set the seeds of each run, or pair runs of two servers by seed on purpose.
. "$(dirname "$0")/lib.sh"

needs mlcommons-loadgen==6.0.17

check <<'EOF'
import time
from pathlib import Path

import mlperf_loadgen as loadgen
from finding import observed


def run(seed=None):
    """The samples of 40 queries at 50/s in the order sent, and the times between them."""
    sent_s, samples = [], []

    def issue(queries):
        sent_s.append(time.perf_counter())
        samples.extend(query.index for query in queries)
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(query.id, 0, 0) for query in queries])

    settings = loadgen.TestSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    settings.server_target_qps, settings.min_duration_ms = 50, 100
    settings.min_query_count = settings.max_query_count = 40
    if seed is not None:
        settings.schedule_rng_seed = settings.sample_index_rng_seed = settings.qsl_rng_seed = seed
    logs, output = loadgen.LogSettings(), loadgen.LogOutputSettings()
    output.outdir = "logs"
    logs.log_output = output
    sut = loadgen.ConstructSUT(issue, lambda: None)
    library = loadgen.ConstructQSL(100, 100, lambda _: None, lambda _: None)
    loadgen.StartTestWithLogSettings(sut, library, settings, logs)
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(sut)
    return samples, [after - before for before, after in zip(sent_s, sent_s[1:])]


def correlation(one, two):
    mean = [sum(values) / len(values) for values in (one, two)]
    product = sum((a - mean[0]) * (b - mean[1]) for a, b in zip(one, two))
    return product / (sum((a - mean[0]) ** 2 for a in one) * sum((b - mean[1]) ** 2 for b in two)) ** 0.5


Path("logs").mkdir()
first, again, other = run(), run(), run(seed=11)
same, alike = first[0] == again[0], correlation(first[1], again[1])
observed(f"default settings, two runs: same order of samples {same}, gaps correlate by {alike:.2f}", same and alike > 0.7)
same, alike = first[0] == other[0], correlation(first[1], other[1])
observed(f"seeds of 11: same order of samples {same}, gaps correlate by {alike:.2f}", not same and alike < 0.6)
EOF
