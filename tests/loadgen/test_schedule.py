"""The order in which requests leave."""

from hypothesis import given
from hypothesis import strategies as st

from burstline.loadgen.wire.dispatcher import Schedule
from burstline.loadgen.wire.exchange import Exchange

AHEAD_NS = 100


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=60))
def test_requests_leave_in_order_of_due_time_however_they_are_parked(arrivals: list[tuple[int, int]]) -> None:
    """An arrival is the moment at which a request is parked and its due time."""
    schedule = Schedule(AHEAD_NS)
    moments = sorted({0, *(at for at, _ in arrivals), *(due for _, due in arrivals)})
    left: list[tuple[int, int]] = []
    for moment in moments:
        for index, (at, due) in enumerate(arrivals):
            if at == moment:
                schedule.add(Exchange(index, due))
        schedule.look_ahead(moment)
        assert all(due <= moment + AHEAD_NS for due, _, _ in schedule.soon)
        while schedule.soon and schedule.soon[0][0] <= moment:
            left.append((moment, schedule.soon.popleft()[2].index))
        next_ns = schedule.next_ns(may_send=True)
        assert next_ns is None or next_ns > moment
    assert sorted(index for _, index in left) == list(range(len(arrivals)))
    for moment, index in left:
        # At the moment it is due, or as soon as it is parked.
        assert moment == max(arrivals[index])


def test_what_is_due_at_once_leaves_in_the_order_it_was_parked() -> None:
    schedule = Schedule(AHEAD_NS)
    for index in (3, 1, 2):
        schedule.add(Exchange(index))
    schedule.look_ahead(0)
    assert [entry[2].index for entry in schedule.soon] == [3, 1, 2]


def test_nothing_to_send_while_every_slot_is_taken() -> None:
    schedule = Schedule(AHEAD_NS)
    schedule.add(Exchange(0, 50))
    schedule.look_ahead(0)
    assert schedule.next_ns(may_send=True) == 50
    assert schedule.next_ns(may_send=False) is None


def test_a_cleared_schedule_gives_everything_back_in_order() -> None:
    schedule = Schedule(AHEAD_NS)
    for index, due_ns in enumerate([500, 20, 90]):
        schedule.add(Exchange(index, due_ns))
    schedule.look_ahead(0)
    assert [e.index for e in schedule.clear()] == [1, 2, 0]
    assert schedule.next_ns(may_send=True) is None
