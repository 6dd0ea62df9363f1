"""Slices of parameters that are cut and joined with all that belongs to them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import UsageError
from shardnet.state.piece import VALUES, Piece, Span, covered, join
from shardnet.state.snapshot import Snapshot


def piece(start: int, stop: int) -> Piece:
    values = torch.arange(start, stop, dtype=torch.float32)
    return Piece(Span("weight", start, stop), {VALUES: values, "exp_avg": -values, "step": torch.tensor(4.0), "rate": 0.5})


@given(st.integers(1, 20), st.lists(st.integers(0, 20), max_size=4))
def test_cutting_and_joining_gives_what_was_there(numel: int, cuts: list[int]) -> None:
    bounds = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    parts = [piece(0, numel).cut(start, stop) for start, stop in pairwise(bounds)]
    joined = join(parts)
    assert joined.span == Span("weight", 0, numel)
    assert same(joined.state, piece(0, numel).state)


def test_a_whole_parameter_keeps_its_shape() -> None:
    matrix = Piece(Span("weight", 0, 6), {VALUES: torch.zeros(2, 3), "rows": torch.zeros(2)})
    assert matrix.cut(0, 6) is matrix
    assert join([matrix]) is matrix
    with pytest.raises(UsageError, match=r"the optimizer's rows of weight has 2 elements for a slice of 6: .* use ZeroOptimizer"):
        matrix.cut(0, 3)


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({"scale": torch.ones(2)}, {"scale": torch.ones(2)}, "scale of weight has 2 elements for a slice of 4: .* use ZeroOptimizer"),
        ({"scale": torch.ones(4)}, {"scale": torch.ones(2)}, "scale of weight has 2 elements for a slice of 4"),
        ({"history": [torch.ones(4)]}, {"history": [torch.ones(4)]}, "history of weight has tensors in a list for a slice of 4"),
        ({"by": {"a": (torch.tensor(1.0),)}}, {"by": {"a": (torch.tensor(1.0),)}}, "by of weight has tensors in a dict"),
        ({"exp_avg": torch.ones(4)}, {}, r"\[0:4\] and \[4:8\] of weight cannot be joined, .*: exp_avg in the first, none in the second"),
        ({"name": "a"}, {"name": "b"}, "name is 'a' in the first, 'b' in the second"),
    ],
)
def test_what_belongs_to_one_slice_alone_is_not_joined(one: dict[str, Any], other: dict[str, Any], why: str) -> None:
    parts = [Piece(Span("weight", 4 * at, 4 * at + 4), {VALUES: torch.zeros(4), **state}) for at, state in enumerate((one, other))]
    with pytest.raises(UsageError, match=why):
        join(parts)
    for part in parts:
        assert join([part]) is part
        assert part.cut(0, 8) is part


def test_of_different_numbers_the_first_is_taken_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer may note the norm of what it has, which it computes again in each step."""
    norms: list[Any] = [torch.tensor(0.5), torch.tensor([0.25])]
    for name in ("weight", "bias"):
        parts = [Piece(Span(name, at, at + 2), {VALUES: torch.zeros(2), "norm": norm}) for at, norm in zip((0, 2), norms, strict=True)]
        assert join(parts).state["norm"] == 0.5
    assert caplog.text.count("differ in 'norm' of the optimizer's state; all get the first slice's value") == 1


def test_what_is_the_same_for_all_slices_is_joined() -> None:
    same_for_all: dict[str, Any] = {
        "step": torch.tensor(3.0),
        "bad": torch.tensor(float("nan")),
        "n": 2,
        "betas": (0.9, 0.99),
        "none": None,
    }
    parts = [Piece(Span("weight", at, at + 2), {VALUES: torch.zeros(2), **same_for_all}) for at in (0, 2)]
    assert join(parts).state.keys() == {VALUES, *same_for_all}


def test_what_belongs_to_one_slice_alone_is_not_cut() -> None:
    whole = Piece(Span("weight", 0, 4), {VALUES: torch.zeros(4), "history": [torch.ones(4)]})
    with pytest.raises(UsageError, match="history of weight has tensors in a list"):
        whole.cut(0, 2)


def test_what_covers_a_parameter() -> None:
    assert covered([Span("a", 3, 7), Span("a", 0, 4)], 7)
    assert not covered([Span("a", 0, 3), Span("a", 4, 7)], 7)
    assert not covered([Span("a", 0, 6)], 7)
    assert not covered([], 1)
    assert covered([], 0)


def test_a_snapshot_is_a_copy_in_memory_that_stays() -> None:
    snapshot = Snapshot()
    tensor = torch.arange(6.0).reshape(2, 3)
    value: dict[Any, Any] = {"a": tensor.t(), "b": [torch.tensor(True), (1, None)], 3: "text"}
    assert snapshot.take(value)
    where = snapshot.payload.data_ptr()
    tensor += 1
    found = snapshot.value()
    assert torch.equal(found["a"], tensor.t() - 1)
    assert (bool(found["b"][0]), found["b"][1], found[3]) == (True, (1, None), "text")
    assert not snapshot.take(value), "nothing but numbers in tensors has changed"
    assert snapshot.payload.data_ptr() == where
    assert torch.equal(snapshot.value()["a"], tensor.t())
    assert snapshot.take({"other": torch.ones(1000)})


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key] for key, value in one.items()
    )
