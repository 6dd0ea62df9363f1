"""Forwards that write to parameters: writes that would be lost are refused, and the others are as in one process."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
X = torch.linspace(-1, 1, 32).reshape(8, 4)
SHARDED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


def weights(*shape: int, start: float) -> nn.Parameter:
    return nn.Parameter(torch.linspace(start, start + 2, torch.Size(shape).numel()).sin().reshape(shape))


class Renormed(nn.Module):
    """Renormalises rows that have become too long, as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, max_norm=0.5, _weight=weights(6, 4, start=0.0).data)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(len(x)) % 6)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """In place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = weights(4, 4, start=1.0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))
        return F.linear(x, self.weight)


class Replaced(Normed):
    """With memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = F.normalize(self.weight.data, dim=1)
        return F.linear(x, self.weight)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, weights(4, 1, start=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) @ self.head


def steps(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


WRITERS = [Renormed, Normed, Replaced]


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("units", [None, WRITERS])
def test_what_would_be_lost_is_refused(writer: type[nn.Module], strategy: ShardingStrategy, units: list[type[nn.Module]] | None) -> None:
    name = "inner.embedding.weight" if writer is Renormed else "inner.weight"

    def work(backend: Backend) -> tuple[Tensor, Tensor]:
        model = FSDP(Around(writer()), backend, units=units and [writer], strategy=strategy)
        before = model.full_state_dict()[name]
        for grad in (False, True):
            with torch.set_grad_enabled(grad), pytest.raises(StateError, match=rf"^{name} was written to within the forward of \w+, where"):
                model(X)
        with torch.inference_mode(), pytest.raises(StateError, match="the new values are lost"):
            model(X)
        return before, model.full_state_dict()[name]

    for before, after in run_ranks(2, work):
        assert torch.equal(before, after)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_model_goes_on_when_it_writes_no_more(strategy: ShardingStrategy) -> None:
    """Also if the parameter was given other memory with another shape."""

    class Once(Normed):
        writes = True

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                self.weight.data = torch.ones(1, 4)
            return F.linear(x, self.weight)

    def work(backend: Backend) -> list[Tensor]:
        inner = Once()
        model = FSDP(Around(inner), backend, units=[Once], strategy=strategy)
        with pytest.raises(StateError, match="was written to"):
            model(X)
        inner.writes = False
        return steps(model)

    inner = Once()
    inner.writes = False
    losses = steps(Around(inner))
    for found in run_ranks(2, work):
        torch.testing.assert_close(found, losses)


@pytest.mark.parametrize("writer", WRITERS)
def test_where_a_rank_has_all_of_it_it_lasts(writer: type[nn.Module]) -> None:
    def work(backend: Backend) -> tuple[list[Tensor], Tensor]:
        model = FSDP(Around(writer()), backend, units=[writer], strategy=ShardingStrategy.NO_SHARD)
        return steps(model), model.full_state_dict()["head"]

    alone = Around(writer())
    expected = steps(alone), alone.head.detach()
    for found in run_ranks(2, work):
        torch.testing.assert_close(found, expected)


def test_within_summon_full_params() -> None:
    def work(backend: Backend) -> list[Tensor]:
        inner = Around(nn.Linear(4, 4))
        model = FSDP(inner, backend, units=[nn.Linear])
        before = model.full_state_dict()
        with pytest.raises(StateError, match=r"^head was written to within summon_full_params\(\)"), model.summon_full_params():
            inner.head.zero_()
        with pytest.raises(ValueError, match="first"), model.summon_full_params():  # noqa: PT012 - nothing else is told then
            inner.head.zero_()
            raise ValueError("first")
        assert all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items())
        return steps(model)

    first, second = run_ranks(2, work)
    torch.testing.assert_close(first, second)


# --- slices that change while others compute


class Momentum(nn.Module):
    """A network, and another that follows it by momentum: its slices are updated within the forward."""

    def __init__(self, change: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.query.weight, self.key.weight = weights(4, 4, start=0.5), weights(4, 4, start=3.0)
        self.followed = list(self.query.parameters()), list(self.key.parameters())
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            for mean, parameter in zip(*reversed(self.followed), strict=True):
                self.change(mean, parameter)
            key = self.key(x)
        return query * key  # type: ignore[no-any-return]


def in_place(mean: Tensor, parameter: Tensor) -> None:
    mean.lerp_(parameter, 0.5)


def by_data(mean: Tensor, parameter: Tensor) -> None:
    mean.data = mean.data.lerp(parameter, 0.5)


@pytest.mark.parametrize("change", [in_place, by_data])
@pytest.mark.parametrize("strategy", [*SHARDED, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_slices_of_a_unit_that_is_gathered_already(
    change: Callable[[Tensor, Tensor], object], strategy: ShardingStrategy, prefetch: int
) -> None:
    def work(backend: Backend) -> list[Tensor]:
        return steps(FSDP(Momentum(change), backend, units=[nn.Linear], strategy=strategy, prefetch=prefetch))

    if prefetch and strategy is not ShardingStrategy.NO_SHARD:
        with pytest.raises(StateError, match=r"^key.weight was written to in a forward that had already begun to gather it for key"):
            run_ranks(2, work)
        return
    expected = steps(Momentum(change))
    for losses in run_ranks(2, work):
        torch.testing.assert_close(losses, expected)


def test_a_prefetch_of_ones_own_bears_steps_that_change_nothing() -> None:
    """In that case the bits of all ranks are compared."""

    def work(backend: Backend) -> list[Tensor]:
        model = FSDP(Around(nn.Linear(4, 4)), backend, units=[nn.Linear])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for factor in (0.0, 1.0, 0.0):
            loss = model(X).square().mean()
            (factor * loss).backward()
            model.prefetch_forward_params()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    first, second = run_ranks(2, work)
    torch.testing.assert_close(first, second)
    assert first[0] == first[1] != first[2]
