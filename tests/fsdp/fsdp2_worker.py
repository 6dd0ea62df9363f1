"""The reference run: the parity model under torch.distributed.fsdp.fully_shard over gloo.

    python -m tests.fsdp.fsdp2_worker FOLDER

Four processes train on 4 ranks, then two of them on 2. Rank 0 writes `FOLDER/<world size>.npz`: the losses of the
combined batch and the parameters after the last step. The processes are forked once everything is imported, before any
thread runs: importing torch and its compiler takes longer than the training.
"""

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.training import SAMPLES, STEPS, optimizer_for

WORLD_SIZES = (4, 2)


def train(mesh: DeviceMesh) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_gpt()
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_for(model.parameters())
    share = SAMPLES // mesh.size()
    losses = []
    for batch in token_batches(STEPS, SAMPLES):
        loss = loss_of(model, batch[mesh.get_rank() * share :][:share])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group())
        losses.append(mean.item() / mesh.size())
    return losses, {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def run_rank(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=max(WORLD_SIZES),
        timeout=timedelta(seconds=60),  # a rank whose peers died ends, too
    )
    for world_size in WORLD_SIZES:
        group = dist.new_group(list(range(world_size)))
        if isinstance(group, dist.ProcessGroup):  # this rank is a member
            losses, parameters = train(DeviceMesh.from_group(group, "cpu"))
            if rank == 0:
                arrays = {name: value.numpy() for name, value in parameters.items()}
                np.savez(folder / f"{world_size}.npz", losses=np.array(losses), **arrays)  # type: ignore[arg-type]
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Returns how many ranks failed."""
    torch.set_num_threads(1)
    optimizer_for(torch.nn.Linear(1, 1).parameters())  # the first one imports torch's compiler
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, folder), daemon=True) for rank in range(max(WORLD_SIZES))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
