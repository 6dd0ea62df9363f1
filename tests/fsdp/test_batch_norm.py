"""A convolutional network with batch normalisation, under every strategy.

Parameters are the cluster's, running statistics each rank's own: after the first broadcast no buffer is ever sent. So a rank's
full_state_dict() has its own statistics, and what rank 0 saves has rank 0's, as with FSDP2 (and unlike DDP, which sends rank 0's
before each forward). Training does not depend on them; an evaluation does, and should use one rank's on all.
"""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from shardnet.zero import ZeroOptimizer
from tests.devices import on_test_device
from tests.fsdp.models import seeded
from tests.fsdp.ranks import run_ranks
from tests.fsdp.replicas import train_replicas
from tests.fsdp.training import Run, optimizer_for
from tests.zero.training import OPTIMIZERS

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy
WORLD_SIZE = 4
STEPS = 5


class Residual(nn.Module):
    """ResNet's basic block, with a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.project = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.project(x))


class ResNet(nn.Module):
    """Images [samples, 3, 8, 8] to one of 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.blocks = nn.Sequential(Residual(5, 5, 1), Residual(5, 7, 2), Residual(7, 7, 1))
        self.head = nn.Linear(7, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def make(seed: int = 0) -> ResNet:
    with seeded(seed):
        return ResNet()


def shares(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    for _ in range(STEPS):
        yield on_test_device(torch.randn(6, 3, 8, 8, generator=generator, device="cpu")) + rank  # the ranks' statistics differ for certain


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    classes = torch.arange(len(images)) % 5
    return F.cross_entropy(model(images), classes)


@cache
def replicas(optimizer_kind: str) -> list[Run]:
    return train_replicas(make, map(shares, range(WORLD_SIZE)), loss_of, optimizer_kind)


@pytest.mark.parametrize("optimizer_kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("strategy", "node"), [(FULL, None), (GRAD, None), (NONE, None), (HYBRID, 2)])
def test_training_equals_that_of_replicas(strategy: ShardingStrategy, node: int | None, optimizer_kind: str) -> None:
    def work(backend: Backend) -> Run:
        model = FSDP(make(seed=backend.rank), backend, units=[Residual], strategy=strategy, intra_node_size=node)
        losses = train(model, optimizer_for(model.parameters(), optimizer_kind), backend.rank)
        return Run(losses, model.full_state_dict())

    check_replicas(run_ranks(WORLD_SIZE, work), optimizer_kind)


@pytest.mark.parametrize("optimizer_kind", ["adamw", "sgd"])
def test_a_sharded_optimizer_trains_as_replicas_do(optimizer_kind: str) -> None:
    """ZeRO-1, over the plain module."""

    def work(backend: Backend) -> Run:
        model = make(seed=backend.rank)
        optimizer_class, options = OPTIMIZERS[optimizer_kind]
        optimizer = ZeroOptimizer(model.parameters(), optimizer_class, backend, module=model, units=[Residual], **options)
        losses = train(model, optimizer, backend.rank)
        return Run(losses, {name: value.clone() for name, value in model.state_dict().items()})

    check_replicas(run_ranks(WORLD_SIZE, work), optimizer_kind)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for images in shares(rank):
        loss = loss_of(model, images)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_replicas(runs: list[Run], optimizer_kind: str) -> None:
    for run, replica in zip(runs, replicas(optimizer_kind), strict=True):
        assert run.losses == pytest.approx(replica.losses, rel=0, abs=1e-5)
        assert list(run.state) == list(replica.state)
        for name, value in replica.state.items():  # running_mean, running_var and num_batches_tracked of this rank included
            torch.testing.assert_close(run.state[name], value, rtol=0, atol=1e-5, msg=name)
    assert not torch.equal(runs[0].state["norm.running_mean"], runs[1].state["norm.running_mean"])
