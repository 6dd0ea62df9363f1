"""The reference run: the parity model under torch's DistributedDataParallel and ZeroRedundancyOptimizer over gloo.

Three processes train, once with each optimizer. Rank 0 writes `FOLDER/<optimizer>.npz`: the losses of the combined
batch and the parameters after the last step. The processes are forked once everything is imported, as those of
tests/fsdp/fsdp2_worker.py.
"""

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.fsdp.models import make_gpt, token_batches
from tests.zero.training import OPTIMIZERS, SAMPLES, STEPS, groups_of, parameters_of, train_step

WORLD_SIZE = 3


def train(kind: str, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_gpt()
    replica = DistributedDataParallel(model)
    optimizer_class, options = OPTIMIZERS[kind]
    groups: Any = groups_of(model)
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class, **options)
    share = SAMPLES // WORLD_SIZE
    losses = []
    for batch in token_batches(STEPS, SAMPLES):
        mean = torch.tensor(train_step(replica, optimizer, batch[rank * share :][:share]), dtype=torch.float64)
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD_SIZE)
    return losses, parameters_of(model)


def run_rank(rank: int, folder: Path) -> None:
    rendezvous = f"file://{folder / 'rendezvous'}"
    # a rank whose peers died ends, too
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    for kind in OPTIMIZERS:
        losses, parameters = train(kind, rank)
        if rank == 0:
            arrays = {name: value.numpy() for name, value in parameters.items()}
            np.savez(folder / f"{kind}.npz", losses=np.array(losses), **arrays)  # type: ignore[arg-type]  # a parameter is not called `allow_pickle`
    dist.destroy_process_group()


def main(folder: str) -> int:
    """Returns how many ranks failed."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, Path(folder)), daemon=True) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)
