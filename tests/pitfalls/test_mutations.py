"""Pitfall 30: each bug is put back on purpose, and a test that is named here must fail.

A mutation swaps the code of one function for the same with a piece replaced, so that every reference to it is
changed; a piece that is no longer there fails loudly.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import pytest

from burstline import waves
from burstline.loadgen.capture import http1
from burstline.loadgen.driver import drive, job, self_measurement
from burstline.loadgen.wire import clock, exchange
from burstline.measure.metrics import definitions, server, slo, throughput
from burstline.measure.record import columns, record, telemetry
from burstline.measure.stats import estimates, quantiles, serial_correlation, significance
from burstline.measure.verdict import factors, grades, judge
from burstline.servers import openai, replies
from burstline.workloads import due_times


@dataclass(frozen=True)
class Mutation:
    """`bug` in the words of whoever would make it, and the test that knows it."""

    bug: str
    function: Callable[..., object]
    old: str
    new: str
    test: str


CHAIN, LOADGEN, MEASURE = "tests.pitfalls.", "tests.loadgen.", "tests.measure."
SERVERS, WORKLOADS = "tests.servers.", "tests.workloads."

MUTATIONS = (
    Mutation(
        "any event opens TTFT, the role's too",
        record._tokens,
        "event.kind in WITH_TOKENS",
        "event.kind is not Kind.USAGE",
        MEASURE + "test_record.test_the_role_opens_nothing_and_reasoning_is_a_token_but_no_answer",
    ),
    Mutation(
        "reasoning is no token",
        record._tokens,
        "event.kind in WITH_TOKENS",
        "event.kind is Kind.ANSWER",
        MEASURE + "test_record.test_the_role_opens_nothing_and_reasoning_is_a_token_but_no_answer",
    ),
    Mutation(
        "a chunk is a token where nobody counts",
        record._tokens,
        "known_totals[0] if known_totals else (None, None)",
        'known_totals[0] if known_totals else ("events", len(events))',
        MEASURE + "test_record.test_without_any_count_chunks_are_not_taken_for_tokens",
    ),
    Mutation(
        "text that was tokenized again judges the server",
        record._tokens,
        "total = n_asked if",
        "total = total if",
        MEASURE + "test_record.test_a_token_more_or_less_in_text_that_was_tokenized_again_is_no_failure",
    ),
    Mutation(
        "a chunk is a token where ids say otherwise",
        record._split,
        'return "counted", known',
        'return "counted", [1] * len(known)',
        MEASURE + "test_metrics.test_four_tokens_a_chunk_every_80_ms_are_20_ms_a_token",
    ),
    Mutation(
        "usage is ignored",
        openai._read_usage,
        "tally.n_output_usage = n_output",
        "pass",
        SERVERS + "test_openai.test_usage_that_comes_once_at_the_end_counts_no_single_event",
    ),
    Mutation(
        "a comment is an event",
        replies._any_events,
        'line.startswith((b"data:",',
        'line.startswith((b":", b"data:",',
        SERVERS + "test_sse.test_comments_and_other_fields_are_no_events",
    ),
    Mutation(
        "a 200 is a success whatever its stream says",
        record._outcome,
        "if reply.error is not None and",
        "if False and",
        MEASURE + "test_record.test_every_way_to_end_has_its_outcome",
    ),
    Mutation(
        "a stream cut short is whole",
        record._outcome,
        "if not reply.terminated and",
        "if False and",
        MEASURE + "test_record.test_every_way_to_end_has_its_outcome",
    ),
    Mutation(
        "a cut output is a success",
        record._length_outcome,
        "else Outcome.OK\n    return Outcome.CLAMPED",
        "else Outcome.OK\n    return Outcome.OK",
        MEASURE + "test_record.test_every_way_to_end_has_its_outcome",
    ),
    Mutation(
        "latency counts from the send",
        definitions.ttft,
        "c.origin_s",
        "c.sent_s",
        MEASURE + "test_metrics.test_one_token_has_a_ttft_that_is_its_e2e_and_no_tpot",
    ),
    Mutation(
        "E2E ends with the connection",
        definitions.e2e,
        "c.last_s",
        "c.closed_s",
        MEASURE + "test_metrics.test_e2e_ends_with_the_last_token_and_not_with_usage_or_done",
    ),
    Mutation(
        "one token came first",
        definitions.tpot,
        "c.shown_tok - c.first_n",
        "c.shown_tok - 1",
        MEASURE + "test_metrics.test_tpot_leaves_out_the_five_tokens_that_came_first",
    ),
    Mutation(
        "gaps are not weighted by their tokens",
        definitions.itl,
        "came.value / came.weight, came.weight,",
        "came.value / came.weight, np.ones(len(came.weight)),",
        MEASURE + "test_metrics.test_four_tokens_a_chunk_every_80_ms_are_20_ms_a_token",
    ),
    Mutation(
        "a gap before four tokens is one gap",
        definitions.itl,
        "came.value / came.weight, came.weight,",
        "came.value, came.weight,",
        MEASURE + "test_metrics.test_four_tokens_a_chunk_every_80_ms_are_20_ms_a_token",
    ),
    Mutation(
        "percentiles of the survivors",
        definitions.latencies,
        "np.where(c.failed, np.inf, np.nan)",
        "np.nan",
        MEASURE + "test_summary.test_failures_take_the_p99_and_every_mean",
    ),
    Mutation(
        "the mean of the survivors",
        quantiles.mean,
        "if math.isinf(ranked.value[-1]):",
        "if False:",
        MEASURE + "test_stats.test_a_mean_is_absent_when_any_failed",
    ),
    Mutation(
        "of two repeats the longer one counts more",
        quantiles.pooled,
        "(max(totals) / total)",
        "1.0",
        MEASURE + "test_repeats.test_two_runs_are_pooled_with_equal_weight_and_have_no_interval",
    ),
    Mutation(
        "one run each tells a difference",
        significance.between_runs,
        "if n < LEAST_RUNS + 1:",
        "if n < 0:",
        MEASURE + "test_contrast.test_one_run_each_has_no_error_at_all",
    ),
    Mutation(
        "requests of a closed loop pass for independent",
        serial_correlation._error_of_requests,
        "(cosines(residuals, n_cosines) ** 2).mean()",
        "residuals.var()",
        MEASURE + "test_closed_loop.test_intervals_of_a_closed_loop_cover_where_requests_alone_do_not",
    ),
    Mutation(
        "the start wave of a closed loop counts",
        waves.whole_waves,
        "ends_s[first]",
        "ends_s[0] * 0",
        MEASURE + "test_closed_loop.test_the_plateau_is_whole_waves_behind_the_first_until_the_last_dispatch",
    ),
    Mutation(
        "a percentile takes what is missing for zero",
        quantiles.quantile_of,
        "values[~np.isnan(values)]",
        "np.where(np.isnan(values), 0, values)",
        MEASURE + "test_stats.test_what_is_undefined_is_no_fast_request_in_a_percentile_or_its_bound",
    ),
    Mutation(
        "a bound takes what is missing for zero",
        estimates.early_stopping_bound,
        "values[~np.isnan(values)]",
        "np.where(np.isnan(values), 0, values)",
        MEASURE + "test_stats.test_what_is_undefined_is_no_fast_request_in_a_percentile_or_its_bound",
    ),
    Mutation(
        "tokens of failed requests are throughput",
        throughput._plateau,
        " & c.per_event(c.ok)",
        "",
        MEASURE + "test_totals.test_tokens_of_a_failed_request_are_no_part_of_the_plateau",
    ),
    Mutation(
        "the kernel's stamp is ignored",
        http1.stamps,
        "np.where(stamped, kernel_ns, at_ns)",
        "at_ns",
        MEASURE + "test_record.test_an_event_has_the_kernels_stamp_and_how_much_later_we_had_it",
    ),
    Mutation(
        "a step of the wall clock is believed",
        clock.Offsets.monotonic,
        "sound = (real_ns != 0) &",
        "sound = (real_ns != 0) |",
        CHAIN + "test_timing.test_21_a_step_of_the_wall_clock_changes_nothing",
    ),
    Mutation(
        "a closed loop counts from the run's start",
        drive._Drive._captured,
        "capture = replace(capture, due_ns=capture.dispatched_ns)",
        "pass",
        CHAIN + "test_timing.test_09_a_closed_loop_says_how_many_and_counts_from_each_requests_turn",
    ),
    Mutation(
        "the salt is forgotten",
        job.Job.call,
        "if self.salt is not None and",
        "if False and",
        CHAIN + "test_failures.test_14_a_salt_repeated_is_flagged_and_a_fresh_one_hits_no_cache",
    ),
    Mutation(
        "Poisson arrivals are stretched to end on time",
        due_times.poisson,
        "np.cumsum(rng.exponential(1 / rate_per_s, n))",
        "(lambda at: at * n / rate_per_s / at[-1])(np.cumsum(rng.exponential(1 / rate_per_s, n)))",
        WORKLOADS + "test_arrivals.test_a_poisson_plan_keeps_the_spread_of_its_length",
    ),
    Mutation(
        "a reader that is late says nothing",
        judge._read_late,
        "if not unreliable:",
        "if True:",
        MEASURE + "test_grades.test_reads_that_may_be_9_ms_late_make_the_gaps_unreliable",
    ),
    Mutation(
        "a percentile of the lag is held against a percentile of the latency",
        grades._send_effect,
        "return _apart(by_due, by_send), by",
        "return quantile_of(late_s, p), by",
        MEASURE + "test_grades.test_a_lag_is_no_effect",
    ),
    Mutation(
        "a burst counts from when all were due",
        columns.joined_columns,
        "if is_burst else due_s",
        "if False else due_s",
        MEASURE + "test_grades.test_2_a_burst_counts_from_each_send_and_its_spread_condemns_nothing",
    ),
    Mutation(
        "an event before [DONE] passes for the last of its read",
        http1.stamps,
        "arrivals.body_ends[read] <= np.asarray(ends)",
        "read >= 0",
        MEASURE + "test_record.test_an_event_that_is_not_the_last_of_its_read_may_have_come_earlier",
    ),
    Mutation(
        "the canary's lateness counts from its first event",
        self_measurement.CanaryErrors.add,
        "sent[1:, 2] - t0_ns",
        "at_ns",
        LOADGEN + "test_canary.test_the_error_is_reported_minus_true_over_the_run",
    ),
    Mutation(
        "the client's own bounds are believed unchecked",
        self_measurement.CanaryErrors.add,
        "np.maximum(bound_ns, 0)",
        "10**12",
        LOADGEN + "test_canary.test_what_the_clients_own_bound_does_not_explain_is_beyond_it",
    ),
    Mutation(
        "a margin of one run is enough whatever runs differ by",
        slo._by_margin,
        "high >= CERTAIN_MARGIN * low and low < high",
        "low < high",
        MEASURE + "test_goals.test_one_run_decides_only_by_a_margin_that_no_noise_between_runs_explains",
    ),
    Mutation(
        "stamps from around a step of the wall clock are believed",
        clock.Offsets.monotonic,
        "sound &= ",
        "sound | ",
        LOADGEN + "test_clock.test_no_stamp_around_a_step_of_a_millisecond_is_believed",
    ),
    Mutation(
        "a transmit stamp from around a step of the wall clock moves the send",
        clock.Offsets.moment,
        "self.monotonic(timespec, np.array([at_ns], dtype=np.int64))",
        "(real_ns - self.offset_ns[-1],)",
        LOADGEN + "test_network.test_a_step_of_the_wall_clock_moves_no_send",
    ),
    Mutation(
        "a moment is listed before its offset",
        clock.Offsets.observe,
        "self.offset_ns.append(self.latest_ns)\n        self.since_ns.append(now_ns)",
        "self.since_ns.append(now_ns)\n        self.offset_ns.append(self.latest_ns)",
        LOADGEN + "test_clock.test_a_moment_that_a_concurrent_reader_can_see_has_its_offset",
    ),
    Mutation(
        "other work on the machine is no matter",
        judge._disturbed,
        "others > most",
        "False",
        MEASURE + "test_verdict.test_others_that_take_most_of_the_servers_machine_disturb_a_run",
    ),
    Mutation(
        "the server's latency is held against ours from when a request was due",
        server._client,
        "ttft_service(c)",
        "c.first_s - c.due_s",
        MEASURE + "test_agreement.test_two_sides_that_agree_say_so_and_nothing_is_flagged",
    ),
    Mutation(
        "the server's histogram is read once, after the load",
        telemetry.Telemetry.grown_together,
        "float(last[0] - first[0])",
        "float(last[0])",
        MEASURE
        + "test_agreement.test_the_servers_median_lies_in_its_bucket_and_earlier_requests_are_left_out",
    ),
    Mutation(
        "an instrument proven wrong is believed",
        grades.grades,
        "error_s += beyond_s",
        "pass",
        LOADGEN + "test_canary.test_an_instrument_that_the_canary_contradicts_is_client_bound",
    ),
    Mutation(
        "an empty text opens TTFT",
        openai._kind,
        'Kind.ROLE if delta.get("role") else Kind.EMPTY',
        'Kind.ROLE if delta.get("role") else Kind.ANSWER',
        MEASURE + "test_record.test_an_empty_event_before_the_first_text_opens_nothing",
    ),
    Mutation(
        "a long request counts from when our send returned",
        exchange.Exchange.capture,
        "written_ns = max(written_ns, left_ns)",
        "pass",
        LOADGEN + "test_network.test_the_send_of_a_long_request_is_when_its_last_byte_left",
    ),
    Mutation(
        "JUnit and exit codes follow the state where SLOs have grades of their own",
        slo.state_decides,
        "return state == State.FAILED if summary.targets else",
        "return",
        MEASURE + "test_goals.test_targets_decide_unless_the_run_failed",
    ),
    Mutation(
        "a setting that differs is no matter",
        factors.differing,
        "or len({*values}) < 2:",
        "or name == 'max-num-seqs' or len({*values}) < 2:",
        MEASURE + "test_comparable.test_a_setting_that_differs_is_named",
    ),
)


# Those that are only seen over sockets take half a second each.
CASES = [
    pytest.param(row, id=row.bug, marks=[pytest.mark.slow] if row.test.startswith(CHAIN) else [])
    for row in MUTATIONS
]


def test_30_at_least_twelve_bugs_are_put_back() -> None:
    assert len({mutation.bug for mutation in MUTATIONS}) >= 12


@pytest.mark.parametrize("mutation", CASES)
def test_30_a_bug_put_back_is_caught_by_the_test_that_knows_it(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = mutation.test.rpartition(".")
    test = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(mutation.function, "__code__", mutated(mutation).__code__)
    with pytest.raises(AssertionError):
        call(test, monkeypatch)


def mutated(mutation: Mutation) -> FunctionType:
    source = textwrap.dedent(inspect.getsource(mutation.function))
    assert source.count(mutation.old) == 1, f"{mutation.old!r} is not once in {mutation.function.__name__}"
    scope = dict(vars(sys.modules[mutation.function.__module__]))
    exec(source.replace(mutation.old, mutation.new), scope)
    changed = scope[mutation.function.__name__]
    assert isinstance(changed, FunctionType)
    return changed


def call(test: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test, with each row of its table."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names, rows = mark.args
        for row in rows:
            test(**dict(zip(names, row, strict=True)))
        return
    if "monkeypatch" in inspect.signature(test).parameters:
        test(monkeypatch=monkeypatch)
    else:
        test()
