"""Sums of sparse tensors; run by forked ranks. Each equals the sum of the dense tensors."""

# mypy: disable-error-code="no-untyped-call, union-attr, attr-defined, no-any-return, arg-type"

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardnet.errors import CollectiveMismatch, UsageError
from tests.interop import programs

Tensor = torch.Tensor
SHAPE = (7, 5, 3)


def main(folder: str, world_size: str, name: str) -> int:
    torch.sparse.check_sparse_tensor_invariants.enable()
    return programs.launch(globals()[name], folder, int(world_size))


def _tensor(rank: int, dtype: torch.dtype, sparse_dims: int = 1) -> Tensor:
    """A tensor as backward makes it: indices in any order, some several times. Each rank has another number of them, the last one none."""
    generator = torch.Generator().manual_seed(rank)
    count = 3 * (dist.get_world_size() - 1 - rank)
    places = torch.stack([torch.randint(0, size, (count,), generator=generator) for size in SHAPE[:sparse_dims]])
    values = torch.randint(-8, 8, (count, *SHAPE[sparse_dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(places, values, SHAPE)


def sums(rank: int, world_size: int, _: Path) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32):
        for dims in (1, 2, 3):
            right = torch.stack([_tensor(each, dtype, dims).to_dense() for each in range(world_size)]).sum(0)
            tensor = _tensor(rank, dtype, dims)
            assert dist.all_reduce(tensor) is None
            assert tensor.is_sparse
            assert torch.equal(tensor.to_dense(), right)
            work = dist.all_reduce(other := _tensor(rank, dtype, dims), async_op=True)
            work.wait()
            assert work.result()[0] is other
            assert torch.equal(other.to_dense(), right)
            if dtype.is_floating_point:
                dist.all_reduce(mean := _tensor(rank, dtype, dims), dist.ReduceOp.AVG)
                assert torch.equal(mean.to_dense(), right / world_size)
                dist.all_reduce(scaled := _tensor(rank, dtype, dims), dist._make_nccl_premul_sum(2.0))
                assert torch.equal(scaled.to_dense(), 2 * right)


def halves(rank: int, world_size: int, _: Path) -> None:
    """They are added as float32 and rounded once, like dense ones."""
    for dtype, values in ((torch.float16, [2048.0, 1.0, 1.0]), (torch.bfloat16, [256.0, 1.0, 1.0])):
        places = torch.zeros(1, 2, dtype=torch.int64)  # twice the same, so that a rank adds up, too
        dist.all_reduce(tensor := torch.sparse_coo_tensor(places, torch.tensor([values[rank], 0.0], dtype=dtype), (1,)))
        assert (tensor.dtype, tensor.to_dense().item()) == (dtype, sum(values))
    dist.all_reduce(tensor := torch.sparse_coo_tensor(places, torch.full((2,), 30000.0, dtype=torch.float16), (1,)), dist.ReduceOp.AVG)
    assert tensor.to_dense().item() == pytest.approx(60000, rel=1e-3)


def odd_shapes(rank: int, world_size: int, _: Path) -> None:
    """Tensors without a sparse dimension, or with rows without an element."""
    dist.all_reduce(whole := torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.int64), torch.ones(1, 3), (3,)))
    assert whole.to_dense().tolist() == [world_size] * 3
    dist.all_reduce(rows := torch.sparse_coo_tensor(torch.zeros(1, rank, dtype=torch.int64), torch.ones(rank, 0), (5, 0)))
    assert (rows.shape, rows.to_dense().shape) == ((5, 0), (5, 0))


def nothing(rank: int, world_size: int, _: Path) -> None:
    """No rank has a value anywhere."""
    tensor = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (5, 4))
    dist.all_reduce(tensor)
    assert (tensor._nnz(), tensor.shape) == (0, (5, 4))


def groups(rank: int, world_size: int, _: Path) -> None:
    """Sparse sums beside dense ones, in another group, and several at once."""
    group = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        tensor, dense = _tensor(rank, torch.float32), torch.ones(3)
        works = [dist.all_reduce(each, group=group, async_op=True) for each in (tensor, dense)]
        for work in reversed(works):
            work.wait()
        assert torch.equal(tensor.to_dense(), _tensor(0, torch.float32).to_dense())  # the last rank has nothing
        assert dense.tolist() == [2.0] * 3
    tensor = _tensor(rank, torch.float32)
    tensor.requires_grad_()
    with torch.no_grad():
        dist.all_reduce(tensor)
    assert tensor.requires_grad


def wrong(rank: int, world_size: int, _: Path) -> None:
    """All ranks are told of the error, and the next sum works."""
    one_place = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(
        CollectiveMismatch, match=rf"rank 0 has a tensor of shape \[4\] with 1 sparse dimensions, but rank {world_size - 1} .*\[5\]"
    ):
        dist.all_reduce(torch.sparse_coo_tensor(one_place, torch.ones(1), (5 if rank == world_size - 1 else 4,)))
    with pytest.raises(CollectiveMismatch, match=r"a sum of sparse tensors .* a mean of sparse tensors|a mean of sparse tensors .* a sum"):
        dist.all_reduce(_tensor(rank, torch.float32), dist.ReduceOp.AVG if rank else dist.ReduceOp.SUM)
    with pytest.raises(CollectiveMismatch, match="a sum of sparse tensors"):
        dist.all_reduce(torch.sparse_coo_tensor(one_place, torch.ones(1, dtype=torch.float64 if rank else torch.float32), (4,)))
    with pytest.raises(CollectiveMismatch, match="rank 0 is in"):
        dist.all_reduce(torch.sparse_coo_tensor(one_place, torch.ones(1), (4,)) if rank else torch.ones(4))
    for op, dtype, said in ((dist.ReduceOp.MAX, torch.float32, "max"), (dist.ReduceOp.AVG, torch.int64, "mean")):
        with pytest.raises(UsageError, match=rf"sparse tensors can be reduced with SUM .* only, got {said} of {dtype}"):
            dist.all_reduce(_tensor(rank, dtype), op)
    with pytest.raises(UsageError, match=r"layout torch\.sparse_coo"):
        dist.broadcast(_tensor(rank, torch.float32), 0)
    dist.all_reduce(tensor := _tensor(rank, torch.float32))
    assert tensor._nnz()


def _training(model: nn.Module, inner: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).square().mean().backward()
        assert inner[0].weight.grad.is_sparse  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def ddp(rank: int, world_size: int, _: Path) -> None:
    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(32, 1))

    batches = [torch.randint(0, 50, (4 * world_size, 4), generator=torch.Generator().manual_seed(step)) for step in range(3)]
    alone, inner = module(), module()
    found = _training(DistributedDataParallel(inner), inner, [batch.chunk(world_size)[rank] for batch in batches])
    torch.testing.assert_close(found, _training(alone, alone, batches), rtol=0, atol=1e-6)
    everybodys = [torch.empty_like(found[0]) for _ in range(world_size)]
    dist.all_gather(everybodys, found[0])
    assert all(torch.equal(each, found[0]) for each in everybodys)
