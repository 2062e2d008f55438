"""A step of the wall clock voids the kernel stamps back to the last observation that was consistent."""

import struct

import numpy as np
import pytest

from burstline.loadgen.capture.capture import NO_STAMP
from burstline.loadgen.wire import clock

MS = 1_000_000
START = 1_700_000_000 * 1_000_000_000


def timespecs(real_ns):
    return b"".join(struct.pack("qq", *divmod(at, 1_000_000_000)) for at in real_ns)


@pytest.mark.parametrize("step_ns", [sign * size for size in (MS, 500 * MS, 5000 * MS) for sign in (-1, 1)])
def test_no_stamp_from_around_a_step_is_believed_and_all_others_are(step_ns, monkeypatch):
    """Observed every 50 ms; the wall clock steps at 120 ms, and each read is 20 us later than its stamp."""
    offsets = clock.Offsets()

    def offset_at(at_ns):
        return START + (step_ns if at_ns >= 120 * MS else 0)

    for at_ns in range(0, 300 * MS, 50 * MS):
        monkeypatch.setattr(clock, "realtime_offset_ns", lambda at_ns=at_ns: offset_at(at_ns))
        offsets.observe(at_ns)
    at_ns = np.arange(5 * MS, 250 * MS, 10 * MS)
    arrived_ns = at_ns - 20_000
    kernel_ns = offsets.monotonic(timespecs([int(at) + offset_at(at) for at in arrived_ns]), at_ns)
    around = (at_ns > 100 * MS) & (at_ns <= 150 * MS)
    assert (kernel_ns[around] == NO_STAMP).all()
    assert (kernel_ns[~around] == arrived_ns[~around]).all()


def test_a_clock_that_only_slews_loses_no_stamp(monkeypatch):
    offsets = clock.Offsets()
    for k in range(6):
        monkeypatch.setattr(clock, "realtime_offset_ns", lambda k=k: START + 1000 * k)
        offsets.observe(50 * MS * k)
    at_ns = np.arange(5 * MS, 250 * MS, 10 * MS)
    stamps = offsets.monotonic(timespecs([int(at) - 20_000 + START for at in at_ns]), at_ns)
    assert (stamps != NO_STAMP).all()


def test_no_stamp_around_a_step_of_a_millisecond_is_believed(monkeypatch):
    test_no_stamp_from_around_a_step_is_believed_and_all_others_are(-MS, monkeypatch)


def test_a_moment_that_a_concurrent_reader_can_see_has_its_offset():
    class Watched(list):
        def append(self, moment_ns):
            super().append(moment_ns)
            assert len(offsets.offset_ns) >= len(self), "a reader would look up an offset that is not there"

    offsets = clock.Offsets(since_ns=Watched())
    offsets.observe(0)
    assert len(offsets.offset_ns) == len(offsets.since_ns) == 1
