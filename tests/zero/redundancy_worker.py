"""The reference run: the parity model under torch's DistributedDataParallel and ZeroRedundancyOptimizer over gloo.

Four processes train: the first one alone, the first two, and so on up to all of them, with every optimizer, number of
micro-batches and compute dtype. Rank 0 writes `FOLDER/<world size>-<optimizer>-<micro-batches>-<dtype>.npz`: the losses
of the combined batch and the parameters after the last step. The processes are forked once everything is imported, like those
of tests/fsdp/fsdp2_worker.py.
"""

from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.fsdp.models import make_gpt, token_batches
from tests.training.forked import forked
from tests.zero.training import OPTIMIZERS, SAMPLES, STEPS, groups_of, parameters_of, train_step

WORLD_SIZES = (1, 2, 3, 4)
MICRO_BATCHES = (1, 3)
DTYPES = (torch.float32, torch.bfloat16)


def train(group: dist.ProcessGroup, kind: str, micro_batches: int, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, rank, world_size = make_gpt(), dist.get_rank(group), dist.get_world_size(group)
    replica = DistributedDataParallel(model, process_group=group)
    optimizer_class, options = OPTIMIZERS[kind]
    groups: Any = groups_of(model)
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class, process_group=group, **options)
    share = SAMPLES // world_size
    losses = []
    for batch in token_batches(STEPS, SAMPLES):
        mean = torch.tensor(train_step(replica, optimizer, batch[rank * share :][:share], micro_batches, dtype), dtype=torch.float64)
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / world_size)
    return losses, parameters_of(model)


def run_rank(rank: int, folder: Path) -> None:
    rendezvous = f"file://{folder / 'rendezvous'}"
    # with the timeout, a rank whose peers died ends too
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=max(WORLD_SIZES), timeout=timedelta(seconds=60))
    groups = [dist.new_group(list(range(world_size))) for world_size in WORLD_SIZES]
    for group, kind, micro_batches, dtype in product(groups, OPTIMIZERS, MICRO_BATCHES, DTYPES):
        if not isinstance(group, dist.ProcessGroup):
            continue  # this rank is not a member
        losses, parameters = train(group, kind, micro_batches, dtype)
        if rank == 0:
            arrays = {name: value.numpy() for name, value in parameters.items()}
            path = folder / f"{dist.get_world_size(group)}-{kind}-{micro_batches}-{dtype}.npz"
            np.savez(path, losses=np.array(losses), **arrays)  # type: ignore[arg-type]  # a parameter is not called `allow_pickle`
    dist.destroy_process_group()


def main(folder: str) -> int:
    """Returns how many ranks failed."""
    torch.set_num_threads(1)
    return forked(max(WORLD_SIZES), lambda rank: run_rank(rank, Path(folder)))
