"""Tracebacks on their way from the workers to the console."""

import pytest

from shardnet.cli.launch.tracebacks import Told, Tracebacks

HEAD = "Traceback (most recent call last):"
FRAME = ['  File "train.py", line 3, in main', "    work()"]
ERROR = "shardnet.errors.PeerLost: [rank 1/4 epoch 1 step 7] rank 3 (10.0.0.1:7000) lost during barrier #3"
WHOLE = [HEAD, *FRAME, ERROR]


def shown(tracebacks: Tracebacks, *lines: str) -> list[str]:
    return [out for line in lines for out in tracebacks.feed(line)]


@pytest.fixture
def streams() -> list[Tracebacks]:
    told = Told()
    return [Tracebacks(told, lambda rank=rank: f"rank {rank}") for rank in range(3)]  # type: ignore[misc]


def test_lines_come_at_once(streams: list[Tracebacks]) -> None:
    assert shown(streams[0], "step 1", " indented", "", ERROR) == ["step 1", " indented", "", ERROR]
    assert not streams[0].is_within


def test_a_traceback_comes_in_one_piece(streams: list[Tracebacks]) -> None:
    for line in WHOLE[:-1]:
        assert streams[0].feed(line) == []
        assert streams[0].is_within
    assert streams[0].feed(ERROR) == WHOLE
    assert not streams[0].is_within


def test_what_is_the_same_but_for_its_rank_is_told_in_a_line(streams: list[Tracebacks]) -> None:
    own = [[line.replace("rank 1/4", f"rank {rank}/4") for line in WHOLE] for rank in range(3)]
    assert shown(streams[1], *own[1]) == own[1]
    for rank in (0, 2):
        assert shown(streams[rank], "before", *own[rank], "after") == ["before", f"{own[rank][-1]} (with the traceback of rank 1)", "after"]


def test_one_worker_may_repeat_itself(streams: list[Tracebacks]) -> None:
    """Others that follow it are told in a line each time."""
    for _ in range(3):
        assert shown(streams[0], *WHOLE) == WHOLE
        assert shown(streams[1], *WHOLE) == [f"{ERROR} (with the traceback of rank 0)"]


@pytest.mark.parametrize("place", range(4))
def test_what_differs_is_shown(streams: list[Tracebacks], place: int) -> None:
    other = [f"{line}x" if number == place else line for number, line in enumerate(WHOLE)]
    shown(streams[0], *WHOLE)
    assert shown(streams[1], *other) == other


def test_chained_errors_are_several(streams: list[Tracebacks]) -> None:
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    second = [HEAD, *FRAME, "ValueError: 2"]
    assert shown(streams[0], *WHOLE, *between, *second) == [*WHOLE, *between, *second]
    note = " (with the traceback of rank 0)"
    assert shown(streams[1], *WHOLE, *between, *second) == [f"{ERROR}{note}", *between, f"ValueError: 2{note}"]


def test_one_that_breaks_off_is_shown(streams: list[Tracebacks]) -> None:
    assert shown(streams[0], HEAD, *FRAME, *WHOLE) == [HEAD, *FRAME, *WHOLE]
    assert shown(streams[0], HEAD, *FRAME) == []
    assert streams[0].release() == [HEAD, *FRAME]
    assert shown(streams[0], *FRAME, ERROR) == [*FRAME, ERROR]


def test_one_without_end_is_shown_as_it_comes(streams: list[Tracebacks]) -> None:
    lines = [HEAD, *(" more" for _ in range(2000))]
    assert shown(streams[0], *lines) + streams[0].release() == lines
    assert len(shown(streams[0], *lines)) > 1000


def test_only_the_last_ones_are_remembered(streams: list[Tracebacks]) -> None:
    """Whoever logs errors for days must not fill the launcher's memory."""
    shown(streams[0], *WHOLE)
    for number in range(100):
        shown(streams[0], HEAD, *FRAME, f"ValueError: {number}")
    assert shown(streams[1], HEAD, *FRAME, "ValueError: 99") == ["ValueError: 99 (with the traceback of rank 0)"]
    assert shown(streams[1], *WHOLE) == WHOLE
    assert len(streams[0]._told._whose) < 100
