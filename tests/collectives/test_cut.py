"""How blocks are cut into chunks."""

from hypothesis import given
from hypothesis import strategies as st

from shardnet.collectives.cut import Cut


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    step = draw(st.integers(1, 64))
    return Cut(step, draw(st.integers(1, step)), draw(st.integers(1, step)))


@given(cuts(), st.integers(0, 1000))
def test_chunks_follow_each_other_and_none_is_too_large(cut: Cut, length: int) -> None:
    chunks = list(cut.slices(length))
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])][: len(chunks)]
    assert (chunks[-1].stop if chunks else 0) == length
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert all(0 < size <= cut.step for size in sizes)
    assert sizes[:1] <= [cut.first]
    assert sizes == [cut.size(chunk.start, length) for chunk in chunks]


def test_the_last_ones_are_small() -> None:
    assert [chunk.stop for chunk in Cut(16, 8, 2).slices(64)] == [8, 24, 40, 52, 58, 61, 63, 64]
    assert [chunk.stop for chunk in Cut(16, 16, 16).slices(40)] == [16, 32, 40]
