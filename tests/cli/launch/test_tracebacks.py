"""Tracebacks on their way from the workers to the console."""

from collections.abc import Iterable

import pytest

from shardnet.cli.launch import tracebacks as module
from shardnet.cli.launch.tracebacks import Told, Tracebacks

HEAD = "Traceback (most recent call last):"
FRAME = ['  File "train.py", line 3, in main', "    work()"]
ERROR = "shardnet.errors.PeerLost: [rank 1/4 epoch 1 step 7] rank 3 (10.0.0.1:7000) lost during barrier #3"
WHOLE = [HEAD, *FRAME, ERROR]
GROUP = [
    f"  + Exception Group {HEAD}",
    '  |   File "train.py", line 3, in main',
    "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
    "  +-+---------------- 1 ----------------",
    f"    | {HEAD}",
    "    | ValueError: [rank 1/4 epoch 1 step 7] no",
    "    +------------------------------------",
]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def streams(told: Told) -> list[Tracebacks]:
    return [Tracebacks(told, lambda rank=rank: f"rank {rank}") for rank in range(3)]  # type: ignore[misc]


def fed(tracebacks: Tracebacks, lines: Iterable[str]) -> list[str]:
    return [out for line in lines for out in tracebacks.feed(line)]


def shown(tracebacks: Tracebacks, lines: Iterable[str]) -> list[str]:
    """What is shown once the stream has been quiet for a while."""
    return [*fed(tracebacks, lines), *tracebacks.release()]


def short(error: str = ERROR, rank: int = 0) -> list[str]:
    return [f"{error} (with the traceback of rank {rank})"]


def test_lines_come_at_once(streams: list[Tracebacks]) -> None:
    lines = ["step 1", " indented", "\tindented", "", ERROR, f" {HEAD}"]
    assert fed(streams[0], lines) == lines
    assert streams[0].held_s is None


@pytest.mark.parametrize("lines", [WHOLE, [*WHOLE, "\tsize mismatch for a", "  for b"], GROUP])
def test_a_traceback_comes_in_one_piece(streams: list[Tracebacks], lines: list[str]) -> None:
    assert fed(streams[0], lines) == []
    assert streams[0].held_s == pytest.approx(module.HELD_S)
    assert streams[0].feed("step 2") == [*lines, "step 2"]
    assert streams[0].held_s is None


@pytest.mark.parametrize(("lines", "error"), [(WHOLE, ERROR), ([*WHOLE, "\tsize mismatch"], ERROR), (GROUP, GROUP[2].removeprefix("  | "))])
def test_what_is_the_same_but_for_its_rank_is_told_in_a_line(streams: list[Tracebacks], lines: list[str], error: str) -> None:
    own = [[line.replace("rank 1/4", f"rank {rank}/4") for line in lines] for rank in range(3)]
    assert shown(streams[1], own[1]) == own[1]
    for rank in (0, 2):
        expected = short(error.replace("rank 1/4", f"rank {rank}/4"), 1)
        assert shown(streams[rank], ["before", *own[rank], "after"]) == ["before", *expected, "after"]


def test_one_worker_may_repeat_itself(streams: list[Tracebacks]) -> None:
    """It may, whatever its name is by now. Others with the same traceback get one line each time."""
    for _ in range(3):
        assert shown(streams[0], WHOLE) == WHOLE
        assert shown(streams[1], WHOLE) == short()
    streams[0]._label = lambda: "rank 7"
    assert shown(streams[0], WHOLE) == WHOLE


@pytest.mark.parametrize("place", range(4))
def test_what_differs_is_shown(streams: list[Tracebacks], place: int) -> None:
    other = [line.replace("r", "x") if number == place else line for number, line in enumerate(WHOLE)]
    shown(streams[0], WHOLE)
    assert shown(streams[1], other) == other


def test_chained_errors_are_several(streams: list[Tracebacks]) -> None:
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    second = [HEAD, *FRAME, "ValueError: 2"]
    assert shown(streams[0], [*WHOLE, *between, *second]) == [*WHOLE, *between, *second]
    assert shown(streams[1], [*WHOLE, *between, *second]) == [*short(), *between, *short("ValueError: 2")]


def test_one_that_breaks_off_is_shown(streams: list[Tracebacks]) -> None:
    for stream in streams:
        assert shown(stream, [HEAD, *FRAME, *WHOLE[:2]]) == [HEAD, *FRAME, *WHOLE[:2]]
        assert shown(stream, [HEAD, *FRAME, "", "x"]) == [HEAD, *FRAME, "", "x"]


def test_none_is_held_for_long(streams: list[Tracebacks], clock: Clock) -> None:
    """This holds whether more of the traceback comes or not."""
    assert fed(streams[0], [HEAD, FRAME[0]]) == []
    clock.now_s += 0.9 * module.HELD_S
    assert fed(streams[0], FRAME[1:]) == []
    assert streams[0].held_s == pytest.approx(0.1 * module.HELD_S)
    clock.now_s += 0.2 * module.HELD_S
    assert streams[0].held_s == 0.0
    assert fed(streams[0], [" more", ERROR]) == [HEAD, *FRAME, " more", ERROR]


def test_only_what_has_just_been_shown_is_referred_to(streams: list[Tracebacks], told: Told) -> None:
    for away, again in ((100, short()), (1000, WHOLE)):
        told.forget()
        shown(streams[0], WHOLE)
        told.count(away)
        assert shown(streams[1], WHOLE) == again
    assert len(told._shown) == 1
    told.forget()
    assert shown(streams[2], WHOLE) == WHOLE
