"""torch's own DDP and FSDP2 on a GPU, over the backend "shardnet"."""

import asyncio
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardnet
from shardnet.testing import ClusterRunner
from tests.devices import needs_gpu
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.training import SAMPLES, optimizer_for

pytestmark = [needs_gpu, pytest.mark.timeout(120)]
STEPS = 3


def train(model: nn.Module, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    optimizer = optimizer_for(model.parameters())
    share = SAMPLES // world_size
    for batch in token_batches(STEPS, SAMPLES).cuda():
        loss_of(model, batch[rank * share :][:share]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): whole(parameter).detach().cpu() for name, parameter in model.named_parameters()}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def train_with_torch(rank: int, world_size: int, kind: str, folder: str) -> float:
    """Train; return the largest difference between a parameter and that of one process."""
    dist.init_process_group("shardnet", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        model: nn.Module = make_gpt().cuda()
        if kind == "DDP":
            model = DistributedDataParallel(model, bucket_cap_mb=0.02)
        else:
            for block in (module for module in model.modules() if isinstance(module, Block)):
                fully_shard(block)
            fully_shard(model)
        ours, alone = train(model, rank, world_size), train(make_gpt().cuda(), 0, 1)
        return max(float((value - alone[name]).abs().max()) for name, value in ours.items())
    finally:
        dist.destroy_process_group()


async def in_a_process(cluster: shardnet.Cluster, kind: str, folder: str) -> float:
    return await asyncio.to_thread(train_with_torch, cluster.rank, cluster.world_size, kind, folder)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_three_clipped_steps_equal_one_process(cluster: ClusterRunner, tmp_path: Path, kind: str) -> None:
    differences = cluster.run(in_a_process, 2, args=(kind, str(tmp_path)), processes=True, timeout_s=90)
    assert max(differences) < 2e-5
