"""Training steps: shardnet's FSDP, torch's FSDP2 over gloo and no communication, in turn."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.contestants import Alone, Trainer, parameter_bytes, trainers
from benchmarks.plan import Training
from benchmarks.race import Contender, race
from benchmarks.row import Row
from shardnet import Backend

# Trainings differ by this much: float32, another order of additions, and AdamW, which divides small differences by small numbers.
LOSS_TOLERANCE = 1e-3
GATHERS_AND_REDUCTIONS = 3  # of all parameters in one step: gathered in forward and in backward, reduced once


class Divergence(Exception):
    """Two trainings that should be the same are not, so their speeds are worth nothing."""


def measure(session: Training, backend: Backend, on_step: Callable[[int], None]) -> Iterator[Row]:
    """A row against FSDP2, no communication and each other way of shardnet; the same on all ranks. A collective."""
    contestants = trainers(session, backend)
    size = parameter_bytes(session)
    timings = race([Contender(trainer.name, trainer.step) for trainer in contestants], session.steps, on_step)
    losses = [_mean_losses(trainer) for trainer in contestants]
    check_losses(losses[0], losses[1])
    for peer, theirs, peer_losses in zip(contestants[1:], timings[1:], losses[1:], strict=True):
        yield Row.compare(
            timings[0],
            theirs,
            moved_bytes=GATHERS_AND_REDUCTIONS * (backend.world_size - 1) * size,
            kind=session.kind,
            op="train_step",
            ranks=backend.world_size,
            bytes=size,
            peer=peer.name,
            topology=str(session.topology),
            nodes=session.topology.nodes(backend.world_size),
            transport=str(session.transport),
            chunk_bytes=session.chunk_bytes,
            layers=session.layers,
            ours_loss=losses[0][-1].item(),
            peer_loss=None if isinstance(peer, Alone) else peer_losses[-1].item(),
        )


def _mean_losses(trainer: Trainer) -> torch.Tensor:
    """The loss of each step, warm-up included, as the mean over ranks."""
    losses = torch.tensor(trainer.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


def check_losses(ours: torch.Tensor, peer: torch.Tensor) -> None:
    """Raises Divergence at the step at which two trainings differ most. Both are [steps], the warm-up included."""
    difference, step = (ours - peer).abs().max(dim=0)
    if not difference <= LOSS_TOLERANCE:
        raise Divergence(f"step {step}: shardnet's loss is {ours[step]:.6f}, FSDP2's {peer[step]:.6f}")
