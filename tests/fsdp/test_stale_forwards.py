"""A step between a forward and its backward: refused where the gradients would be wrong, as in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
CHANGED = "has been modified by an inplace operation"
X = torch.linspace(-1, 1, 24).reshape(4, 6)


def layers() -> nn.Sequential:
    """The same in each thread."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).add(number).sin().view_as(parameter))
    return model


def train(model: nn.Module) -> list[Tensor]:
    """Two forwards, of which one is stepped before the other's backward; then two steps as they should be."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first, second = model(X).square().mean(), model(2 * X).square().mean()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=CHANGED):
        first.backward()
    del first, second
    optimizer.zero_grad()
    losses = []
    for _ in range(2):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_it_is_refused_as_in_one_process(world_size: int, strategy: ShardingStrategy, prefetch: int) -> None:
    def work(backend: Backend) -> list[Tensor]:
        return train(FSDP(layers(), backend, units=[nn.Sequential], strategy=strategy, prefetch=prefetch))

    expected = train(layers())
    for losses in run_ranks(world_size, work):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-6)


class ActorCritic(nn.Module):
    """Two networks that share nothing, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = layers(), layers()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(2 * x)


@pytest.mark.parametrize("units", [None, [nn.Sequential]])
def test_what_the_step_does_not_concern_goes_on(units: list[type[nn.Module]] | None) -> None:
    """Also if both are parts of one unit."""

    def train(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        inner = ActorCritic()
        model = wrap(inner)
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in (inner.actor, inner.critic)]
        losses = []
        for _ in range(3):
            both = [output.square().mean() for output in model(X)]
            for loss, optimizer in zip(both, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses += [loss.detach() for loss in both]
        return losses

    expected = train(lambda module: module)
    for losses in run_ranks(2, lambda backend: train(lambda module: FSDP(module, backend, units=units))):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
