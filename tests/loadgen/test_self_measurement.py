"""The instrument's own durations are counted in batches, which must not show."""

import numpy as np
import pytest

from burstline.loadgen.capture.drive_report import DurationSpread
from burstline.loadgen.driver.self_measurement import DurationHistogram


def test_nothing_counted_has_no_spread():
    assert DurationHistogram().spread() is None


def test_batches_count_as_one_by_one_and_a_look_in_between_changes_nothing():
    values = np.random.default_rng(0).lognormal(12, 2, 20_000).astype(np.int64)
    whole, in_parts = DurationHistogram(), DurationHistogram()
    whole.add(values)
    for begin, end in [(0, 1), (1, 4097), (4097, 9000), (9000, 9000), (9000, 20_000)]:
        in_parts.add(values[begin:end])
        in_parts.spread()
    assert in_parts.spread() == whole.spread()
    spread = whole.spread()
    assert spread is not None
    assert (spread.n, spread.max_ns) == (20_000, values.max())
    assert spread.p50_ns == pytest.approx(np.median(values), rel=0.012)
    assert spread.p99_ns == pytest.approx(np.quantile(values, 0.99), rel=0.012)


def test_numbers_lists_and_what_is_below_zero_are_counted():
    histogram = DurationHistogram()
    for durations_ns in (0, [-5], [0.0, 1e6], np.array([1e6])):
        histogram.add(durations_ns)
    assert histogram.spread() == DurationSpread(5, 0, 10**6, 10**6)


def test_what_was_added_may_be_changed_afterwards():
    histogram, durations_ns = DurationHistogram(), np.array([5.0])
    histogram.add(durations_ns)
    durations_ns[0] = 1e9
    spread = histogram.spread()
    assert spread is not None
    assert spread.max_ns == 5
