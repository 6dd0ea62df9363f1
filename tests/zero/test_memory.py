"""Counted bytes: a rank holds its share of the optimizer's state, and few packed gradients at once."""

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.zero import OptimizerShard, ZeroOptimizer
from tests.fsdp.models import make_gpt
from tests.fsdp.ranks import run_ranks

LIMIT = 4000  # bytes of a bucket, less than many parameters of the model


def held(optimizer: optim.Optimizer) -> tuple[int, int]:
    """Bytes of moments, and of step counters."""
    tensors = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(each.nbytes for each in tensors if each.dim()), sum(each.nbytes for each in tensors if not each.dim())


def step_once(backend: Backend) -> ZeroOptimizer:
    model = make_gpt()
    optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, backend)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("world_size", "moments"), [(1, [73608]), (2, [36808, 36800]), (4, [18408, 18400, 18400, 18400])])
def test_the_state_of_adam_in_bytes_by_rank(world_size: int, moments: list[int]) -> None:
    total = sum(parameter.numel() for parameter in make_gpt().parameters())
    counted = run_ranks(world_size, lambda backend: held(step_once(backend)))
    assert [each for each, _ in counted] == moments
    assert moments == [OptimizerShard.for_rank(rank, world_size, total).shard_memory_bytes for rank in range(world_size)]
    assert sum(moments) == OptimizerShard.for_rank(0, world_size, total).full_memory_bytes
    parameters = len(list(make_gpt().parameters()))
    assert sum(counters for _, counters in counted) <= 4 * (parameters + world_size - 1)  # one float32 for each piece


def test_gradients_are_reduced_in_slices_of_which_only_the_ranks_own_is_kept() -> None:
    def work(backend: Backend) -> tuple[int, int]:
        model = make_gpt()
        optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, backend, bucket_bytes=LIMIT)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.clip_grad_norm_(1.0)
        kept = sum(piece.grad.nbytes for piece in optimizer._sharded.pieces.values() if piece.grad is not None)
        optimizer.step()
        assert all(piece.grad is None for piece in optimizer._sharded.pieces.values())
        return kept, optimizer.memory.full_gradients.peak_bytes

    whole = sum(parameter.nbytes for parameter in make_gpt().parameters())
    largest = max(parameter.nbytes for parameter in make_gpt().parameters())
    reports = run_ranks(4, work)
    assert sum(kept for kept, _ in reports) == whole
    for kept, packed in reports:
        assert kept == pytest.approx(whole / 4, rel=0.02)
        assert 0 < packed <= 2 * max(largest, LIMIT)


def test_parameters_are_not_held_twice() -> None:
    def work(backend: Backend) -> None:
        layer = nn.Linear(50, 30)
        optimizer = ZeroOptimizer(layer.parameters(), optim.SGD, backend)
        storages = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *optimizer._sharded.pieces.values())}
        assert len(storages) == 1
        assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes + layer.bias.nbytes

    run_ranks(3, work)
