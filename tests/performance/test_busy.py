"""Overlapping intervals count once."""

from hypothesis import given
from hypothesis import strategies as st

from shardnet.performance import busy
from shardnet.performance.busy import BusyTime

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=30)


@given(intervals)
def test_it_is_the_length_of_the_union(found: list[tuple[int, int]]) -> None:
    time = BusyTime()
    for start, end in sorted(found, key=lambda interval: interval[1]):
        time.add(start, end)
    assert time.total_ns == len({moment for start, end in found for moment in range(start, end)})


def test_what_is_long_past_is_counted_and_forgotten() -> None:
    time = BusyTime()
    for start in range(0, 30 * busy.MAX_OPEN, 10):
        time.add(start, start + 3)
    assert time.total_ns == 9 * busy.MAX_OPEN
    assert len(time._open) == busy.MAX_OPEN
