"""The reference for results that depend on each rank's own batch: one replica per rank, all in one process, gradients averaged by hand.

Batch normalisation computes its statistics from the batch that it gets, and 16-bit activations are rounded batch by batch. So a
sharded training equals that of replicas on the same shares, and not that of one model on all of them together.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from tests.fsdp.training import Run, optimizer_for

Tensor = torch.Tensor


def train_replicas(
    make: Callable[[], nn.Module],
    shares: Iterable[Iterable[Tensor]],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    optimizer_kind: str = "adamw",
) -> list[Run]:
    """Every rank's run; `shares` has each rank's part of every step's batch."""
    per_rank = [list(own) for own in shares]
    replicas = [make() for _ in per_rank]
    optimizers = [optimizer_for(replica.parameters(), optimizer_kind) for replica in replicas]
    losses: list[list[float]] = [[] for _ in replicas]
    for step in zip(*per_rank, strict=True):
        for rank, (replica, share) in enumerate(zip(replicas, step, strict=True)):
            loss = loss_of(replica, share)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[rank].append(loss.item())
        _average_gradients(replicas)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [Run(own, replica.state_dict()) for own, replica in zip(losses, replicas, strict=True)]


def _average_gradients(replicas: list[nn.Module]) -> None:
    for same in zip(*(replica.parameters() for replica in replicas), strict=True):
        gradients = [parameter.grad for parameter in same if parameter.grad is not None]
        mean = torch.stack(gradients).mean(dim=0)
        for gradient in gradients:
            gradient.copy_(mean)
