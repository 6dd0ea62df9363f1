"""Clipping by the global norm: equal to one process, and equal on all ranks."""

import math

import pytest
import torch

from shardnet.backend import Backend
from shardnet.errors import UsageError
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_gradients
from tests.fsdp.ranks import run_ranks

FULL, GRAD, NONE, HYBRID = ShardingStrategy
BATCH = token_batches(1, 6)[0]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize(("strategy", "world_size", "node"), [(FULL, 3, None), (GRAD, 3, None), (NONE, 3, None), (HYBRID, 6, 3)])
def test_norm_and_gradients_equal_one_process(
    strategy: ShardingStrategy, world_size: int, node: int | None, norm_type: float, max_norm: float
) -> None:
    alone = make_gpt()
    loss_of(alone, BATCH).backward()  # type: ignore[no-untyped-call]
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)

    def work(backend: Backend) -> float:
        model = FSDP(make_gpt(), backend, units=[Block], strategy=strategy, intra_node_size=node)
        loss_of(model, BATCH.chunk(world_size)[backend.rank]).backward()  # type: ignore[no-untyped-call]
        total = model.clip_grad_norm_(max_norm, norm_type)
        check_gradients(model, alone, model._comms.shard_rank)
        return total.item()

    norms = run_ranks(world_size, work)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected.item(), rel=1e-5)


def test_ranks_without_elements_take_part() -> None:
    def work(backend: Backend) -> list[float]:
        model = FSDP(Weighted(1, 1), backend)
        model(torch.tensor(3.0)).backward()
        assert model.clip_grad_norm_(1.0, math.inf).item() == 3
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.tolist()

    first, second, third = run_ranks(3, work)
    assert first == second == pytest.approx([1.0])
    assert third == []


def test_not_a_number_shows_on_every_rank() -> None:
    def work(backend: Backend) -> bool:
        model = FSDP(Weighted(), backend)
        model(torch.tensor(math.nan if backend.rank else 1.0)).backward()
        return math.isnan(model.clip_grad_norm_(1.0).item()) and math.isnan(model.clip_grad_norm_(1.0, math.inf).item())

    assert run_ranks(2, work) == [True, True]


def test_a_norm_type_that_is_none_is_refused() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="norm_type"):
            FSDP(Weighted(), backend).clip_grad_norm_(1.0, 0.0)

    run_ranks(1, work)
