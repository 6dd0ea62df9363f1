"""A segment's private side: what is written there, and what it costs if nothing is written."""

import errno
import mmap
import os
import resource
from collections.abc import Iterator

import pytest

from shardnet.transport.shared_memory import Segment, mapping

PAGES = 512
SIZE = PAGES * mmap.PAGESIZE - 100


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(SIZE)
    made.shared[:] = 1
    yield made
    made.close()


@pytest.mark.parametrize("place", [0, 5 * mmap.PAGESIZE - 1, SIZE - 1])
def test_what_was_written_is_forgotten(segment: Segment, place: int) -> None:
    segment.private[place] = 7
    assert segment.shared[place] == 1
    segment.refresh()
    assert (segment.private == 1).all()


def test_what_others_write_is_seen(segment: Segment) -> None:
    """Also where nothing is mapped again."""
    assert (segment.private == 1).all()
    segment.refresh()
    segment.shared[:] = 2
    assert (segment.private == 2).all()


def test_where_nothing_was_written_pages_stay_mapped(segment: Segment) -> None:
    read_all(segment)
    segment.refresh()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    read_all(segment)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < PAGES / 64  # the system maps 16 at once


def test_a_system_that_does_not_say_what_was_written(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(start: int, end: int) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for answer in (forbidden, lambda start, end: bytes(8 * (end - start)), lambda start, end: b""):
        monkeypatch.setattr(mapping, "_page_map", answer)
        segment.private[:] = 7
        segment.refresh()
        assert (segment.private == 1).all()


def read_all(segment: Segment) -> None:
    assert segment.private[:: mmap.PAGESIZE].any()
