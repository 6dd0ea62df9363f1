"""Small cases whose numbers are known by hand."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import Weighted
from tests.fsdp.ranks import run_ranks


def flat(*values: float) -> Weighted:
    return Weighted(*values)


def test_each_rank_holds_its_half() -> None:
    def work(backend: Backend) -> list[float]:
        model = FSDP(flat(10, 20, 30, 40), backend)
        assert model.strategy is ShardingStrategy.FULL_SHARD
        assert model.backend is backend
        return next(model.parameters()).tolist()

    assert run_ranks(2, work) == [[10, 20], [30, 40]]


def test_uneven_shards() -> None:
    def work(backend: Backend) -> list[float]:
        model = FSDP(flat(1, 2, 3, 4, 5, 6, 7), backend)
        assert model(torch.tensor(1.0)).item() == 28
        return next(model.parameters()).tolist()

    assert run_ranks(3, work) == [[1, 2, 3], [4, 5], [6, 7]]


def test_more_ranks_than_elements() -> None:
    def work(backend: Backend) -> tuple[list[float], list[float]]:
        model = FSDP(flat(3, 5), backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0)
        model(torch.tensor(1.0)).backward()
        optimizer.step()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.tolist(), weight.grad.tolist()

    assert run_ranks(4, work) == [([2.5], [1]), ([4.5], [1]), ([], []), ([], [])]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [False, True])
def test_forward_sees_the_whole_parameter(world_size: int, prefetch: bool) -> None:
    def work(backend: Backend) -> float:
        model = FSDP(flat(), backend)
        if prefetch:
            model.prefetch_forward_params()
        return float(model(torch.tensor(2.0)).item())

    assert run_ranks(world_size, work) == [20.0] * world_size


def test_gradients_are_the_mean() -> None:
    def work(backend: Backend) -> list[float]:
        model = FSDP(flat(), backend)
        model(torch.tensor(float(2 + 4 * backend.rank))).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_ranks(2, work) == [[4, 4], [4, 4]]


def test_rank_0s_parameters_and_buffers_reach_every_rank() -> None:
    class WithBuffers(Weighted):
        def __init__(self, rank: int) -> None:
            super().__init__(*(float(rank * 10 + index) for index in range(5)))
            self.register_buffer("seen", torch.tensor([rank + 0.5]))
            self.register_buffer("count", torch.tensor(rank), persistent=False)

    def work(backend: Backend) -> None:
        model = FSDP(WithBuffers(backend.rank), backend)
        assert model.full_state_dict()["weight"].tolist() == [0, 1, 2, 3, 4]
        assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {"seen": [0.5], "count": 0}

    run_ranks(3, work)


def test_world_of_one_passes_gradients_through() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(flat(), backend)
        model(torch.tensor(3.0)).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3, 3, 3, 3]
        with pytest.raises(ValueError, match="FSDP update_shards: expected 4 elements but got 2"):
            model.update_shards(torch.tensor([10.0, 20.0]))

    run_ranks(1, work)


def test_update_shards_takes_the_order_of_parameters() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), backend, units=[nn.Linear])
        held = torch.cat([parameter.detach() for parameter in model.parameters()])
        model.update_shards(held + 1)
        assert torch.equal(torch.cat([parameter.detach() for parameter in model.parameters()]), held + 1)
        model.broadcast_updated_params()  # nothing to do, but allowed
        with pytest.raises(UsageError, match=f"expected {held.numel()} elements but got {held.numel() + 1}"):
            model.update_shards(torch.zeros(held.numel() + 1))

    run_ranks(2, work)


def test_sync_before_any_forward_is_refused() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(StateError, match=r"Was forward\(\) called before backward\(\)\?"):
            FSDP(flat(), backend).sync_gradients()

    run_ranks(2, work)


def test_a_missing_gradient_counts_as_zeros() -> None:
    """Only rank 0 comes to its backward. The outermost unit is still gathered then, so that takes no collective."""

    def work(backend: Backend) -> list[float]:
        model = FSDP(flat(), backend)
        with model.no_sync():
            output = model(torch.tensor(6.0))
            if backend.rank == 0:
                output.backward()
        (weight,) = model.parameters()
        assert [parameter.grad for parameter in model.parameters()] == [None]
        model.sync_gradients()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_ranks(3, work) == [[2, 2], [2], [2]]


def test_sync_after_a_normal_backward_changes_nothing() -> None:
    def work(backend: Backend) -> list[float]:
        model = FSDP(flat(), backend)
        model(torch.tensor(1.0)).backward()
        model.sync_gradients()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_ranks(2, work) == [[1, 1], [1, 1]]


def test_wrong_arguments_are_refused_before_any_traffic() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="prefetch"):
            FSDP(flat(), backend, prefetch=-1)
        with pytest.raises(ValueError, match="no_such"):
            FSDP(flat(), backend, strategy="no_such")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no forward"):
            FSDP(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])), backend, units=[nn.ModuleList])
        with pytest.raises(UsageError, match="units must be"):
            FSDP(flat(), backend, units=["Linear"])  # type: ignore[list-item]

    run_ranks(1, work)


def test_wrapping_twice_and_converting_later_are_refused() -> None:
    def work(backend: Backend) -> None:
        inner = flat()
        model = FSDP(inner, backend)
        with pytest.raises(UsageError, match="already"):
            FSDP(nn.Sequential(model), backend)
        with pytest.raises(UsageError, match=f"0.weight is sharded already, in {type(inner).__name__} of another"):
            FSDP(nn.Sequential(inner), backend)
        with pytest.raises(StateError, match="before wrapping"):
            model.double()
        FSDP(model.unwrap(), backend)

    run_ranks(1, work)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_is_refused(make: Callable[[FSDP], object]) -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(StateError, match="full_state_dict"):
            make(FSDP(flat(), backend))

    run_ranks(1, work)


def test_a_copy_of_the_inner_module_is_refused_when_it_computes() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(flat(), backend)
        with pytest.raises(StateError, match="a copy of a sharded module"):
            copy.deepcopy(model.module)(torch.ones(()))
        model(torch.ones(()))

    run_ranks(1, work)
