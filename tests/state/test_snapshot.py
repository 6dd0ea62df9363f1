"""A snapshot is one value or another, also when memory runs out."""

import pytest
import torch

from shardnet.state import Snapshot


@pytest.mark.parametrize("part", [1, 2])
def test_one_that_could_not_be_taken_does_not_spoil_the_next(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for the header, or none for the payload. The next value is as the one that failed, or as the one before."""
    empty, made = torch.empty, list[int]()

    def scarce(*arguments: object, **options: object) -> torch.Tensor:
        made.append(1)
        if len(made) == part:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*arguments, **options)  # type: ignore[call-overload, no-any-return]  # whatever it is called with

    small, large = {"a": torch.arange(3.0)}, {"a": torch.arange(7.0), "another": torch.ones(2)}
    for value in (small, large):
        snapshot = Snapshot()
        snapshot.take(small)
        made.clear()
        with monkeypatch.context() as context:
            context.setattr(torch, "empty", scarce)
            with pytest.raises(RuntimeError, match="can't allocate"):
                snapshot.take(large)
        assert snapshot.take(value)
        taken = snapshot.value()
        assert taken.keys() == value.keys()
        assert all(torch.equal(taken[name], value[name]) for name in value)
